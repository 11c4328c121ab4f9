"""A micro-batch: which rows of a draw belong to which rank, and the model's inputs for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from murmuration.data.draw.normalisation import Pixels

EMPTY = -1
IMAGES = "images"
ROW_SHARE = "row_share"
"""The share with which a row's loss enters the loss of its slot, fp32 [B·R]; only where a slot has several rows. 0: the
row holds nothing, and its other inputs are zero."""


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
    return -(-total // (world * rows))


@dataclass
class MicroBatch:
    """Model inputs by name, and which of the B slots hold a record.

    The first dimension of an input is B; where a slot has R rows (views of a record, records of a unit), it is B·R, and
    the rows of a slot follow one another.

    Pictures may still be pixels. Then there is no input IMAGES, and `to` makes it: a caller who forgets that gets an
    error and not other numbers.
    """

    inputs: dict[str, Tensor]
    present: Tensor
    pixels: Pixels | None = None

    @property
    def rows(self) -> int:
        """R, the number of rows of every slot."""
        return len(self.inputs[ROW_SHARE]) // max(1, len(self.present)) if ROW_SHARE in self.inputs else 1

    @property
    def filled(self) -> Tensor:
        """Which of the rows hold something."""
        return self.inputs[ROW_SHARE] > 0 if ROW_SHARE in self.inputs else self.present

    def to(self, device: torch.device | str) -> MicroBatch:
        """The model's inputs on a device; of pixels, a quarter of the bytes of the input is transferred."""
        there = self.copied(device)
        if there.pixels is None:
            return there
        return MicroBatch({IMAGES: there.pixels.images(there.filled), **there.inputs}, there.present)

    def copied(self, device: torch.device | str) -> MicroBatch:
        """The same on a device, pixels as pixels."""
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        pixels = None if self.pixels is None else self.pixels.to(device)
        return MicroBatch(inputs, self.present.to(device, non_blocking=True), pixels)

    def tensors(self) -> list[Tensor]:
        return [*self.inputs.values(), self.present, *([self.pixels.values] if self.pixels is not None else [])]


@dataclass(frozen=True)
class Fetched:
    """A micro-batch, and which of its records were bad. Private; to be reported once the batch is used."""

    batch: MicroBatch
    bad: dict[int, str]
