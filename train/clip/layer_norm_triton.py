"""Per-record gradients of a LayerNorm's scale and shift in one pass over its input and its output gradient, on GPUs.

As separate operations, five passes over activations in fp32 take longer than the layer itself. Each program adds up the
tokens of one record in a fixed order, so a record's sums do not depend on its neighbours, and a replayed step
reproduces the same bits.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

COLUMNS, ROWS = 128, 16


@triton.jit
def _record_sums(  # pyright: ignore
    x, gradient, mean, inverse, scale, shift, tokens, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Each program handles some columns of one record: Σ g·(x - mean)·inverse and Σ g over its tokens."""
    record = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    scales, shifts = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for first in range(0, tokens, ROWS):
        token = first + tl.arange(0, ROWS)
        there = (token[:, None] < tokens) & (column[None, :] < width)
        row = record * tokens + token
        place = row[:, None] * width + column[None, :]
        upstream = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        middle = tl.load(mean + row, mask=token < tokens, other=0.0)
        spread = tl.load(inverse + row, mask=token < tokens, other=0.0)
        normal = (value - middle[:, None]) * spread[:, None]
        # A column out of range would add 0·(0 - mean): nothing, unless the mean is NaN.
        scales += tl.sum(tl.where(there, normal * upstream, 0.0), 0)
        shifts += tl.sum(upstream, 0)
    tl.store(scale + record * width + column, scales, mask=column < width)
    tl.store(shift + record * width + column, shifts, mask=column < width)


def record_sums(
    x: Tensor, gradient: Tensor, mean: Tensor, inverse: Tensor, records: int, width: int
) -> tuple[Tensor, Tensor]:
    """x and gradient of records · tokens · width elements -> gradients of scale and shift, [records, width] each."""
    x, gradient = x.contiguous(), gradient.contiguous()
    scale = torch.empty(records, width, dtype=torch.float32, device=x.device)
    shift = torch.empty_like(scale)
    tokens = x.numel() // (records * width)
    with torch.cuda.device_of(x):
        _record_sums[(records, triton.cdiv(width, COLUMNS))](
            x, gradient, mean.contiguous(), inverse.contiguous(), scale, shift, tokens, width,
            ROWS=ROWS, COLUMNS=COLUMNS,  # pyright: ignore
        )  # fmt: skip
    return scale, shift
