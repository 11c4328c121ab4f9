"""Pictures as bytes, and what a model sees of them: pixels by the means and deviations that it was trained with.

Pictures wait and travel as bytes, which are a quarter of the same pictures in fp32, and are normalised where the model
runs. Host and GPU compute x * scale + shift with one rounding after each operation, so their bits agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from murmuration.data.channels import IMAGENET_MEAN, IMAGENET_STD, Channels


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
        images = torch.zeros(count, channels, height, width)
        scale, shift, source, target = self.scale, self.shift, pixels.numpy(), images.numpy()
        # One by one, because a picture fits into the processor's cache and a batch does not; by NumPy, which converts
        # bytes several times faster than PyTorch does.
        for row in np.flatnonzero(present.numpy()):
            np.multiply(source[row].transpose(2, 0, 1), scale, out=target[row], dtype=np.float32)
            target[row] += shift
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
