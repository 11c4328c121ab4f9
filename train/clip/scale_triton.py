"""Multiplies each record by its clip factor, in one GPU kernel that reads and writes halves.

`torch.mul` of halves and fp32 gives the same bits, but takes the slow way of mixed types: 3.5 times as long, measured
on an H200. Records that are left out become zeros, whatever they hold.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK, WARPS = 4096, 4


@triton.jit
def _scale(value, factors, keep, scaled, elements, MASKED: tl.constexpr, BLOCK: tl.constexpr):  # pyright: ignore
    """Each program handles some elements of one record."""
    record = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < elements
    factor = tl.load(factors + record).to(tl.float32)
    wanted = there
    if MASKED:
        wanted = there & (tl.load(keep + record).to(tl.int32) != 0)
    found = tl.load(value + record * elements + place, mask=wanted, other=0.0).to(tl.float32)
    tl.store(scaled + record * elements + place, (found * factor).to(scaled.dtype.element_ty), mask=there)


def scale(value: Tensor, factors: Tensor, keep: Tensor | None) -> Tensor:
    """value [B, …] · factors [B]: multiplied in fp32, rounded once to the type of `value`; contiguous."""
    value = value.contiguous()
    scaled = torch.empty_like(value)
    elements = value[0].numel()
    with torch.cuda.device_of(value):
        _scale[(len(value), triton.cdiv(elements, BLOCK))](
            value, factors.contiguous(), value if keep is None else keep.contiguous(), scaled, elements,
            MASKED=keep is not None, BLOCK=BLOCK, num_warps=WARPS,  # pyright: ignore
        )  # fmt: skip
    return scaled
