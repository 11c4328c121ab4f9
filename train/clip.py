"""Per-record clipping: the rule, what it costs in sensitivity, and how the clipped sum enters a sharded engine.

The engine sees one module whose forward returns a scalar. Inside it, a clip engine computes the clipped sum for
the micro-batch; the scalar's gradient with respect to each parameter *is* that sum, so the engine's own hooks
accumulate and reduce it at any sharding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from accounting.facts import ClippingFact
from accounting.plan import PrivacyPlan

UNIT_ROUNDOFF = 2.0**-24
# Norms add squares in fp32 along rows of at most this many elements, which is a relative error below 9.8e-4, and
# factors are rounded once. C is lowered by this much more.
LONGEST_ROW = 1 << 15
FACTOR_ROUNDING = 1e-3
MOST_ALLOWANCE = 0.05


class ClipError(ValueError):
    """Clipping cannot keep its promise here; the message says why."""


def rounding_allowance(largest_batch: int, micro_batch: int) -> float:
    """How far fp32 rounding may move the difference of two neighbouring sums, in units of C, at worst.

    A chain of k fp32 additions of terms with total norm S errs by at most S·k·u/(1-k·u), here S = B·C with every
    gradient aligned. No element goes through more additions than: one micro-batch, then all micro-batches on one
    rank. With W ranks it is one micro-batch, 1/W of the micro-batches and W ranks: no more, as long as there are not
    more ranks than micro-batches (`recipe.clip_rule` refuses that). Neighbouring sums may err in opposite directions.
    """
    chain = micro_batch + -(-largest_batch // micro_batch) + 1
    relative = chain * UNIT_ROUNDOFF / (1 - chain * UNIT_ROUNDOFF)
    return 2 * relative * largest_batch + FACTOR_ROUNDING


@dataclass(frozen=True)
class ClipRule:
    """Factor by which a record's gradient is scaled so that its norm is at most `bound`.

    The sensitivity is stated from the bound in use and what rounding may add to it, not from a config.
    """

    kind: Literal["flat", "automatic"]
    bound: float
    allowance: float
    gamma: float = 0.01

    @staticmethod
    def of(plan: PrivacyPlan, kind: Literal["flat", "automatic"], gamma: float, micro_batch: int) -> ClipRule:
        """C is lowered by the allowance, so that bound and rounding together stay within C."""
        allowance = rounding_allowance(plan.largest_batch, micro_batch)
        if allowance > MOST_ALLOWANCE:
            raise ClipError(
                f"sums of up to {plan.largest_batch} records in fp32 may err by {allowance:.2f}·C, more than the "
                f"{MOST_ALLOWANCE}·C by which C can be lowered; use a smaller expected_batch"
            )
        return ClipRule(kind, plan.clip_norm / (1 + allowance), allowance, gamma)

    @property
    def sensitivity(self) -> float:
        return self.bound * (1 + self.allowance)

    def factors(self, norms: Tensor) -> Tensor:
        """fp64 in, fp32 out; 0 for a norm that is zero or not finite. A record's scaled norm never exceeds `bound`.

        Also 0 where the factor is subnormal in fp32 (norms beyond C·1e38): it would be rounded by far more than
        FACTOR_ROUNDING.
        """
        factors = (self.bound / norms).clamp(max=1.0) if self.kind == "flat" else self.bound / (norms + self.gamma)
        usable = torch.isfinite(norms) & (norms > 0) & (factors >= torch.finfo(torch.float32).tiny)
        return torch.where(usable, factors, torch.zeros_like(factors)).to(torch.float32)

    def fact(self) -> ClippingFact:
        return ClippingFact(self.kind, self.sensitivity)


@dataclass(frozen=True)
class ClippedSum:
    """Sum over the present records of their clipped gradients, with what one record can add to it.

    `norms`, `losses` and `present` are private: they go to private sinks or nowhere.
    """

    gradients: dict[str, Tensor]
    sensitivity: float
    norms: Tensor
    losses: Tensor
    factors: Tensor


class PerSampleLosses(Protocol):
    """A model: inputs of B records in, B losses out, none depending on another record."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor: ...


class ClipEngine(Protocol):
    """Computes the clipped sum of a micro-batch for the trainable parameters of a model."""

    rule: ClipRule

    def prepare(self, model: nn.Module) -> None:
        """Sets the model up once, before the sharded engine wraps it."""
        ...

    def clipped_sum(self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor) -> ClippedSum: ...


class PrivateForward(nn.Module):
    """What the sharded engine wraps in a private phase: its scalar's gradient is the clipped sum."""

    def __init__(self, model: nn.Module, clip: ClipEngine) -> None:
        super().__init__()
        self.model = model
        self.clip = clip
        clip.prepare(model)
        self.observed: ClippedSum | None = None

    def forward(self, inputs: dict[str, Tensor], present: Tensor) -> Tensor:
        clipped = self.clip.clipped_sum(self.model, inputs, present)
        self.observed = clipped
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return _Deferred.apply([clipped.gradients[name] for name in trainable], *trainable.values())


class PlainForward(nn.Module):
    """What the engine wraps in a non-private phase: the sum of the losses of the records that are present."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.observed: Tensor | None = None

    def forward(self, inputs: dict[str, Tensor], present: Tensor) -> Tensor:
        losses = self.model(inputs)
        kept = torch.where(present, losses, torch.zeros_like(losses))
        self.observed = kept.detach()
        return kept.sum()


class _Deferred(torch.autograd.Function):
    """A scalar zero whose gradient with respect to each parameter is a tensor computed beforehand."""

    @staticmethod
    def forward(ctx, gradients: list[Tensor], *parameters: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, grad_output: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *(grad_output * gradient for gradient in ctx.gradients)


def assert_exact_matmul() -> None:
    """Reduced-precision products would void the rounding bound: switched off, and checked to be off."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if torch.get_float32_matmul_precision() != "highest":
        raise ClipError(
            "fp32 products are set to reduced precision (torch.set_float32_matmul_precision); leave it at 'highest'"
        )
