"""Procedural textures for the non-private warm start of an encoder: four families, or all of them mixed.

They have the statistics that natural images have and flat shapes lack: dead leaves (occlusion at all scales), 1/f
spectra (correlation at all distances), fractals (self-similar outlines) and shaders (smooth shading). Record i of a
seed is a pure function of (seed, i): on a CPU byte for byte, in any batch and order; a GPU rounds a little otherwise.

Pictures per second and core at 224 px, on a core shared with other work (python benchmarks/synthetic.py): dead leaves
48, spectrum 197, fractals 34, shaders 206, mixed 63; JPEG encoding 3,023. Not measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from data.dead_leaves import dead_leaves
from data.draws import Draws
from data.fractals import fractals
from data.kinds import TEXTURES, Texture
from data.shaders import shaders
from data.spectrum import spectrum

_FAMILIES: tuple[Callable[[Draws, int], Tensor], ...] = (dead_leaves, spectrum, fractals, shaders)
_CHOICE = 7  # the branch of a record's stream that chooses its family


@torch.no_grad()
def textures(kind: Texture, seed: int, records: Sequence[int], side: int, device: torch.device | str = "cpu") -> Tensor:
    """uint8 [records, side, side, 3] on `device`."""
    where = torch.device(device)
    if where.type != "cpu":
        return _batch(kind, seed, records, side, where)
    # One by one: vectorised code may round the last elements of a row otherwise than the first, so a record in a
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
