"""What weights standardised by rows need of gradients with many elements, each in one pass on GPUs (standardised.py).

As separate operations, a written gradient would be read four times and written once more for the sums over its rows,
and the Jacobian would take eleven passes.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Elements that are added up in fp32 before fp64 goes on; `standardised.ALONG` is the bound's.
ALONG = 512


@triton.jit
def _sums(written, direction, found, rows, elements, ALONG: tl.constexpr):  # pyright: ignore
    """Each program handles one row of one record."""
    row, record = tl.program_id(0), tl.program_id(1).to(tl.int64)
    base = written + (record * rows + row) * elements
    along = direction + row.to(tl.int64) * elements
    squares, ones, inner = tl.zeros([], tl.float64), tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for start in range(0, elements, ALONG):
        place = start + tl.arange(0, ALONG)
        value = tl.load(base + place, mask=place < elements, other=0.0)
        squares += tl.sum(value * value, 0).to(tl.float64)
        ones += tl.sum(value, 0).to(tl.float64)
        inner += tl.sum(value * tl.load(along + place, mask=place < elements, other=0.0), 0).to(tl.float64)
    place, beyond = found + record * rows + row, tl.num_programs(1).to(tl.int64) * rows
    tl.store(place, squares)
    tl.store(place + beyond, ones)
    tl.store(place + 2 * beyond, inner)


def sums(written: Tensor, direction: Tensor) -> Tensor:
    """written [B, rows, elements of one], direction [rows, elements of one], fp32 -> fp64 [3, B, rows]: Σg², Σg, and
    Σg·ŵ of each row."""
    records, rows, elements = written.shape
    found = torch.empty(3, records, rows, dtype=torch.float64, device=written.device)
    with torch.cuda.device_of(written):
        _sums[(rows, records)](
            written.contiguous(), direction.contiguous(), found, rows, elements, ALONG=ALONG  # pyright: ignore
        )  # fmt: skip
    return found


@triton.jit
def _squares(  # pyright: ignore
    found, scale, level, size, out, rows, elements, TINY: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Each program handles one record."""
    record, records = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    left, whole = tl.zeros([ROWS], tl.float64), tl.zeros([ROWS], tl.float64)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        there, place = row < rows, found + record * rows + row
        factor = tl.load(scale + row, mask=there, other=0.0).to(tl.float64)
        mean, kept = tl.load(level + row, mask=there, other=0.0), 2.0 - tl.load(size + row, mask=there, other=0.0)
        square = tl.load(place, mask=there, other=0.0) + TINY * elements
        ones = tl.load(place + records * rows, mask=there, other=0.0)
        inner = tl.load(place + 2 * records * rows, mask=there, other=0.0) - ones * mean
        taken = square - (ones * ones + kept * inner * inner) / elements
        left += tl.where(there, taken * factor * factor, 0.0)
        whole += tl.where(there, square * factor * factor, 0.0)
    tl.store(out + record, tl.sum(left, 0))
    tl.store(out + records + record, tl.sum(whole, 0))


def squares(found: Tensor, scale: Tensor, level: Tensor, size: Tensor, elements: int) -> Tensor:
    """`sums` [3, B, rows], and of each row its scale, ŵ's mean and the mean of ŵ² -> fp64 [2, B]: the squared lengths
    of Jᵀg, and of g with its rows scaled."""
    _, records, rows = found.shape
    out = torch.empty(2, records, dtype=torch.float64, device=found.device)
    with torch.cuda.device_of(found):
        _squares[(records,)](
            found.contiguous(), scale, level, size, out, rows, elements,
            TINY=torch.finfo(torch.float32).tiny, ROWS=min(1024, triton.next_power_of_2(rows)),  # pyright: ignore
        )  # fmt: skip
    return out


@triton.jit
def _back(gradient, direction, scale, out, rows, elements, BLOCK: tl.constexpr):  # pyright: ignore
    """Each program handles one row of one gradient, in fp64."""
    row, line = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * rows + tl.program_id(0)
    gradient, direction, out = gradient + line * elements, direction + row * elements, out + line * elements
    ones, inner = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for start in range(0, elements, BLOCK):
        place = start + tl.arange(0, BLOCK)
        ones += tl.load(gradient + place, mask=place < elements, other=0.0).to(tl.float64)
    mean = tl.sum(ones, 0) / elements
    for start in range(0, elements, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place < elements
        along = tl.load(direction + place, mask=there, other=0.0).to(tl.float64)
        inner += (tl.load(gradient + place, mask=there, other=0.0).to(tl.float64) - mean) * along
    level, factor = tl.sum(inner, 0) / elements, tl.load(scale + row).to(tl.float64)
    for start in range(0, elements, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place < elements
        along = tl.load(direction + place, mask=there, other=0.0).to(tl.float64)
        value = tl.load(gradient + place, mask=there, other=0.0).to(tl.float64)
        tl.store(out + place, ((value - mean - level * along) * factor).to(out.dtype.element_ty), mask=there)


def back(gradients: Tensor, direction: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """gradients [B, rows, elements of one], direction [rows, elements of one], scale [rows] -> Jᵀ of each gradient,
    computed in fp64 and rounded to `dtype`."""
    records, rows, elements = gradients.shape
    out = torch.empty(gradients.shape, dtype=dtype, device=gradients.device)
    with torch.cuda.device_of(gradients):
        _back[(rows, records)](
            gradients.contiguous(), direction.contiguous(), scale, out, rows, elements,
            BLOCK=min(1024, triton.next_power_of_2(elements)),  # pyright: ignore
        )  # fmt: skip
    return out
