"""Adds the fp32 products of many parameters to their fp64 totals in one GPU kernel, or leaves the totals as they are.

As separate operations, every layer costs a launch for each part of its micro-batch, and the totals are read and written
as often. Whether anything may be added is a scalar on the device, so the host need not wait for the answer.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK = 1024


@triton.jit
def _add_parts(  # pyright: ignore
    total, found, only_if, parts, elements, stride, ASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program handles some elements. Parts are added in their order, so a replayed step reproduces the same
    bits."""
    wanted = 1
    if ASKED:
        wanted = tl.load(only_if).to(tl.int32)
    if wanted != 0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = place < elements
        value = tl.load(total + place, mask=there, other=0.0).to(tl.float64)
        row = found
        for _ in range(0, parts):
            value += tl.load(row + place, mask=there, other=0.0).to(tl.float64)
            row += stride  # not a product of two 32-bit numbers, which may overflow
        tl.store(total + place, value, mask=there)


def add_parts(total: Tensor, found: Tensor, only_if: Tensor | None) -> None:
    """total [elements] += the rows of found [parts, elements], if `only_if` is true or None. A total in fp32 is rounded
    once: the parts are added to it in fp64."""
    with torch.cuda.device_of(total):
        _add_parts[(triton.cdiv(len(total), BLOCK),)](
            total, found, total if only_if is None else only_if, len(found), len(total), found.stride(0),
            ASKED=only_if is not None, BLOCK=BLOCK,  # pyright: ignore
        )  # fmt: skip
