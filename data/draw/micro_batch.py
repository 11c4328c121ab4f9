"""A micro-batch: which rows of a draw belong to which rank, and the model's inputs for them.

Pictures wait and travel as bytes, which are a quarter of the same pictures in fp32, and are normalised where the model
runs. Host and GPU compute x * scale + shift with one rounding after each operation, so their bits agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from murmuration.data.channels import IMAGENET_MEAN, IMAGENET_STD, Channels

EMPTY = -1
IMAGES = "images"
ROW_SHARE = "row_share"
"""The share with which a row's loss enters the loss of its slot, fp32 [B·R]; only where a slot has several rows. 0: the
row holds nothing, and its other inputs are zero."""
_ALIGNED = 64  # bytes, as PyTorch's own memory is: a library may choose its kernel by that


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


# Pictures as bytes, and what a model sees of them.


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In pages of 2 MiB where the system has them: NumPy asks for them and PyTorch does not. A batch's memory is new
    each time, and mapping it in small pages takes longer than normalising the pictures that it is for."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


@dataclass(frozen=True)
class Normalisation:
    """(x / 255 - mean) / std, in the form that suits uint8 pixels."""

    mean: Channels = IMAGENET_MEAN
    std: Channels = IMAGENET_STD

    def __post_init__(self) -> None:
        if not all(deviation > 0 for deviation in self.std):
            raise ValueError(f"standard deviations {self.std} are not positive")

    @property
    def scale(self) -> np.ndarray:
        return (1 / (255 * np.asarray(self.std, dtype=np.float32))).reshape(3, 1, 1)

    @property
    def shift(self) -> np.ndarray:
        return (-np.asarray(self.mean, dtype=np.float32) / np.asarray(self.std, dtype=np.float32)).reshape(3, 1, 1)

    def of(self, pixels: Tensor, present: Tensor) -> Tensor:
        """fp32 [B, 3, H, W] from uint8 [B, H, W, 3] on the same device; exactly zero in rows that hold nothing."""
        return self._on_host(pixels, present) if pixels.device.type == "cpu" else self._by_kernels(pixels, present)

    def _on_host(self, pixels: Tensor, present: Tensor) -> Tensor:
        count, height, width, channels = pixels.shape
        images = zeros((count, channels, height, width), torch.float32)
        scale, shift, source, target = self.scale, self.shift, pixels.numpy(), images.numpy()
        planes = np.empty((channels, height, width), np.uint8)
        # One by one, because a picture fits into the processor's cache and a batch does not; and by passes that each
        # do one thing, as NumPy has fast code for each of them and none for all in one.
        for row in np.flatnonzero(present.numpy()):
            planes[...] = source[row].transpose(2, 0, 1)
            image = target[row]
            np.copyto(image, planes)
            image *= scale
            image += shift
        return images

    def _by_kernels(self, pixels: Tensor, present: Tensor) -> Tensor:
        scale, shift = _factors(self, pixels.device)
        there = present.view(-1, 1, 1, 1)
        nothing = torch.zeros_like(shift)
        count, height, width, channels = pixels.shape
        images = torch.empty(count, channels, height, width, device=pixels.device)
        # Two kernels and no fused one, which would round once.
        torch.mul(pixels.permute(0, 3, 1, 2), torch.where(there, scale, nothing), out=images)
        return images.add_(torch.where(there, shift, nothing))


@lru_cache(maxsize=16)
def _factors(normalisation: Normalisation, device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept on the device: copying them for each micro-batch would make the host wait."""
    return torch.from_numpy(normalisation.scale).to(device), torch.from_numpy(normalisation.shift).to(device)


@dataclass(frozen=True)
class Pixels:
    """Pictures as they were decoded, uint8 [B, H, W, 3], and what makes the model's input of them."""

    values: Tensor
    normalisation: Normalisation


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
        images = there.pixels.normalisation.of(there.pixels.values, there.filled)
        return MicroBatch({IMAGES: images, **there.inputs}, there.present)

    def copied(self, device: torch.device | str) -> MicroBatch:
        """The same on a device, pixels as pixels."""
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        pixels = self.pixels
        if pixels is not None:
            pixels = Pixels(pixels.values.to(device, non_blocking=True), pixels.normalisation)
        return MicroBatch(inputs, self.present.to(device, non_blocking=True), pixels)

    def tensors(self) -> list[Tensor]:
        return [*self.inputs.values(), self.present, *([self.pixels.values] if self.pixels is not None else [])]


@dataclass(frozen=True)
class Fetched:
    """A micro-batch, and which of its records were bad. Private; to be reported once the batch is used."""

    batch: MicroBatch
    bad: dict[int, str]
