"""What the trainer needs of whatever shards the model; DeepSpeed stands behind it in `engine_deepspeed.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from data.batches import MicroBatch
from train.fragment import Fragment
from train.gradient import Update


@dataclass(frozen=True)
class Shard:
    """A flat fp32 tensor of this rank's optimizer, the parameters in it, and its optimizer state by name."""

    weights: Tensor
    fragments: Sequence[Fragment]
    state: dict[str, Tensor]


class Observation(NamedTuple):
    """Private: per-record losses of a micro-batch, gradient norms and the sum's sensitivity where clipping made it."""

    losses: Tensor
    norms: Tensor | None = None
    sensitivity: float = 0.0


@dataclass(frozen=True)
class Applied:
    """The engine's report of one update, over all ranks."""

    elements: int


class ShardedEngine(Protocol):
    device: torch.device
    model: nn.Module
    """The per-sample-loss model. Calling it is a collective act where the parameters themselves are sharded."""
    shapes: dict[str, torch.Size]
    """Of the trainable parameters."""
    trainable_elements: int
    partitioned: bool
    """Whether no rank holds the whole model (ZeRO-3)."""

    def accumulate(self, batch: MicroBatch) -> None:
        """Adds the micro-batch's sum to the logical step; nothing leaves the process."""
        ...

    def update(self, update: Update, learning_rate: float) -> Applied:
        """Reduces once, lets `update` finish the gradient, steps the optimizer, and checks that it all happened."""
        ...

    def discard(self) -> None:
        """Drops what the open step has summed, on all ranks, and leaves the engine fit to be saved."""
        ...

    def observe(self) -> Observation:
        """Of the last micro-batch, as it entered the sum."""
        ...

    def shards(self) -> list[Shard]: ...

    def optimizer_step(self) -> int: ...

    def set_optimizer_step(self, step: int) -> None: ...

    def whole_weights(self) -> dict[str, Tensor]:
        """The whole model's state on every rank."""
        ...

    def close(self) -> None: ...
