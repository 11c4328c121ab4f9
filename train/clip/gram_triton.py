"""The Gram form of squared norms as one GPU kernel: Σ (AAᵀ ∘ GGᵀ) of every record, and the diagonals of both.

As separate operations, two matrices [T, T] per record go to memory and back three times, which costs more than their
arithmetic. Here tiles of both stay in registers until they are reduced to one number. Both matrices are symmetric, so
half of each is computed: tokens are cut into blocks, and a block meets itself and the blocks before it. What remains of
the tokens comes first, so that it is a few columns to every block and not a whole strip of rows. A program loads its
rows once for all that they meet. Sums are taken in a fixed order, so that a replayed step reproduces the same bits.

Rounding: tensor cores accumulate over at most `part` columns, since they truncate low-order bits, and the parts are
added up in ordinary fp32: the error of an entry is that of `norms.cut_off`, in whichever order a part is added.
Entries of AAᵀ and GGᵀ are multiplied in fp32 and added up in fp64, as `norms.product_error` assumes. A sum of a tile's
4,096 terms in fp32 would err by more than the one percent that is left there.

The rows that a program holds are all that a bias needs of an output gradient: its sum over tokens. Each strip (a block,
or what remains) is summed in fp32 by ordinary additions, and so are the strips' sums. That is T - 1 additions in a
fixed order, as `per_record.TokenSum` assumes of any order; zeros beyond the last token add nothing.
"""

# Triton's language is not Python: it cannot unpack a tuple, and its loops and constants are unrolled and folded.
# ruff: noqa: RUF005
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Up to this many tokens, one program takes a record as one tile; beyond, programs handle blocks of as many. Half of a
# tile that a block shares with itself is computed twice. Smaller tiles would save that, but reload rows or leave a warp
# waiting: on an H200, tiles of 16 x 8 for few tokens took 2.7 times as long, and blocks cut once more 1.1 to 1.3 times.
BLOCK = 64
# A program takes a block with so many before it, since it has the block's rows; pairs further apart have their own. Two
# would need more registers than there are.
NEAR = 1
WARPS, FEW_STAGES, STAGES = 4, 8, 4
# Columns of the strips' sums that are added up at a time.
COLUMNS = 512


class Cut(NamedTuple):
    """How tokens are cut: whole blocks, and what remains before them, padded to what tensor cores multiply. Few tokens
    are a rest alone."""

    blocks: int
    rest: int
    padded: int

    @property
    def few(self) -> bool:
        return self.blocks == 0

    @property
    def programs(self) -> int:
        """For each record: one for each block, each pair of distant blocks, and the rest."""
        return self.blocks + self._distant + (self.rest > 0)

    @property
    def _distant(self) -> int:
        return max(0, self.blocks - NEAR - 1) * (self.blocks - NEAR) // 2

    @property
    def strips(self) -> int:
        """Programs that each sum over some of a record's tokens: the blocks, and the rest."""
        return self.blocks + (self.rest > 0)

    @property
    def products(self) -> int:
        """Entries of one matrix that tensor cores compute for a record; T(T + 1)/2 differ. They compute 16 × 8 at a
        time, and of a tile that is too small for all warps, each computes the same."""
        if self.few:
            return BLOCK * self.padded
        pairs = self.blocks * (self.blocks - 1) // 2 * BLOCK**2
        rest = max(self.padded**2, WARPS * 16 * 8) if self.rest else 0
        return self.blocks * (BLOCK**2 + BLOCK * self.padded) + pairs + rest

    @property
    def rows(self) -> int:
        """Rows of one matrix that the programs of a record load, each over all columns."""
        if self.few:
            return self.rest if self.padded == BLOCK else 2 * self.rest
        near = self.blocks * (self.blocks - 1) // 2 - self._distant
        return self.blocks * (BLOCK + self.rest) + BLOCK * (near + 2 * self._distant) + 2 * self.rest


def cut(tokens: int) -> Cut:
    if tokens <= BLOCK:
        return Cut(0, tokens, max(16, triton.next_power_of_2(tokens)))
    blocks, rest = divmod(tokens, BLOCK)
    return Cut(blocks, rest, max(8, triton.next_power_of_2(rest)) if rest else 0)


@triton.jit
def _rows(base, first, tokens, stride, along, width, COUNT: tl.constexpr):  # pyright: ignore
    """[COUNT, columns]: the tokens from `first` on; zeros beyond the last token and the last column."""
    token = first + tl.arange(0, COUNT)
    known = (token[:, None] < tokens) & (along[None, :] < width)
    return tl.load(base + token[:, None] * stride + along[None, :], mask=known, other=0.0)


@triton.jit
def _columns(base, first, tokens, stride, along, width, COUNT: tl.constexpr):  # pyright: ignore
    """[columns, COUNT]: the same, transposed."""
    token = first + tl.arange(0, COUNT)
    known = (token[None, :] < tokens) & (along[:, None] < width)
    return tl.load(base + token[None, :] * stride + along[:, None], mask=known, other=0.0)


@triton.jit
def _product(one, other, PART: tl.constexpr):  # pyright: ignore
    """One part. Named as the most that may be accumulated imprecisely, since the compiler would otherwise put the
    addition of parts into the tensor cores, where it is truncated."""
    return tl.dot(one, other, input_precision="ieee", max_num_imprecise_acc=PART)


@triton.jit
def _over_tokens(rows):  # pyright: ignore
    """The sum of a tile's rows, in fp32."""
    return tl.sum(rows.to(tl.float32), 0)


@triton.jit
def _zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # pyright: ignore
    tiles = ()
    for _tile in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([ROWS, COLUMNS], tl.float32),)
    return tiles


@triton.jit
def _of_few(  # pyright: ignore
    base, sums, tokens, width, stride, COLUMNS: tl.constexpr, PART: tl.constexpr, SUMMED: tl.constexpr
):  # fmt: skip
    """One matrix of at most 64 tokens, as a single tile. If `SUMMED`, stores the sum over its tokens, too."""
    total = tl.zeros([64, COLUMNS], tl.float32)
    for start in range(0, width, PART):
        along = start + tl.arange(0, PART)
        rows = _rows(base, 0, tokens, stride, along, width, 64)
        if COLUMNS == 64:
            total += _product(rows, tl.trans(rows), PART)
        else:
            total += _product(rows, _columns(base, 0, tokens, stride, along, width, COLUMNS), PART)
        if SUMMED:
            tl.store(sums + along, _over_tokens(rows), mask=along < width)
    return total


@triton.jit
def _inner(lefts, rights):  # pyright: ignore
    """The sum of a tile of AAᵀ ∘ GGᵀ, in fp64."""
    return tl.sum(tl.sum((lefts * rights).to(tl.float64), 1), 0)


@triton.jit
def _store_sizes(to, first, tokens, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # pyright: ignore
    """The diagonal of a tile whose rows and columns begin with the token `first`."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    sizes = tl.sum(tl.where(row[:, None] == column[None, :], tile, 0.0), 1)
    tl.store(to + first + row, sizes, mask=(row < COLUMNS) & (first + row < tokens))


@triton.jit
def _few_tokens(  # pyright: ignore
    left, right, inner, left_sizes, right_sizes, sums, tokens, rows, columns,
    left_record, left_token, right_record, right_token,
    COLUMNS: tl.constexpr, PART: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Each program handles one record."""
    record = tl.program_id(0).to(tl.int64)
    lefts = _of_few(left + record * left_record, sums + record * rows, tokens, rows, left_token, COLUMNS, PART, SUMMED)
    rights = _of_few(right + record * right_record, sums, tokens, columns, right_token, COLUMNS, PART, False)
    _store_sizes(left_sizes + record * tokens, 0, tokens, lefts, 64, COLUMNS)
    _store_sizes(right_sizes + record * tokens, 0, tokens, rights, 64, COLUMNS)
    tl.store(inner + record, _inner(lefts, rights))


@triton.jit
def _of_block(  # pyright: ignore
    base, sums, first, tokens, width, stride, rest,
    EARLIER: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """A block of 64 tokens with itself, with the blocks just before it, and with the rest. If `SUMMED`, stores the sum
    over the block's tokens, too."""
    own = tl.zeros([64, 64], tl.float32)
    others = tl.zeros([64, PADDED if PADDED > 0 else 8], tl.float32)
    before = _zeros(EARLIER, 64, 64)
    for start in range(0, width, PART):
        along = start + tl.arange(0, PART)
        rows = _rows(base, first, tokens, stride, along, width, 64)
        own += _product(rows, tl.trans(rows), PART)
        more = ()
        for block in tl.static_range(EARLIER):
            earlier = _columns(base, first - 64 * (block + 1), tokens, stride, along, width, 64)
            more = more + (before[block] + _product(rows, earlier, PART),)
        before = more
        if PADDED > 0:
            others += _product(rows, _columns(base, 0, rest, stride, along, width, PADDED), PART)
        if SUMMED:
            tl.store(sums + along, _over_tokens(rows), mask=along < width)
    return own, others, before


@triton.jit
def _of_two(  # pyright: ignore
    base, sums, first, other, tokens, stop, width, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """The tokens from `first` on, up to `tokens`, with those from `other` on, up to `stop`. If `SUMMED`, stores the sum
    over the former, too."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, PART):
        along = start + tl.arange(0, PART)
        rows = _rows(base, first, tokens, stride, along, width, ROWS)
        total += _product(rows, _columns(base, other, stop, stride, along, width, COLUMNS), PART)
        if SUMMED:
            tl.store(sums + along, _over_tokens(rows), mask=along < width)
    return total


@triton.jit
def _block(  # pyright: ignore
    left, right, left_sizes, right_sizes, sums, tokens, rows, columns, left_token, right_token, rest, number,
    EARLIER: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """A block with itself, with so many earlier ones, and with the rest."""
    first = rest + number * 64
    own, others, before = _of_block(left, sums, first, tokens, rows, left_token, rest, EARLIER, PADDED, PART, SUMMED)
    own_right, others_right, before_right = _of_block(
        right, sums, first, tokens, columns, right_token, rest, EARLIER, PADDED, PART, False
    )
    _store_sizes(left_sizes, first, tokens, own, 64, 64)
    _store_sizes(right_sizes, first, tokens, own_right, 64, 64)
    total = _inner(own, own_right)
    for block in tl.static_range(EARLIER):
        total += 2.0 * _inner(before[block], before_right[block])
    if PADDED > 0:
        total += 2.0 * _inner(others, others_right)
    return total


@triton.jit
def _pair(  # pyright: ignore
    left, right, tokens, rows, columns, left_token, right_token, rest, number, NEAR: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """A block with one that is more than `NEAR` earlier."""
    row = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The root may be rounded to the wrong side of a whole number.
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    first, other = rest + (row + NEAR + 1) * 64, rest + (number - row * (row + 1) // 2) * 64
    lefts = _of_two(left, left, first, other, tokens, tokens, rows, left_token, 64, 64, PART, False)
    rights = _of_two(right, right, first, other, tokens, tokens, columns, right_token, 64, 64, PART, False)
    return 2.0 * _inner(lefts, rights)


@triton.jit
def _rest(  # pyright: ignore
    left, right, left_sizes, right_sizes, sums, rows, columns, left_token, right_token, rest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """The rest with itself."""
    lefts = _of_two(left, sums, 0, 0, rest, rest, rows, left_token, ROWS, COLUMNS, PART, SUMMED)
    rights = _of_two(right, sums, 0, 0, rest, rest, columns, right_token, ROWS, COLUMNS, PART, False)
    _store_sizes(left_sizes, 0, rest, lefts, ROWS, COLUMNS)
    _store_sizes(right_sizes, 0, rest, rights, ROWS, COLUMNS)
    return _inner(lefts, rights)


@triton.jit
def _many_tokens(  # pyright: ignore
    left, right, inner, left_sizes, right_sizes, sums, tokens, rows, columns,
    left_record, left_token, right_record, right_token, rest,
    BLOCKS: tl.constexpr, NEAR: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Each program handles a part of one record."""
    record, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    left, right = left + record * left_record, right + record * right_record
    left_sizes, right_sizes = left_sizes + record * tokens, right_sizes + record * tokens
    STRIPS: tl.constexpr = BLOCKS + 1 if PADDED > 0 else BLOCKS
    PAIRS: tl.constexpr = (BLOCKS - NEAR - 1) * (BLOCKS - NEAR) // 2 if BLOCKS > NEAR else 0
    total = tl.zeros([], tl.float64)
    if part < BLOCKS:
        for earlier in tl.static_range(BLOCKS if BLOCKS < NEAR + 1 else NEAR + 1):
            if (part == earlier) | ((part > NEAR) & (earlier == NEAR)):
                total = _block(
                    left, right, left_sizes, right_sizes, sums + (record * STRIPS + part) * rows, tokens, rows, columns,
                    left_token, right_token, rest, part, earlier, PADDED, PART, SUMMED,
                )  # fmt: skip
    elif part < BLOCKS + PAIRS:
        total = _pair(left, right, tokens, rows, columns, left_token, right_token, rest, part - BLOCKS, NEAR, PART)
    elif PADDED > 0:
        total = _rest(
            left, right, left_sizes, right_sizes, sums + (record * STRIPS + BLOCKS) * rows, rows, columns,
            left_token, right_token, rest, PADDED if PADDED > 16 else 16, PADDED, PART, SUMMED,
        )  # fmt: skip
    tl.store(inner + record * parts + part, total)


@triton.jit
def _finish(  # pyright: ignore
    inner, left_sizes, right_sizes, of_strips, found, sums, parts, tokens, rows, strips,
    SHARE: tl.constexpr, ADDED: tl.constexpr, LOST_LEFT: tl.constexpr, LOST_RIGHT: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, STRIPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program handles one record: its square, doubt and length in fp64, from the results of its parts; and, where
    there is more than one strip, the sum over its tokens, from those over each strip's."""
    record, records = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    part, token = tl.arange(0, PARTS), tl.arange(0, TOKENS)
    squares = tl.load(inner + record * parts + part, mask=part < parts, other=0.0)
    left = tl.load(left_sizes + record * tokens + token, mask=token < tokens, other=0.0).to(tl.float64)
    right = tl.load(right_sizes + record * tokens + token, mask=token < tokens, other=0.0).to(tl.float64)
    terms = left * right
    # Sums of squares are not negative. If any number is NaN, so is the length, whatever the maxima are.
    length = tl.sum(tl.sqrt(terms), 0)
    square = tl.sum(squares, 0)
    added = ADDED * length
    doubt = SHARE * length * length + (2.0 * tl.sqrt(tl.maximum(square, 0.0)) + added) * added
    doubt += LOST_LEFT * tl.max(left, 0) + LOST_RIGHT * tl.max(right, 0)
    tl.store(found + record, square)
    tl.store(found + records + record, doubt)
    tl.store(found + 2 * records + record, length)
    if STRIPS > 1:
        strip = tl.arange(0, STRIPS)
        for start in range(0, rows, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            there = (strip[:, None] < strips) & (column[None, :] < rows)
            place = of_strips + (record * strips + strip[:, None]) * rows + column[None, :]
            total = tl.sum(tl.load(place, mask=there, other=0.0), 0)
            tl.store(sums + record * rows + column, total, mask=column < rows)


def gram(
    left: Tensor, right: Tensor, part: int, bounds: tuple[float, float, float, float], summed: bool = False
) -> tuple[Tensor, ...]:
    """left [B, T, rows], right [B, T, columns] -> three tensors [B] in fp64: Σ (AAᵀ ∘ GGᵀ); its error bound, from
    `bounds` (`kernels.Bounds`); and the summed lengths |a||g|. If `summed`, a fourth, [B, rows] in fp32: the sum of
    `left` over a record's tokens.

    `part`, a power of two from 16 on, is the number of columns over which tensor cores accumulate.
    """
    # A token's place within its record is a 32-bit number in the kernels.
    left, right = (
        x if x.stride(2) == 1 and x.shape[1] * x.stride(1) < 2**31 else x.contiguous() for x in (left, right)
    )
    (records, tokens, rows), own = left.shape, cut(right.shape[1])
    grid = (records, own.programs)
    inner = torch.empty(grid, dtype=torch.float64, device=right.device)
    left_sizes = torch.empty(records, tokens, dtype=torch.float32, device=right.device)
    right_sizes = torch.empty_like(left_sizes)
    of_strips = left.new_empty((records, own.strips, rows) if summed else 0, dtype=torch.float32)
    found = torch.empty(3, records, dtype=torch.float64, device=right.device)
    sums = left.new_empty((records, rows), dtype=torch.float32) if summed and own.strips > 1 else of_strips
    common = (left, right, inner, left_sizes, right_sizes, of_strips, tokens, rows, right.shape[2],
              left.stride(0), left.stride(1), right.stride(0), right.stride(1))  # fmt: skip
    with torch.cuda.device_of(right):
        if own.few:
            _few_tokens[grid](
                *common, COLUMNS=own.padded, PART=part, SUMMED=summed,  # pyright: ignore
                num_warps=WARPS, num_stages=FEW_STAGES,  # pyright: ignore
            )  # fmt: skip
        else:
            _many_tokens[grid](
                *common, own.rest, BLOCKS=own.blocks, NEAR=NEAR, PADDED=own.padded, PART=part, SUMMED=summed,  # pyright: ignore
                num_warps=WARPS, num_stages=STAGES,  # pyright: ignore
            )  # fmt: skip
        _finish[(records,)](
            inner, left_sizes, right_sizes, of_strips, found, sums, own.programs, tokens, rows, own.strips,
            *bounds, PARTS=triton.next_power_of_2(own.programs), TOKENS=triton.next_power_of_2(tokens),  # pyright: ignore
            STRIPS=triton.next_power_of_2(own.strips) if summed else 1, COLUMNS=COLUMNS,  # pyright: ignore
        )  # fmt: skip
    return (*found.unbind(), sums.view(records, rows)) if summed else found.unbind()
