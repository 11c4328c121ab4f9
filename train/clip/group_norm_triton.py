"""The backward pass of a GroupNorm in one kernel, on GPUs: the input's gradient, and each row's gradients of scale and
shift.

As separate operations, input and output gradient would be read five times. A program handles one group of one row and
adds up its channels' positions in a fixed order, so a record's sums do not depend on its neighbours, and a replayed
step reproduces the same bits. What it reads a second time, for the input's gradient, is mostly still in the cache.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Elements that a program holds at once, and positions of one channel among them at most.
AT_ONCE, ALONG = 4096, 1024
WARPS = 8


def tile(channels: int, positions: int) -> tuple[int, int]:
    """Channels of a group and positions that are taken at once."""
    along = min(int(triton.next_power_of_2(positions)), ALONG)
    return min(int(triton.next_power_of_2(channels)), AT_ONCE // along), along


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
def _backward(  # pyright: ignore
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


def backward(
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
        _backward[(rows * groups,)](
            x, gradient, mean.contiguous(), inverse.contiguous(), weight.contiguous(), x if below is None else below,
            scale, shift, groups, channels, positions, WANTED=wanted, CHANNELS=at_once, POSITIONS=along,  # pyright: ignore
            num_warps=WARPS,  # pyright: ignore
        )  # fmt: skip
    return below, scale, shift
