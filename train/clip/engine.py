"""Per-record clipping: what a clip engine does, and what it reports about a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.clip.sums import Float32Sums, GradientSums, trainable_shapes

# Mixed precision by PyTorch's autocast: weights, norms and sums stay in fp32; products in layers need not.

Precision = Literal["fp32", "bf16", "fp16"]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# fp16 has few exponents: losses are scaled by a constant, a power of two, which is divided out of norms without
# rounding. It never adapts, since that would depend on private gradients.
LOSS_SCALE: dict[Precision, float] = {"fp32": 1.0, "bf16": 1.0, "fp16": 2.0**12}


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Whatever the caller's autocast, which would round norms and sums."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    if precision == "fp32":
        return nullcontext()
    # No cache of cast weights: it would tie them into a graph other than the records'.
    return torch.autocast(device.type, TYPES[precision], cache_enabled=False)


@dataclass(frozen=True)
class Clipped:
    """What clipping saw of a micro-batch, and what it promises.

    The tensors have length B and are private: they go to private sinks or nowhere. `norms` are over all trainable
    parameters; a record that is absent or not finite has factor 0.
    """

    losses: Tensor
    norms: Tensor
    factors: Tensor
    sensitivity: float
    doubtful: Tensor | None = None
    """Records whose norm was computed again from gradients written out in fp64, which is slow; None if none was."""
    ordinary: Tensor | None = None
    """A scalar on the device: whether the micro-batch was added, where that was left open (`add_if_ordinary`)."""
    measured: Tensor | None = None
    """The norms without what is added to them for the rounding of operands; None if nothing is."""


class ClipEngine(Protocol):
    """Adds the clipped gradients of a micro-batch's records to totals, for the trainable parameters of a model."""

    rule: ClipRule
    precision: Precision

    def prepare(self, model: nn.Module) -> None:
        """Sets the model up once, before the sharded engine wraps it; refuses a model that it cannot clip."""
        ...

    def add_clipped(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums,
        rule: ClipRule | None = None,
    ) -> Clipped:  # fmt: skip
        """One forward and one backward; records that are not `present` contribute exactly zero.

        `rule` is the step's, where C adapts; without one the engine clips by its own.
        """
        ...


@runtime_checkable
class DeferringClip(ClipEngine, Protocol):
    def add_if_ordinary(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums,
        rule: ClipRule | None = None,
    ) -> Clipped:  # fmt: skip
        """Like `add_clipped`, without waiting for the device: the sum is added only if every record's norm is finite
        and none is in doubt, as `Clipped.ordinary` will say. Otherwise nothing is added, and the caller must pass the
        micro-batch to `add_clipped`."""
        ...


def clipped_totals(
    clip: ClipEngine,
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    present: Tensor,
    shapes: Mapping[str, torch.Size] | None = None,
    rule: ClipRule | None = None,
) -> tuple[dict[str, Tensor], Clipped]:
    """The clipped sums of a single micro-batch, one for every trainable parameter, and what clipping saw.

    Where an engine shards the parameters themselves, their full `shapes` must be given.
    """
    shapes = trainable_shapes(model) if shapes is None else shapes
    sums = Float32Sums(shapes)
    clipped = clip.add_clipped(model, inputs, present, sums, rule)
    untouched = {name: shape for name, shape in shapes.items() if name not in sums.totals}
    zeros = {name: torch.zeros(shape, device=present.device) for name, shape in untouched.items()}
    return sums.totals | zeros, clipped


def assert_exact_matmul() -> None:
    """Switches reduced-precision products off, which would void the rounding bound, and checks that they are off."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if torch.get_float32_matmul_precision() != "highest":
        raise ClipError(
            "fp32 products are set to reduced precision (torch.set_float32_matmul_precision); leave it at 'highest'"
        )


class Observation(NamedTuple):
    """Private: a micro-batch's per-record losses and, if they were clipped, gradient norms, the sum's sensitivity, and
    which records' gradients had to be written out."""

    losses: Tensor
    norms: Tensor | None = None
    sensitivity: float = 0.0
    doubtful: Tensor | None = None
