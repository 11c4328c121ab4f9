"""Per-record clipping: the interface of clip engines, and how the clipped sum enters a sharded engine.

The engine sees one module whose forward returns a scalar. Inside it, a clip engine adds the clipped gradients of the
micro-batch to totals; the scalar's gradient with respect to each parameter *is* that total, so the engine's own hooks
accumulate and reduce it at any sharding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from train.clip_rule import ClipError, ClipRule
from train.sums import Float32Sums, GradientSums


@dataclass(frozen=True)
class Clipped:
    """What clipping a micro-batch saw: [B] each and private (private sinks or nowhere); and what it promises.

    `norms` are over all trainable parameters; a record that is absent or not finite has factor 0.
    """

    losses: Tensor
    norms: Tensor
    factors: Tensor
    sensitivity: float


class PerSampleLosses(Protocol):
    """A model: inputs of B records in, B losses out, none depending on another record."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor: ...


class ClipEngine(Protocol):
    """Adds the clipped gradients of a micro-batch's records to totals, for the trainable parameters of a model."""

    rule: ClipRule

    def prepare(self, model: nn.Module) -> None:
        """Sets the model up once, before the sharded engine wraps it; refuses what it could not clip."""
        ...

    def add_clipped(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums
    ) -> Clipped:
        """One forward and one backward; records that are not `present` contribute exactly zero."""
        ...


def clipped_totals(
    clip: ClipEngine, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor
) -> tuple[dict[str, Tensor], Clipped]:
    """The clipped sums of one micro-batch alone, one for every trainable parameter, with what clipping saw."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = Float32Sums(trainable)
    clipped = clip.add_clipped(model, inputs, present, sums)
    return {name: _or_zeros(sums.totals.get(name), p) for name, p in trainable.items()}, clipped


def _or_zeros(total: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.float32) if total is None else total


class PrivateForward(nn.Module):
    """What the sharded engine wraps in a private phase: its scalar's gradient is the clipped sum."""

    def __init__(self, model: nn.Module, clip: ClipEngine) -> None:
        super().__init__()
        self.model = model
        self.clip = clip
        clip.prepare(model)
        self.observed: Clipped | None = None

    def forward(self, inputs: dict[str, Tensor], present: Tensor) -> Tensor:
        totals, self.observed = clipped_totals(self.clip, self.model, inputs, present)
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return _Deferred.apply([totals[name] for name in trainable], *trainable.values())


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
