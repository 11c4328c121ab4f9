"""1/f fields: Gaussian noise whose amplitude falls with a power of the frequency, as in photographs.

The field is somewhat stretched along one axis, and its three channels are mixed as a random palette.
"""

from __future__ import annotations

import torch
from torch import Tensor

from murmuration.data.synthetic.random import Draws

EXPONENTS = (0.8, 2.0)


def spectrum(draws: Draws, side: int) -> Tensor:
    """float32 [batch, side, side, 3], mostly between 0 and 1."""
    exponent = draws.uniform(1, low=EXPONENTS[0], high=EXPONENTS[1])[:, 0]
    field = noise_field(draws, side, exponent, stretch=2 ** draws.uniform(1, low=-0.7, high=0.7)[:, 0])
    # Channels of photographs mostly rise and fall together; each also varies a little independently.
    mix = 0.3 * draws.normal(3, 3)
    mix[:, :, 0] += 0.75
    level = draws.uniform(1, 1, 3, low=0.35, high=0.65)
    contrast = draws.uniform(1, 1, 1, low=0.14, high=0.26)
    # Elementwise and not as a matrix product, whose summation order depends on the batch.
    colours = sum(field[:, i, ..., None] * mix[:, None, None, :, i] for i in range(3))
    return level + contrast * colours


def noise_field(draws: Draws, side: int, exponent: Tensor, stretch: Tensor) -> Tensor:
    """float32 [batch, 3, side, side]: three fields of mean 0, deviation 1 and amplitude ~ 1 / frequency^exponent."""
    across = torch.fft.rfftfreq(side, device=draws.device) * stretch[:, None]
    down = torch.fft.fftfreq(side, device=draws.device)
    frequency = (across[:, None, :] ** 2 + down[None, :, None] ** 2).sqrt()
    frequency[:, 0, 0] = 1.0
    amplitude = frequency ** -exponent[:, None, None]
    amplitude[:, 0, 0] = 0.0
    white = draws.normal(3, side, side)
    field = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude[:, None], s=(side, side))
    return field / (field.std(dim=(2, 3), keepdim=True) + 1e-6)
