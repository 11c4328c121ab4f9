"""Squared gradient norms of every record, from pieces, with a bound on their rounding error.

||AᵀG||² = Σ (AAᵀ ∘ GGᵀ) needs no per-record gradient, and is cheap where tokens are few. But it is a sum of terms of
either sign: where the tokens' gradients cancel, the rounding errors of the large terms remain, in the norm and again,
differently, in the weighted product. `doubt` bounds that error, so that doubtful records can be handled separately.

For products, the bound holds for any record. Errors of different pairs of tokens cannot be assumed independent: where
tokens repeat, so does the rounding of their products, and it adds up as the lengths |a||g| of the tokens do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from murmuration.train.clip import kernels
from murmuration.train.clip.kernels import Bounds
from murmuration.train.clip.per_record import (
    CHUNK,
    Dense,
    OuterProduct,
    PerRecordGradient,
    ViaReparametrisation,
    flat,
    squared_length,
    wide,
)
from murmuration.train.clip.standardised import ViaStandardisation, taken

# Relative error of a squared norm above which it is computed again (`rule.FACTOR_ROUNDING` allows for it).
TOLERANCE = 1e-2
# From this many tokens on, the Gram matrices are computed in strips, which skips most of their upper half; and how many
# tokens a strip has, which libraries of products take in whole blocks.
STRIPS_FROM, STRIP = 96, 64
# For gradients that are written out by convolutions and other functions, errors count as independent: a sum of n terms
# is within 4·√n·u of its size.
DEVIATIONS = 4.0
# Long sums are taken in blocks, whose errors grow no further; otherwise a large vocabulary would make every record
# doubtful.
MOST_UNIT = 128.0
# The assumed number of terms where a piece does not state it.
UNKNOWN_WIDTH = 4096
# Dot products of tokens are added up over this many columns at a time, and then these parts: the bound on rounding
# grows with the longest chain of additions. The kernel's additions err by twice as much.
PART, KERNEL_PART = 128, 64


class Squares(NamedTuple):
    """[B] each, fp64: squared norms, the bound on their error, and the summed lengths of their terms.

    The error is None where exactly what is measured is added; lengths are None where nobody asked for them or nothing
    is rounded. `sums` [B, elements], fp32, is what a `TokenSum` waits for, where the kernel that measured took it.
    """

    square: Tensor
    doubt: Tensor | None
    length: Tensor | None
    sums: Tensor | None = None


def measure(pieces: list[PerRecordGradient], lengths: bool = True, over: Tensor | None = None) -> Squares:
    """Measures the gradient of one parameter, which is the sum of its pieces. If `over` is an operand of the only one,
    its sum over tokens may be found as well."""
    if len(pieces) == 1 and isinstance(pieces[0], ViaStandardisation):
        piece = pieces[0]
        square, whole = piece.by.squares(piece.row_sums())
        scaled, length = piece.scaled(), None
        doubt = taken(piece, whole, TOLERANCE)
        if isinstance(scaled, OuterProduct):
            length = _length(scaled)
            written = 2 * (scaled.tokens + 1) * _roundoff(scaled)
            doubt = doubt + _lengthened(square, (written + _added(scaled)) * length)
        else:
            doubt = doubt + _unit(scaled) * scaled.spread()
        return Squares(square, doubt, length if lengths else None)
    outers = [piece for piece in pieces if isinstance(piece, OuterProduct)]
    if len(outers) < len(pieces) or (len(pieces) == 1 and not gram_is_cheaper(outers[0])):
        return _written_out(pieces, lengths)
    found = [_own(piece, over if len(outers) == 1 else None) for piece in outers]
    rounded = [own.length for piece, own in zip(outers, found, strict=True) if lengths and not piece.sparse]
    if len(found) == 1:
        return found[0]._replace(length=_total(rounded))
    square = torch.stack([own.square for own in found]).sum(0)
    # A parameter used twice: its gradient is the sum of all uses, so tokens of all uses meet one another.
    for number, later in enumerate(outers):
        for earlier in outers[:number]:
            square = square + 2 * _cross(earlier, later)
    # A single token has nothing to cancel with, unless there is another use.
    lone = [_share(piece) * own.square if piece.tokens == 1 else 0.0 for piece, own in zip(outers, found, strict=True)]
    doubts = [own.doubt + more for own, more in zip(found, lone, strict=True) if own.doubt is not None]
    added = _total(
        [_added(piece) * own.length for piece, own in zip(outers, found, strict=True) if own.length is not None]
    )
    assert added is not None
    return Squares(square, _together(doubts) + _lengthened(square, added), _total(rounded))


def measure_affine(weight: OuterProduct, lengths: bool = True) -> Squares:
    """Measures a weight and its bias together, used by one token of each record: |left|² · (|right|² + 1)."""
    return _one_token(weight, _wide(weight.left), _wide(weight.right), lengths, biased=True)


def gram_is_cheaper(piece: OuterProduct) -> bool:
    """Compares operation counts, from the shape alone, so that a replayed step takes the same path."""
    return piece.sparse or piece.tokens == 1 or gram_cost(piece.tokens, piece.rows, piece.columns) < piece.elements


def gram_cost(tokens: int, rows: int, columns: int) -> float:
    """Products per token, to compare with rows · columns for writing the gradient out."""
    share = (tokens + STRIP) / 2 if tokens >= STRIPS_FROM else tokens
    return share * (rows + columns)


def squared(value: Tensor) -> Tensor:
    """[B, …] -> [B], fp64."""
    return squared_length(flat(value))


def _together(doubts: list[Tensor]) -> Tensor:
    """Uses may cancel each other, as tokens may: errors count by the sizes before cancellation."""
    return doubts[0] if len(doubts) == 1 else torch.stack([doubt.sqrt() for doubt in doubts]).sum(0).square()


def _total(lengths: Sequence[Tensor | None]) -> Tensor | None:
    found = [length for length in lengths if length is not None]
    return torch.stack(found).sum(0) if len(found) > 1 else next(iter(found), None)


def _written_out(pieces: list[PerRecordGradient], lengths: bool) -> Squares:
    first = pieces[0]
    if len(pieces) == 1 and isinstance(first, (Dense, ViaReparametrisation)):
        return Squares(first.spread(), None, None)
    dtype = wide(first.dtype)
    at_once = max(1, CHUNK // max(piece.elements for piece in pieces))
    parts = []
    for start in range(0, first.records, at_once):
        rows = slice(start, start + at_once)
        total = first.instances(rows, dtype)
        for piece in pieces[1:]:
            total = total + piece.instances(rows, dtype)
        parts.append(squared(total))
    square = torch.cat(parts)
    outers = [piece for piece in pieces if isinstance(piece, OuterProduct)]
    others = [_unit(piece) * piece.spread() for piece in pieces if not isinstance(piece, OuterProduct)]
    doubt = _together(others) if others else torch.zeros_like(square)
    for piece in pieces:
        if isinstance(piece, ViaStandardisation):
            doubt = doubt + taken(piece, piece.by.squares(piece.row_sums())[1], TOLERANCE)
    own = [_length(piece) for piece in outers]
    # One addition for each token, and one for each other piece; tensor cores truncate.
    depth = sum(piece.tokens for piece in outers) + len(pieces)
    written = 2 * depth * _roundoff(first) * sum(own, torch.zeros_like(square))
    added = sum((_added(piece) * length for piece, length in zip(outers, own, strict=True)), torch.zeros_like(square))
    rounded = [length for piece, length in zip(outers, own, strict=True) if lengths and not piece.sparse]
    return Squares(square, doubt + _lengthened(square, written + added), _total(rounded))


def _added(piece: OuterProduct) -> float:
    """Error bound of a record's share of the weighted product, in units of the summed lengths of its tokens, which are
    added up there one after the other. Twice the unit roundoff, since tensor cores truncate."""
    return piece.tokens * torch.finfo(wide(piece.dtype)).eps


def _lengthened(square: Tensor, error: Tensor) -> Tensor:
    """The largest change of a squared length that an error of that length can cause."""
    return (2 * square.clamp(min=0.0).sqrt() + error) * error


def _length(piece: OuterProduct) -> Tensor:
    """[B]: sum over tokens of |left|·|right|, which bounds the effect of rounding every element of one of them."""
    right = squared_length(piece.right)
    return (right if piece.sparse else squared_length(piece.left) * right).sqrt().sum(1)


def _own(piece: OuterProduct, over: Tensor | None) -> Squares:
    # In half precision only: in fp32 the products take longer than the kernel saves.
    halves = not piece.sparse and piece.left.dtype.itemsize == piece.right.dtype.itemsize == 2
    kernel = kernels.gram(piece.right.device) if halves and piece.tokens > 1 else None
    if kernel is not None:
        # The kernel takes sums of its first operand. Sides may be swapped: neither the norm nor its doubt changes.
        share = product_error(cut_off(piece.rows), cut_off(piece.columns))
        of_left, of_right = _vanishing(piece)
        if over is piece.right:
            bounds = Bounds(share, _added(piece), of_right, of_left)
            return Squares(*kernel(piece.right, piece.left, KERNEL_PART, bounds, True))
        bounds = Bounds(share, _added(piece), of_left, of_right)
        return Squares(*kernel(piece.left, piece.right, KERNEL_PART, bounds, over is piece.left))
    right = _wide(piece.right)
    left = piece.left if piece.sparse else _wide(piece.left)
    if piece.tokens == 1:
        return _one_token(piece, left, right, lengths=True)
    inner, left_sizes, right_sizes = (_whole if piece.tokens < STRIPS_FROM else _in_strips)(left, right)
    left_sizes, right_sizes = left_sizes.double(), right_sizes.double()
    length = (left_sizes * right_sizes).clamp(min=0.0).sqrt().sum(1)
    doubt = _share(piece) * length.square() + _lost(piece, left_sizes.amax(1), right_sizes.amax(1))
    return Squares(inner, doubt + _lengthened(inner, _added(piece) * length), length)


def chain(width: int, unit: float, part: int = PART) -> float:
    """Error bound of the product of two rows of `width` numbers, in units of the product of their lengths, if additions
    within a part of so many err by `unit` of the largest sum and the additions of parts are rounded.

    In whichever order the numbers of a part are added, each addition errs by at most `unit` of a sum that is no larger
    than the product of the lengths of the two rows' parts. Over the parts, these products add up to at most that of the
    whole lengths (Cauchy-Schwarz), and so does every sum of parts, each of which is rounded once.
    """
    rounding = torch.finfo(torch.float32).eps / 2
    if unit < rounding:  # in fp64 there are no parts
        return width * unit
    return min(width, part) * unit + (-(-width // part) - 1) * rounding


def cut_off(width: int) -> float:
    """`chain` for the kernel. Tensor cores align the products of a step to the largest one and truncate the bits below:
    up to eps of it for each number."""
    return chain(width, torch.finfo(torch.float32).eps, KERNEL_PART)


def product_error(left: float, right: float) -> float:
    """Error bound of Σ (AAᵀ ∘ GGᵀ), in units of (Σ |a||g|)² over the tokens, if products of rows err by at most `left`
    and `right` of their lengths.

    Entry by entry, |LR - L'R'| ≤ ((1 + left)(1 + right) - 1)·|a||a'|·|g||g'|, and their product is rounded once more.
    The sum is in fp64, in the kernel too. One percent more covers the rounding of the lengths themselves, which are
    measured too.
    """
    return 1.01 * ((1 + left) * (1 + right) - 1 + torch.finfo(torch.float32).eps)


def _share(piece: OuterProduct) -> float:
    unit = _roundoff(piece)
    return product_error(0.0 if piece.sparse else chain(piece.rows, unit), chain(piece.columns, unit))


def _roundoff(piece: PerRecordGradient) -> float:
    return torch.finfo(wide(piece.dtype)).eps / 2


def _one_token(piece: OuterProduct, left: Tensor, right: Tensor, lengths: bool, biased: bool = False) -> Squares:
    """|left|²·|right|²: there is no matrix of tokens, and nothing cancels."""
    right_sizes = squared_length(right).squeeze(1)
    left_sizes = torch.ones_like(right_sizes) if piece.sparse else squared_length(left).squeeze(1)
    square = left_sizes * right_sizes
    doubt, length = _lost(piece, left_sizes, right_sizes), square.sqrt() if lengths else None
    return Squares(square + left_sizes if biased else square, doubt, length)


def _whole(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lefts, rights = _products(left, left, right.dtype), _in_parts(right, right)
    left_sizes, right_sizes = _diagonal(lefts), _diagonal(rights)
    return lefts.mul_(rights).sum(dim=(1, 2), dtype=torch.float64), left_sizes, right_sizes


def _in_strips(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both Gram matrices are symmetric: a strip of rows needs only the columns up to its own end."""
    tokens = right.shape[1]
    inner = torch.zeros(len(right), dtype=torch.float64, device=right.device)
    left_sizes, right_sizes = [], []
    cuts = [*range(0, tokens - STRIP // 2, STRIP), tokens]
    for start, stop in pairwise(cuts):
        lefts = _products(left[:, start:stop], left[:, :stop], right.dtype)
        rights = _in_parts(right[:, start:stop], right[:, :stop])
        left_sizes.append(_diagonal(lefts[:, :, start:]))
        right_sizes.append(_diagonal(rights[:, :, start:]))
        both = lefts.mul_(rights)
        inner += both[:, :, start:].sum(dim=(1, 2), dtype=torch.float64)
        if start:
            inner += 2 * both[:, :, :start].sum(dim=(1, 2), dtype=torch.float64)
    return inner, torch.cat(left_sizes, 1), torch.cat(right_sizes, 1)


def _products(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Products of the rows of both; for row numbers, whether they are equal."""
    if one.is_floating_point():
        return _in_parts(one, other)
    return (one.unsqueeze(2) == other.unsqueeze(1)).to(dtype)


def _in_parts(one: Tensor, other: Tensor) -> Tensor:
    """one·otherᵀ, summed in the parts that `chain` assumes."""
    other = other.transpose(1, 2)
    if one.dtype == torch.float64:
        return one @ other
    (left, *lefts), (right, *rights) = one.split(PART, 2), other.split(PART, 1)
    total = left @ right
    for left, right in zip(lefts, rights, strict=True):
        total.baddbmm_(left, right)
    return total


def _cross(one: OuterProduct, other: OuterProduct) -> Tensor:
    """<gradient by one use, gradient by the other> for each record."""
    rights = _in_parts(_wide(one.right), _wide(other.right))
    if one.sparse and not other.sparse:
        lefts = _wide(other.left).gather(2, one.left.unsqueeze(1).expand(-1, other.tokens, -1)).transpose(1, 2)
    elif other.sparse and not one.sparse:
        lefts = _wide(one.left).gather(2, other.left.unsqueeze(1).expand(-1, one.tokens, -1))
    else:
        left, right = (one.left, other.left) if one.sparse else (_wide(one.left), _wide(other.left))
        lefts = _products(left, right, rights.dtype)
    return (lefts * rights).sum(dim=(1, 2), dtype=torch.float64)


def _lost(piece: OuterProduct, left: Tensor, right: Tensor) -> Tensor:
    """[B]: error from vanishing products, from the largest squared lengths of both sides."""
    of_left, of_right = _vanishing(piece)
    return torch.add(of_right * right, left, alpha=of_left)


def _vanishing(piece: OuterProduct) -> tuple[float, float]:
    """Products that vanish in fp32 matter only where the other side can lift them. Returns the bounds, in units of the
    largest squared length of the left side and of the right side."""
    format = torch.finfo(wide(piece.dtype))
    unit = format.tiny * format.eps * piece.tokens**2
    return unit * piece.columns, unit * piece.rows


def _unit(piece: PerRecordGradient) -> float:
    width = UNKNOWN_WIDTH
    if isinstance(piece, OuterProduct):
        width = piece.columns + (1 if piece.sparse else piece.rows)
    own = DEVIATIONS * width**0.5 * torch.finfo(wide(piece.dtype)).eps / 2
    return min(own, MOST_UNIT * torch.finfo(wide(piece.dtype)).eps)


def _diagonal(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=1, dim2=2).clone()


def _wide(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))
