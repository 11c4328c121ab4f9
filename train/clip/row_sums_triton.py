"""An embedding's gradient, each row of the table's sum of output gradients, in one GPU kernel and in a fixed order.

`index_add_` adds in whichever order the device's threads come, so a replayed micro-batch would have other last bits.
Here tokens are sorted by their rows first; each row that occurs is then summed by one program, in the tokens' order.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Tokens of a row that are added up at a time, and columns that a program handles.
AT_ONCE, BLOCK = 16, 256


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
        _sum_rows[(len(rows), triton.cdiv(width, BLOCK))](
            sorted_rows, order, values, total, len(rows), width, AT_ONCE=AT_ONCE, BLOCK=BLOCK  # pyright: ignore
        )  # fmt: skip
    return total
