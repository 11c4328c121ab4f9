"""A micro-batch, and which rows of a draw belong to which rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

EMPTY = -1


def slots(ids: np.ndarray, rank: int, world: int, micro_batch: int) -> np.ndarray:
    """This rank's rows of micro-batch ids, int64 [count, micro_batch], padded with -1.

    Ranks take contiguous slices of the sorted ids (neighbouring reads stay on one rank); `count` is the same
    on every rank and at least 1, so that an empty draw is still a step.
    """
    if not 0 <= rank < world or micro_batch < 1:
        raise ValueError(f"rank {rank} of {world} with micro-batches of {micro_batch}: not a possible layout")
    if np.any(ids[1:] < ids[:-1]):
        raise ValueError("ids must be sorted: every rank has to cut the same list at the same places")
    total = len(ids)
    mine = ids[rank * total // world : (rank + 1) * total // world]
    rows = np.full(row_count(total, world, micro_batch) * micro_batch, EMPTY, dtype=np.int64)
    rows[: len(mine)] = mine
    return rows.reshape(-1, micro_batch)


def row_count(total: int, world: int, micro_batch: int) -> int:
    """Rows of every rank if `world` ranks share `total` records."""
    largest = (total + world - 1) // world
    return max(1, (largest + micro_batch - 1) // micro_batch)


def even_width(total: int, world: int, micro_batch: int) -> int:
    """The smallest micro-batch with which `total` records take no more rows: for public batches, whose size is fixed,
    so that many ranks do not compute padding. A private draw's size must not show in any shape."""
    rows = row_count(total, world, micro_batch)
    return max(1, -(-total // (world * rows)))


@dataclass
class MicroBatch:
    """Model inputs by name, each with first dimension B, and which of the B slots hold a record."""

    inputs: dict[str, torch.Tensor]
    present: torch.Tensor

    def to(self, device: torch.device | str) -> MicroBatch:
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        return MicroBatch(inputs, self.present.to(device, non_blocking=True))


@dataclass(frozen=True)
class Fetched:
    """A micro-batch, and which of its records were bad. Private; to be reported once the batch is used."""

    batch: MicroBatch
    bad: dict[int, str]
