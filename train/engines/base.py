"""What the trainer needs from an engine: `deepspeed_zero.py`, `fsdp2.py` or `local.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from murmuration.accounting.errors import NEW_SEGMENT
from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.clip.engine import Observation
from murmuration.train.clip.rule import ClipRule
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.update import Update

NOT_FINITE = f"the weights are no longer finite; resume with a lower learning rate and {NEW_SEGMENT}"


@dataclass(frozen=True)
class OptimizerShard:
    """A flat fp32 tensor of this rank's optimizer, its parameter fragments, and its optimizer state by name."""

    weights: Tensor
    fragments: Sequence[Fragment]
    state: dict[str, Tensor]


@dataclass(frozen=True)
class AppliedUpdate:
    """The engine's report of one update, over all ranks."""

    elements: int


class Engine(Protocol):
    device: torch.device
    model: nn.Module
    """The model, which returns per-record losses. Calling it is a collective operation where the parameters themselves
    are sharded."""
    shapes: dict[str, torch.Size]
    """Shapes of the trainable parameters."""
    trainable_elements: int
    partitioned: bool
    """Whether no rank has the whole model (ZeRO-3, FSDP2)."""

    def accumulate(self, batch: MicroBatch, rule: ClipRule | None = None) -> None:
        """Adds the micro-batch's sum to the logical step; in a private phase, no gradient leaves the process.

        `rule` is the step's clipping rule, where C adapts; without one, the clip engine's own applies.
        """
        ...

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        """Reduces once, lets `update` finish the gradient, steps the optimizer, and checks that all of it happened."""
        ...

    def discard(self) -> None:
        """Drops the partial sum of the open step, on all ranks, and leaves the engine in a state that can be saved."""
        ...

    def observe(self) -> Observation:
        """The observation of the last micro-batch, as it enters the sum. Until the update, its tensors may still be
        corrected in place."""
        ...

    def shards(self) -> list[OptimizerShard]: ...

    def optimizer_step(self) -> int: ...

    def set_optimizer_step(self, step: int) -> None: ...

    def whole_weights(self) -> dict[str, Tensor]:
        """The whole model's state on every rank."""
        ...

    def plain_model(self) -> nn.Module | None:
        """Where weights are sharded, an unsharded copy of the private model, unchanged by any engine, on every rank."""
        ...

    def close(self) -> None: ...


# Hashes of tensors, for checking whether two are identical bit for bit.


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def digests_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest_of(tensor) for name, tensor in tensors.items()}


def bytes_of(tensor: Tensor) -> bytes:
    """Works for any type, including bf16, which NumPy does not support."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


# Training mode and evaluation mode: nothing is dropped in a measurement, only in training.


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches to evaluation mode; afterwards restores the mode of each module, even after an error."""
    outer, before = model.training, modes_of(model)
    model.eval()
    try:
        yield
    finally:
        for name, module in model.named_modules():
            module.training = before.get(name, module.training)
        model.training = outer  # FSDP2's view of a model is not among the modules that it lists


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Asks the device once."""
    found = [torch.isfinite(tensor).all() for tensor in tensors]
    return not found or bool(torch.stack(found).all())


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Which modules are in training mode. A frozen part may be in evaluation mode while others are not."""
    return {name: module.training for name, module in model.named_modules()}
