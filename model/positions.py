"""Fixed sin-cos position tables, in the layout of the published checkpoints.

Why fixed: they are buffers, so no clipping engine has to find per-sample gradients of a bare parameter, and
the trainable counts agree with the published ones (training them by accident is pitfall B11).
"""

from __future__ import annotations

import torch
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

    The first half of each row encodes the column and the second half the row: the order in which the
    published tables were made.
    """
    if width % 4:
        raise ValueError(f"a 2-D sin-cos table needs a width that is a multiple of 4, not {width}.")
    index = torch.arange(grid * grid, device="cpu")
    columns = sincos_1d(width // 2, index % grid)
    rows = sincos_1d(width // 2, torch.div(index, grid, rounding_mode="floor"))
    table = torch.cat([columns, rows], dim=1)
    return torch.cat([torch.zeros(1, width, device="cpu"), table])[None]
