"""The backward pass of a LayerNorm in one pass over its input and its output gradient, on GPUs: the input's gradient,
and each record's gradients of scale and shift.

PyTorch's own kernel gives the input's gradient alone, so both would be read a second time for the sums; as separate
operations, they would be read five times. Each program adds up tokens of one record in a fixed order, so a record's
sums do not depend on its neighbours, and a replayed step reproduces the same bits.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Tokens of a record that one program handles, and elements of their rows at once: two rows at a width of 768 took 1.3
# times as long on an H200 as four, and with more at a width of 1,280 there are not enough registers.
CHUNK, AT_ONCE = 64, 4096
WARPS = 8


def rows_at_once(width: int) -> int:
    return max(1, min(8, AT_ONCE // int(triton.next_power_of_2(width))))


@triton.jit
def _backward(  # pyright: ignore
    x, gradient, mean, inverse, weight, below, scale, shift, tokens, width,
    WANTED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Each program handles some tokens of one record: the gradients of their rows, and Σ g·(x - mean)·inverse and Σ g
    over them."""
    record, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, WIDTH)
    inside = column < width
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scales, shifts = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for first in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, tokens), ROWS):
        token = first + tl.arange(0, ROWS)
        there = (token[:, None] < tokens) & inside[None, :]
        row = record * tokens + token
        place = row[:, None] * width + column[None, :]
        upstream = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        middle = tl.load(mean + row, mask=token < tokens, other=0.0)
        spread = tl.load(inverse + row, mask=token < tokens, other=0.0)
        # A column out of range would add 0·(0 - mean): nothing, unless the mean is NaN.
        normal = tl.where(there, (value - middle[:, None]) * spread[:, None], 0.0)
        scales += tl.sum(normal * upstream, 0)
        shifts += tl.sum(upstream, 0)
        if WANTED:
            weighted = upstream * weights[None, :]
            along, level = tl.sum(weighted * normal, 1) / width, tl.sum(weighted, 1) / width
            found = (weighted - level[:, None] - normal * along[:, None]) * spread[:, None]
            tl.store(below + place, found.to(below.dtype.element_ty), mask=there)
    part = (record * chunks + chunk) * width + column
    tl.store(scale + part, scales, mask=inside)
    tl.store(shift + part, shifts, mask=inside)


def backward(
    x: Tensor, gradient: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, records: int, wanted: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """x and gradient of records · tokens · width elements -> the gradient of x, if it is `wanted`, and those of scale
    and shift, [records, width] each."""
    x, gradient, width = x.contiguous(), gradient.contiguous(), weight.numel()
    tokens = x.numel() // (records * width)
    chunks = -(-tokens // CHUNK)
    scale = torch.empty(records, chunks, width, dtype=torch.float32, device=x.device)
    shift = torch.empty_like(scale)
    below = torch.empty_like(x) if wanted else None
    with torch.cuda.device_of(x):
        _backward[(records, chunks)](
            x, gradient, mean.contiguous(), inverse.contiguous(), weight.contiguous(), x if below is None else below,
            scale, shift, tokens, width, WANTED=wanted, CHUNK=CHUNK, ROWS=rows_at_once(width),  # pyright: ignore
            WIDTH=triton.next_power_of_2(width), num_warps=WARPS,  # pyright: ignore
        )  # fmt: skip
    if chunks == 1:
        return below, scale.squeeze(1), shift.squeeze(1)
    return below, scale.sum(1), shift.sum(1)
