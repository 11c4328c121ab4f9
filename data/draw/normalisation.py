"""Pictures as bytes, and what a model sees of them: pixels by the means and deviations that it was trained with.

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

_ALIGNED = 64  # bytes, as PyTorch's own memory is: a library may choose its kernel by that


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

    def to(self, device: torch.device | str) -> Pixels:
        return Pixels(self.values.to(device, non_blocking=True), self.normalisation)

    def images(self, present: Tensor) -> Tensor:
        return self.normalisation.of(self.values, present)
