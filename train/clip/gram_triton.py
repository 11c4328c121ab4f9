"""The Gram form of squared norms as one GPU kernel: Σ (AAᵀ ∘ GGᵀ) of every record, and the diagonals of both.

As separate operations, two matrices [T, T] per record go to memory and back three times, which costs more than
their arithmetic. Here a pair of tiles stays in registers until it is reduced to one number. Tiles above the diagonal
are skipped, since both matrices are symmetric. Sums are taken in a fixed order, so that a replayed step reproduces the
same bits.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

TILES = (16, 32, 64)
WARPS, STAGES = 4, 3


@triton.jit
def _products(  # pyright: ignore
    base, own, other, tokens, width, stride, TILE: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr
):
    """[TILE, TILE]: products of the rows `own` and `other` of one matrix. Tensor cores accumulate over at most PART
    columns, since they truncate low-order bits; the parts are added up in ordinary fp32."""
    total = tl.zeros([TILE, TILE], tl.float32)
    for first in range(0, width, PART):
        part = tl.zeros([TILE, TILE], tl.float32)
        for start in range(first, tl.minimum(first + PART, width), DEPTH):
            along = start + tl.arange(0, DEPTH)
            one = tl.load(
                base + own[:, None] * stride + along[None, :],
                mask=(own[:, None] < tokens) & (along[None, :] < width), other=0.0,
            )  # fmt: skip
            two = tl.load(
                base + other[None, :] * stride + along[:, None],
                mask=(other[None, :] < tokens) & (along[:, None] < width), other=0.0,
            )  # fmt: skip
            part = tl.dot(one, two, part, input_precision="ieee")
        total += part
    return total


@triton.jit
def _tile_pair(  # pyright: ignore
    left, right, inner, left_sizes, right_sizes, tokens, rows, columns,
    left_record, left_token, right_record, right_token,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Each program handles one pair of tiles (own ≥ other) of one record."""
    record, pair, pairs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The root may be rounded to the wrong side of a whole number.
    row = tl.where(row * (row + 1) // 2 > pair, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= pair, row + 1, row)
    column = pair - row * (row + 1) // 2
    own, other = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
    lefts = _products(left + record * left_record, own, other, tokens, rows, left_token, TILE, DEPTH, PART)
    rights = _products(right + record * right_record, own, other, tokens, columns, right_token, TILE, DEPTH, PART)
    tl.store(inner + record * pairs + pair, tl.sum(tl.sum(lefts * rights, 1), 0) * tl.where(row == column, 1.0, 2.0))
    if row == column:
        diagonal = own[:, None] == other[None, :]
        place = record * tokens + own
        tl.store(left_sizes + place, tl.sum(tl.where(diagonal, lefts, 0.0), 1), mask=own < tokens)
        tl.store(right_sizes + place, tl.sum(tl.where(diagonal, rights, 0.0), 1), mask=own < tokens)


@triton.jit
def _finish(  # pyright: ignore
    inner, left_sizes, right_sizes, found, pairs, tokens,
    SHARE: tl.constexpr, ADDED: tl.constexpr, LOST_LEFT: tl.constexpr, LOST_RIGHT: tl.constexpr,
    PAIRS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Each program handles one record: its square, doubt and length in fp64, from the results of its pairs of tiles."""
    record, records = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    pair, token = tl.arange(0, PAIRS), tl.arange(0, TOKENS)
    parts = tl.load(inner + record * pairs + pair, mask=pair < pairs, other=0.0).to(tl.float64)
    left = tl.load(left_sizes + record * tokens + token, mask=token < tokens, other=0.0).to(tl.float64)
    right = tl.load(right_sizes + record * tokens + token, mask=token < tokens, other=0.0).to(tl.float64)
    terms = left * right
    # Sums of squares are not negative. If any number is NaN, so is the length, whatever the maxima are.
    length = tl.sum(tl.sqrt(terms), 0)
    square = tl.sum(parts, 0)
    added = ADDED * length
    doubt = SHARE * length * length + (2.0 * tl.sqrt(tl.maximum(square, 0.0)) + added) * added
    doubt += LOST_LEFT * tl.max(left, 0) + LOST_RIGHT * tl.max(right, 0)
    tl.store(found + record, square)
    tl.store(found + records + record, doubt)
    tl.store(found + 2 * records + record, length)


def gram(left: Tensor, right: Tensor, part: int, bounds: tuple[float, float, float, float]) -> tuple[Tensor, ...]:
    """left [B, T, rows], right [B, T, columns] -> three tensors [B] in fp64: Σ (AAᵀ ∘ GGᵀ); its error bound, from
    `bounds` (`norms.Bounds`); and the summed lengths |a||g|.

    `part`, a multiple of 64, is the number of columns over which tensor cores accumulate.
    """
    left, right = (x if x.stride(2) == 1 else x.contiguous() for x in (left, right))
    records, tokens = right.shape[:2]
    tile = next((size for size in TILES if tokens <= size), TILES[-1])
    depth = 32 if torch.float32 in (left.dtype, right.dtype) else 64
    count = -(-tokens // tile)
    inner = torch.empty(records, count * (count + 1) // 2, dtype=torch.float32, device=right.device)
    left_sizes = torch.empty(records, tokens, dtype=torch.float32, device=right.device)
    right_sizes = torch.empty_like(left_sizes)
    with torch.cuda.device_of(right):
        _tile_pair[inner.shape](
            left, right, inner, left_sizes, right_sizes, tokens, left.shape[2], right.shape[2],
            left.stride(0), left.stride(1), right.stride(0), right.stride(1),
            TILE=tile, DEPTH=depth, PART=part, num_warps=WARPS, num_stages=STAGES,  # pyright: ignore
        )  # fmt: skip
        found = torch.empty(3, records, dtype=torch.float64, device=right.device)
        _finish[(records,)](
            inner, left_sizes, right_sizes, found, inner.shape[1], tokens, *bounds,  # pyright: ignore
            PAIRS=triton.next_power_of_2(inner.shape[1]), TOKENS=triton.next_power_of_2(tokens),  # pyright: ignore
        )  # fmt: skip
    return found.unbind()
