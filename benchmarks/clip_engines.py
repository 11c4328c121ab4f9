"""The engines that are compared: each turns a micro-batch into an addition to fp32 totals of clipped gradients.

Peers are used as their documentation says, without noise and optimizer. Every engine works on its own copy of the
model, whose parameters share their storage with all others.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from clip_models import Inputs, Weights
from torch import Tensor, nn

from murmuration.model.attention import use_fused
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import ClipEngine
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import ExactSums, Float32Sums, trainable_shapes


class Contender(Protocol):
    """`note` says how the task was made easier for this engine."""

    note: str
    model: nn.Module

    def step(self, inputs: Inputs) -> None: ...

    def totals(self) -> dict[str, Tensor]: ...

    def clear(self) -> None: ...


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def casting(device: torch.device, bf16: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()


class NonPrivate:
    """Forward, backward, accumulation into .grad."""

    note = ""

    def __init__(self, weights: Weights, bound: float, bf16: bool, compiled: bool = False) -> None:
        self.model, self.bf16 = weights.copy(), bf16
        use_fused(self.model, True)
        self.forward: Callable[[Inputs], Tensor] = torch.compile(self.model) if compiled else self.model

    def step(self, inputs: Inputs) -> None:
        with casting(next(iter(inputs.values())).device, self.bf16):
            losses = self.forward(inputs)
        losses.sum().backward()

    def totals(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in trainable(self.model).items() if p.grad is not None}

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=False)


class Compiled(NonPrivate):
    note = "torch.compile"

    def __init__(self, weights: Weights, bound: float, bf16: bool) -> None:
        super().__init__(weights, bound, bf16, compiled=True)


class OwnEngine:
    """A clip engine of this project."""

    note = ""

    def __init__(self, weights: Weights, bound: float, bf16: bool) -> None:
        self.model, self.bf16 = weights.copy(), bf16
        use_fused(self.model, True)
        self.clip = self.engine(ClipRule("flat", bound, 0.0))
        self.clip.prepare(self.model)
        self.sums = self.totals_of(trainable_shapes(self.model))
        self.present = torch.ones(0, dtype=torch.bool)

    def totals_of(self, shapes: Mapping[str, torch.Size]) -> Float32Sums | ExactSums:
        """In fp32, as all that are compared."""
        return Float32Sums(shapes)

    def engine(self, rule: ClipRule) -> ClipEngine:
        return BookKeepingClip(rule, "bf16" if self.bf16 else "fp32")

    def step(self, inputs: Inputs) -> None:
        records = len(next(iter(inputs.values())))
        if records != len(self.present):  # a loader makes it, beside the step
            self.present = torch.ones(records, dtype=torch.bool, device=next(iter(inputs.values())).device)
        self.clip.add_clipped(self.model, inputs, self.present, self.sums)

    def totals(self) -> dict[str, Tensor]:
        return dict(self.sums.totals)

    def clear(self) -> None:
        for total in self.sums.totals.values():
            total.zero_()


class OwnFaster(OwnEngine):
    """Keeps per-record gradients where that is faster and memory allows: pays for small models."""

    note = "may use 1.5 times the memory"

    def engine(self, rule: ClipRule) -> ClipEngine:
        return BookKeepingClip(rule, "bf16" if self.bf16 else "fp32", hold=1.6)


class OwnExact(OwnEngine):
    """As runs of one rank add up: to fp64 totals, which takes time where a step has few records for its weights."""

    note = "totals in fp64, as in a run"

    def totals_of(self, shapes: Mapping[str, torch.Size]) -> ExactSums:
        return ExactSums(shapes, next(self.model.parameters()).device)


class OwnCompiled(OwnEngine):
    note = "blocks compiled"

    def step(self, inputs: Inputs) -> None:
        records = len(next(iter(inputs.values())))
        if records != len(self.present):
            rule, precision = self.clip.rule, self.clip.precision
            self.clip = BookKeepingClip(rule, precision, compiled=records)
            self.clip.prepare(self.model)
        super().step(inputs)


class Reference(OwnEngine):
    note = "vmap over the whole model"

    def engine(self, rule: ClipRule) -> ClipEngine:
        return ReferenceClip(rule)

    def step(self, inputs: Inputs) -> None:
        with casting(next(iter(inputs.values())).device, self.bf16):
            super().step(inputs)


class Peer(ABC):
    """Shared by the peers: their model has only plain layers, and their totals are stored on the parameters."""

    attribute = "summed_grad"

    def __init__(self, weights: Weights, bound: float, bf16: bool) -> None:
        self.model, self.bf16 = weights.plain_layers_only(), bf16
        self.shapes = {name: p.shape for name, p in weights.model.named_parameters()}
        use_fused(self.model, True)
        self.parameters = trainable(self.model)
        frozen = trainable(weights.model).keys() - self.parameters.keys()
        self.note = f"frozen for it: {', '.join(sorted(frozen))}" if frozen else ""
        self.sgd = torch.optim.SGD(self.parameters.values(), lr=0.0)
        self.attach(bound)

    @abstractmethod
    def attach(self, bound: float) -> None:
        """Puts the peer's own clipping around model and optimizer."""

    def totals(self) -> dict[str, Tensor]:
        found = {name: getattr(p, self.attribute, None) for name, p in self.parameters.items()}
        return {name: total.view(self.shapes[name]) for name, total in found.items() if total is not None}

    def clear(self) -> None:
        for total in self.totals().values():
            total.zero_()


class Opacus(Peer):
    """Per-sample gradients by hooks on layers."""

    def attach(self, bound: float) -> None:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        self.module = GradSampleModule(self.model, loss_reduction="sum", strict=False)
        self.optimizer = DPOptimizer(
            self.sgd, noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=1, loss_reduction="sum"
        )

    def step(self, inputs: Inputs) -> None:
        with casting(next(iter(inputs.values())).device, self.bf16):
            losses = self.module(inputs)
        losses.sum().backward()
        self.optimizer.clip_and_accumulate()
        for p in self.parameters.values():
            p.grad, p.grad_sample = None, None  # pyright: ignore[reportAttributeAccessIssue]


class OpacusGhost(Peer):
    """Norms without gradients, from a first backward pass; the second, of the weighted losses, gives the sum."""

    def attach(self, bound: float) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping

        self.module = GradSampleModuleFastGradientClipping(
            self.model,
            loss_reduction="sum",
            max_grad_norm=bound,  # pyright: ignore[reportArgumentType]
            use_ghost_clipping=True,
            strict=False,
        )
        self.optimizer = DPOptimizerFastGradientClipping(
            self.sgd, noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=1, loss_reduction="sum"
        )

    def step(self, inputs: Inputs) -> None:
        with casting(next(iter(inputs.values())).device, self.bf16):
            losses = self.module(inputs)
        losses.sum().backward(retain_graph=True)
        self.sgd.zero_grad(set_to_none=True)
        weighted = (self.module.get_clipping_coef() * losses).sum()
        self.module.disable_hooks()
        weighted.backward()
        self.module.enable_hooks()
        self.optimizer.accumulate()
        self.sgd.zero_grad(set_to_none=True)


class FastDP(Peer):
    """fastDP's book-keeping, if that package can be imported; it draws (zero) noise in the first micro-batch."""

    attribute = "summed_clipped_grad"

    def attach(self, bound: float) -> None:
        from fastDP import PrivacyEngine  # pyright: ignore[reportMissingImports]

        engine = PrivacyEngine(
            self.model, batch_size=1, sample_size=1 << 20, epochs=1, noise_multiplier=0.0, max_grad_norm=bound,
            clipping_mode="MixOpt", clipping_fn="Abadi", loss_reduction="sum",
        )  # fmt: skip
        engine.attach(self.sgd)

    def step(self, inputs: Inputs) -> None:
        with casting(next(iter(inputs.values())).device, self.bf16):
            losses = self.model(inputs)
        losses.sum().backward()


BASELINE = "nonprivate"
ENGINES: Mapping[str, Callable[[Weights, float, bool], Contender]] = {
    BASELINE: NonPrivate,
    "ours": OwnEngine,
    "ours_faster": OwnFaster,
    "ours_exact": OwnExact,
    "ours_compiled": OwnCompiled,
    "reference_vmap": Reference,
    "opacus": Opacus,
    "opacus_ghost": OpacusGhost,
    "fastdp": FastDP,
    "nonprivate_compiled": Compiled,
}


def available(name: str) -> bool:
    return name != "fastdp" or importlib.util.find_spec("fastDP") is not None
