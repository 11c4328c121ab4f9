"""Triton kernels that save the clip engine reads of memory or fix the order of its sums: the backward passes of
LayerNorm and GroupNorm, clip factors, and the gradient of an embedding. `kernels.py` imports them where a GPU has them.

Each adds up in a fixed order, so a record's sums do not depend on its neighbours, and a replayed step reproduces the
same bits.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# LayerNorm. PyTorch's own kernel gives the input's gradient alone, so input and output gradient would be read a second
# time for the sums; as separate operations, they would be read five times. Each program adds up tokens of one record.

# Tokens of a record that one program handles, and elements of their rows at once: two rows at a width of 768 took 1.3
# times as long on an H200 as four, and with more at a width of 1,280 there are not enough registers.
CHUNK, ELEMENTS = 64, 4096
NORM_WARPS = 8


def rows_at_once(width: int) -> int:
    return max(1, min(8, ELEMENTS // int(triton.next_power_of_2(width))))


@triton.jit
def _layer_norm_backward(  # pyright: ignore
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


def layer_norm_backward(
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
        _layer_norm_backward[(records, chunks)](
            x, gradient, mean.contiguous(), inverse.contiguous(), weight.contiguous(), x if below is None else below,
            scale, shift, tokens, width, WANTED=wanted, CHUNK=CHUNK, ROWS=rows_at_once(width),  # pyright: ignore
            WIDTH=triton.next_power_of_2(width), num_warps=NORM_WARPS,  # pyright: ignore
        )  # fmt: skip
    if chunks == 1:
        return below, scale.squeeze(1), shift.squeeze(1)
    return below, scale.sum(1), shift.sum(1)


# GroupNorm. As separate operations, input and output gradient would be read five times. A program handles one group of
# one row and adds up its channels' positions; what it reads a second time, for the input's gradient, is mostly still in
# the cache.

# Elements that a program holds at once, and positions of one channel among them at most.
TILE, ALONG = 4096, 1024


def tile(channels: int, positions: int) -> tuple[int, int]:
    """Channels of a group and positions that are taken at once."""
    along = min(int(triton.next_power_of_2(positions)), ALONG)
    return min(int(triton.next_power_of_2(channels)), TILE // along), along


@triton.jit
def _operands(  # pyright: ignore
    x, gradient, line, known, start, positions, middle, spread, POSITIONS: tl.constexpr
):  # fmt: skip
    """A tile's places, which of them are there, the output gradient and the normalised input. A place out of range adds
    0·(0 - mean): nothing, unless the mean is NaN, and then so is all of the group."""
    position = start + tl.arange(0, POSITIONS)
    there = known[:, None] & (position[None, :] < positions)
    place = line[:, None] + position[None, :]
    upstream = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
    value = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    return place, there, upstream, (value - middle) * spread


@triton.jit
def _group_norm_backward(  # pyright: ignore
    x, gradient, mean, inverse, weight, below, scale, shift, groups, channels, positions,
    WANTED: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Each program handles a group: Σ g·(x - mean)·inverse and Σ g over the positions of its channels, of which there
    are `channels`, and the gradients of x."""
    number = tl.program_id(0).to(tl.int64)  # of the group, over all rows
    middle, spread = tl.load(mean + number), tl.load(inverse + number)
    weights, offset = weight + (number % groups) * channels, number * channels
    along, level = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    for first in range(0, channels, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        known, line = channel < channels, (offset + channel) * positions
        scales, shifts = tl.zeros([CHANNELS, POSITIONS], tl.float32), tl.zeros([CHANNELS, POSITIONS], tl.float32)
        for start in range(0, positions, POSITIONS):
            _, _, upstream, normal = _operands(x, gradient, line, known, start, positions, middle, spread, POSITIONS)
            scales += normal * upstream
            shifts += upstream
        of_scale, of_shift = tl.sum(scales, 1), tl.sum(shifts, 1)
        tl.store(scale + offset + channel, of_scale, mask=known)
        tl.store(shift + offset + channel, of_shift, mask=known)
        factor = tl.load(weights + channel, mask=known, other=0.0).to(tl.float32)
        along += tl.sum(factor * of_scale, 0)
        level += tl.sum(factor * of_shift, 0)
    if WANTED:
        along, level = along / (channels * positions), level / (channels * positions)
        for first in range(0, channels, CHANNELS):
            channel = first + tl.arange(0, CHANNELS)
            known, line = channel < channels, (offset + channel) * positions
            factor = tl.load(weights + channel, mask=known, other=0.0).to(tl.float32)
            for start in range(0, positions, POSITIONS):
                place, there, upstream, normal = _operands(
                    x, gradient, line, known, start, positions, middle, spread, POSITIONS
                )
                found = (upstream * factor[:, None] - level - normal * along) * spread
                tl.store(below + place, found.to(below.dtype.element_ty), mask=there)


def group_norm_backward(
    x: Tensor, gradient: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, wanted: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """x and gradient [rows, channels, …], mean and inverse [rows, groups] -> the gradient of x, if it is `wanted`, and
    those of scale and shift, [rows, channels] each."""
    x, gradient = x.contiguous(), gradient.contiguous()
    (rows, groups), positions = mean.shape, x.shape[2:].numel()
    channels = x.shape[1] // groups
    scale = torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)
    shift = torch.empty_like(scale)
    below = torch.empty_like(x) if wanted else None
    at_once, along = tile(channels, positions)
    with torch.cuda.device_of(x):
        _group_norm_backward[(rows * groups,)](
            x, gradient, mean.contiguous(), inverse.contiguous(), weight.contiguous(), x if below is None else below,
            scale, shift, groups, channels, positions, WANTED=wanted, CHANNELS=at_once, POSITIONS=along,  # pyright: ignore
            num_warps=NORM_WARPS,  # pyright: ignore
        )  # fmt: skip
    return below, scale, shift


# Clip factors. `torch.mul` of halves and fp32 gives the same bits, but takes the slow way of mixed types: 3.5 times as
# long, measured on an H200. Records that are left out become zeros, whatever they hold.

SCALE_BLOCK, SCALE_WARPS = 4096, 4


@triton.jit
def _scale(value, factors, keep, scaled, elements, MASKED: tl.constexpr, BLOCK: tl.constexpr):  # pyright: ignore
    """Each program handles some elements of one record."""
    record = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < elements
    factor = tl.load(factors + record).to(tl.float32)
    wanted = there
    if MASKED:  # not `there & …`: Triton 3.9's interpreter spreads one truth value over a block as numbers, no mask
        wanted = place < tl.where(tl.load(keep + record).to(tl.int32) != 0, elements, 0)
    found = tl.load(value + record * elements + place, mask=wanted, other=0.0).to(tl.float32)
    tl.store(scaled + record * elements + place, (found * factor).to(scaled.dtype.element_ty), mask=there)


def scale(value: Tensor, factors: Tensor, keep: Tensor | None) -> Tensor:
    """value [B, …] · factors [B]: multiplied in fp32, rounded once to the type of `value`; contiguous."""
    value = value.contiguous()
    scaled = torch.empty_like(value)
    elements = value[0].numel()
    with torch.cuda.device_of(value):
        _scale[(len(value), triton.cdiv(elements, SCALE_BLOCK))](
            value, factors.contiguous(), value if keep is None else keep.contiguous(), scaled, elements,
            MASKED=keep is not None, BLOCK=SCALE_BLOCK, num_warps=SCALE_WARPS,  # pyright: ignore
        )  # fmt: skip
    return scaled


# Embeddings. `index_add_` adds in whichever order the device's threads come. Here tokens are sorted by their rows
# first; each row that occurs is then summed by one program, in the order of the tokens.

# Tokens of a row that are added up at a time, and columns that a program handles.
AT_ONCE, ROW_BLOCK = 16, 256


@triton.jit
def _sum_rows(  # pyright: ignore
    rows, order, values, total, count, width, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program handles some columns of one place in the sorted `rows`; where no new row begins, there is nothing to
    do."""
    start = tl.program_id(0)
    row = tl.load(rows + start)
    before = tl.load(rows + start - 1, mask=start > 0, other=-1)
    if row != before:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        found = tl.zeros([BLOCK], tl.float32)
        more = True
        while more:
            place = start + tl.arange(0, AT_ONCE)
            same = tl.load(rows + place, mask=place < count, other=-1) == row
            token = tl.load(order + place, mask=same, other=0)
            there = same[:, None] & (column[None, :] < width)
            found += tl.sum(tl.load(values + token[:, None] * width + column[None, :], mask=there, other=0.0), 0)
            start += AT_ONCE
            more = tl.sum(same.to(tl.int32), 0) == AT_ONCE
        tl.store(total + row * width + column, found, mask=column < width)


def row_sums(rows: Tensor, values: Tensor, table: int) -> Tensor:
    """rows [N] (int64), values [N, columns] in fp32 -> [table, columns]; rows that do not occur are zero."""
    values, width = values.contiguous(), values.shape[1]
    total = torch.zeros(table, width, dtype=torch.float32, device=values.device)
    sorted_rows, order = torch.sort(rows.long(), stable=True)
    with torch.cuda.device_of(values):
        _sum_rows[(len(rows), triton.cdiv(width, ROW_BLOCK))](
            sorted_rows, order, values, total, len(rows), width, AT_ONCE=AT_ONCE, BLOCK=ROW_BLOCK  # pyright: ignore
        )  # fmt: skip
    return total
