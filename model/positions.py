"""Fixed sin-cos position tables, in the layout of the published checkpoints.

As fixed tables they are buffers, so no clipping engine has to find per-sample gradients of a bare parameter, and
the trainable counts agree with the published ones (training them by accident is pitfall B11).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def sincos_1d(width: int, positions: Tensor) -> Tensor:
    """[len(positions), width]: all sines first, then all cosines, with wavelengths 2π … 10000·2π."""
    if width % 2:
        raise ValueError(f"a sin-cos table needs an even width, not {width}.")
    half = width // 2
    # float64: at large positions and high frequencies float32 angles are off in the third digit.
    steps = torch.arange(half, dtype=torch.float64, device="cpu") / half
    angles = positions.to("cpu", torch.float64).flatten()[:, None] * (10000.0**-steps)[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def text_positions(width: int, length: int) -> Tensor:
    """[1, length, width]."""
    return sincos_1d(width, torch.arange(length, device="cpu"))[None]


def image_positions(width: int, grid: int) -> Tensor:
    """[1, 1 + grid², width]; row 0 (the class token) is zero, patches follow row by row.

    The first half of each row encodes the column and the second half the row, in the order of the published tables.
    """
    if width % 4:
        raise ValueError(f"a 2-D sin-cos table needs a width that is a multiple of 4, not {width}.")
    index = torch.arange(grid * grid, device="cpu")
    columns = sincos_1d(width // 2, index % grid)
    rows = sincos_1d(width // 2, torch.div(index, grid, rounding_mode="floor"))
    table = torch.cat([columns, rows], dim=1)
    return torch.cat([torch.zeros(1, width, device="cpu"), table])[None]


def resized(table: Tensor, grid: int) -> Tensor:
    """A stored image table [1, 1 + g², width] for another grid: its first row unchanged, the others interpolated.

    Interpolation is bicubic, with averaging if the grid shrinks. A new sin-cos table would not do: stored tables may
    have been trained.
    """
    side = math.isqrt(table.shape[1] - 1)
    if table.dim() != 3 or table.shape[0] != 1 or side * side != table.shape[1] - 1:
        raise ValueError(f"{list(table.shape)} is not a table of positions [1, 1 + rows², width].")
    patches = table[:, 1:].float().unflatten(1, (side, side)).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, (grid, grid), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([table[:, :1].float(), patches.flatten(2).transpose(1, 2)], dim=1).to(table.dtype)
