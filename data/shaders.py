"""Smooth shading after the idea of shader art: a plane bent again and again by its own sines, then coloured.

The formulas are our own; no shader of anybody is ported, so none needs a licence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from data.draws import Draws

OCTAVES = 4


def shaders(draws: Draws, side: int) -> Tensor:
    """float32 [batch, side, side, 3] between -0.1 and 1.1."""
    x, y = _plane(draws, side)
    scale = draws.uniform(1, 1, low=0.8, high=1.2)
    for _ in range(OCTAVES):
        bend = draws.uniform(4, 1, 1, low=0.4, high=1.6)
        phase = draws.uniform(2, 1, 1, high=2 * math.pi)
        x, y = (
            x + bend[:, 0] / scale * torch.sin(bend[:, 1] * scale * y + phase[:, 0]),
            y + bend[:, 2] / scale * torch.sin(bend[:, 3] * scale * x + phase[:, 1]),
        )
        scale = scale * draws.uniform(1, 1, low=1.4, high=2.1)
    rate = draws.uniform(2, 1, 1, low=0.6, high=2.0)
    value = torch.sin(x * rate[:, 0]) + torch.cos(y * rate[:, 1])
    level, swing = draws.uniform(1, 1, 3, low=0.35, high=0.65), draws.uniform(1, 1, 3, low=0.15, high=0.45)
    speed, shift = draws.uniform(1, 1, 3, low=0.5, high=1.6), draws.uniform(1, 1, 3, high=2 * math.pi)
    return level + swing * torch.cos(speed * value[..., None] + shift)


def _plane(draws: Draws, side: int) -> tuple[Tensor, Tensor]:
    """Coordinates to begin with: flat, around a point (rings and spirals), or folded like a kaleidoscope."""
    zoom = draws.uniform(1, low=0.8, high=3.0)
    centre = draws.uniform(2, 1, low=-0.5, high=0.5)
    turn = draws.uniform(1, 1, high=2 * math.pi)
    grid = torch.linspace(-1, 1, side, device=draws.device)
    x, y = ((grid - centre[:, 0]) * zoom)[:, None, :], ((grid - centre[:, 1]) * zoom)[:, :, None]
    cos, sin = turn.cos(), turn.sin()
    x, y = cos * x + sin * y, cos * y - sin * x
    length, angle = (x * x + y * y).sqrt(), torch.atan2(y, x)
    arms = draws.choice(5, 1, 1) + 3
    wedge = 2 * math.pi / arms
    folded = (torch.remainder(angle, wedge) - wedge / 2).abs()
    # A whole number of windings, or a seam would show where the angle wraps.
    spiral = angle * (draws.choice(4, 1, 1) + 1)
    kind = draws.choice(4, 1, 1)
    ring, mirror = kind == 1, kind == 2
    return (
        torch.where(ring, 2 * length, torch.where(mirror, length * folded.cos(), x)),
        torch.where(ring, torch.sin(spiral) * length, torch.where(mirror, length * folded.sin(), y)),
    )
