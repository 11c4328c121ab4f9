"""Procedural textures for the non-private warm start of an encoder: four families, or all of them mixed.

They have the statistics that natural images have and flat shapes lack: dead leaves (occlusion at all scales), 1/f
spectra (correlation at all distances), fractals (self-similar outlines) and shaders (smooth shading). Record i of a
seed is a pure function of (seed, i): on a CPU byte for byte, in any batch and order; a GPU rounds slightly differently.

Pictures per second and core at 224 px, on a core shared with other work (python benchmarks/synthetic.py): dead leaves
48, spectrum 197, fractals 34, shaders 206, mixed 63; JPEG encoding 3,023. Not measured on a GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from murmuration.data.synthetic.dead_leaves import dead_leaves
from murmuration.data.synthetic.fractals import fractals
from murmuration.data.synthetic.kinds import TEXTURES, Texture
from murmuration.data.synthetic.random import Draws
from murmuration.data.synthetic.spectrum import spectrum

# Smooth shading in the manner of shader art: a plane bent again and again by its own sines, then coloured.
#
# The formulas are our own; no existing shader was ported, so no licence is needed.

OCTAVES = 4


def shaders(draws: Draws, side: int) -> Tensor:
    """float32 [batch, side, side, 3] between -0.1 and 1.1."""
    # Initial coordinates: flat, around a point (rings and spirals), or folded like a kaleidoscope.
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
    # The number of windings is whole, or a seam would show where the angle wraps.
    spiral = angle * (draws.choice(4, 1, 1) + 1)
    kind = draws.choice(4, 1, 1)
    ring, mirror = kind == 1, kind == 2
    x, y = (
        torch.where(ring, 2 * length, torch.where(mirror, length * folded.cos(), x)),
        torch.where(ring, torch.sin(spiral) * length, torch.where(mirror, length * folded.sin(), y)),
    )
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


_FAMILIES: tuple[Callable[[Draws, int], Tensor], ...] = (dead_leaves, spectrum, fractals, shaders)
_CHOICE = 7  # the branch of a record's stream that chooses its family


@torch.no_grad()
def textures(kind: Texture, seed: int, records: Sequence[int], side: int, device: torch.device | str = "cpu") -> Tensor:
    """uint8 [records, side, side, 3] on `device`."""
    where = torch.device(device)
    if where.type != "cpu":
        return _batch(kind, seed, records, side, where)
    # One by one: vectorised code may round the last elements of a row differently from the first, so a record in a
    # batch could differ from the same record alone.
    return torch.cat([_batch(kind, seed, [record], side, where) for record in records])


def _batch(kind: Texture, seed: int, records: Sequence[int], side: int, device: torch.device) -> Tensor:
    draws = Draws.of(seed, records, device)
    if kind != "mixed":
        return _bytes(_FAMILIES[TEXTURES.index(kind)](draws, side))
    chosen = draws.branch(_CHOICE).choice(len(_FAMILIES), 1)[:, 0]
    out = torch.empty(len(records), side, side, 3, dtype=torch.uint8, device=device)
    for number, family in enumerate(_FAMILIES):
        rows = (chosen == number).nonzero()[:, 0]
        if len(rows):
            out[rows] = _bytes(family(draws.some(rows), side))
    return out


def _bytes(picture: Tensor) -> Tensor:
    return (picture * 255 + 0.5).clamp_(0, 255).to(torch.uint8)
