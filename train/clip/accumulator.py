"""The books of one micro-batch: it collects pieces from the backward pass, measures norms, and writes weighted sums.

A parameter's norm is computed as soon as its last use has reported, while its tensors are still in the caches. The
products with the clip factors wait until the norms of all parameters are known; each product then frees its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from murmuration.train.clip.norms import Squares, measure, measure_affine, squared
from murmuration.train.clip.per_record import (
    CHUNK,
    ClipWeights,
    Dense,
    OuterProduct,
    PerRecordGradient,
    Recomputed,
    ViaReparametrisation,
    flat,
    lengths_of_stretches,
    wide,
)
from murmuration.train.clip.rule import ClipError, stretches
from murmuration.train.clip.sums import GradientSums

# Relative error of a squared norm above which it is computed again (`rule.FACTOR_ROUNDING` allows for it). Outside the
# range, squares may have overflowed or vanished in fp32.
TOLERANCE = 1e-2
SMALLEST, LARGEST = 1e-24, 1e24
# Relative rounding error of the elements of a bf16 operand that carries the clip factor.
BF16_ROUNDING = 2.0**-8


@dataclass
class Terms:
    """The terms of one group's norms, [B] each. They are summed at the end: on a GPU, launching a kernel for every
    layer would take longer than the additions."""

    squares: list[Tensor] = field(default_factory=list)
    roots: list[Tensor] = field(default_factory=list)
    """Lengths whose squares are part of the sum."""
    doubts: list[Tensor] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)

    def added(self, none: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Squares, doubts, and squares of what rounding of operands adds to the norm; `none` is the empty sum."""
        square = by_pairs(self.squares, none)
        if self.roots:
            square = square + _halved(torch.stack(self.roots).double().square())
        # Errors of elements that round alike, or that cancel unrounded, add up: by lengths, not by squares.
        rounding = _halved((BF16_ROUNDING * torch.stack(self.lengths)).square()) if self.lengths else none
        return square, by_pairs(self.doubts, none), rounding


def by_pairs(terms: list[Tensor], none: Tensor) -> Tensor:
    return _halved(torch.stack(terms)) if terms else none


def _halved(rows: Tensor) -> Tensor:
    """[N, B] -> [B], summed elementwise, so that a record's sum does not depend on its position among the records, as
    it may in a reduction."""
    while len(rows) > 1:
        half = len(rows) // 2
        folded = rows[:half] + rows[half : 2 * half]
        rows = torch.cat([folded, rows[2 * half :]]) if len(rows) % 2 else folded
    return rows[0]


class NormAccumulator:
    """`group_of` says which parameters are clipped together; `hold`, how large a per-record gradient may be, relative
    to the activations that it replaces, to be kept instead of them; `rounded`, whether weighted bf16 operands are
    rounded to bf16."""

    def __init__(
        self, group_of: Mapping[str, int], records: int, hold: float, rounded: bool, device: torch.device
    ) -> None:
        self._group_of, self._hold = group_of, hold
        self._pieces: dict[str, list[PerRecordGradient]] = {}
        self._measured: set[str] = set()
        self._rounded = rounded
        self.doubtful: Tensor | None = None
        self.keep = torch.zeros(records, dtype=torch.bool, device=device)
        self._keeps_all = False
        self._none = torch.zeros(records, dtype=torch.float64, device=device)
        self._terms = [Terms() for _ in range(max(group_of.values()) + 1)]

    def add(self, pieces: list[PerRecordGradient], uses: Mapping[str, int]) -> None:
        if self._is_affine(pieces, uses):
            weight, bias = pieces
            assert isinstance(weight, OuterProduct)
            self._pieces[weight.name], self._pieces[bias.name] = [weight], [bias]
            self._add(weight.name, measure_affine(weight, lengths=self._rounded))
            self._measured |= {weight.name, bias.name}
            return
        for piece in pieces:
            own = self._pieces.setdefault(piece.name, [])
            own.append(piece)
            if piece.name in self._measured or len(own) > uses[piece.name]:
                raise ClipError(f"{piece.name} reported more uses than the forward pass had; its norm would be wrong")
            if len(own) == uses[piece.name]:
                self._measure(piece.name)

    def _measure(self, name: str) -> None:
        own = self._pieces[name]
        for number, piece in enumerate(own):
            if _only_written(piece) or (len(own) == 1 and self._worth_holding(piece)):
                own[number] = Dense(name, piece.instances(slice(None), wide(piece.dtype)))
        self._measured.add(name)
        if len(own) == 1 and isinstance(own[0], Dense):
            self._terms[self._group_of[name]].roots += lengths_of_stretches(flat(own[0].value))
            return
        self._add(name, measure(own, lengths=self._rounded))

    def _add(self, name: str, found: Squares) -> None:
        terms = self._terms[self._group_of[name]]
        terms.squares.append(found.square)
        if found.doubt is not None:
            terms.doubts.append(found.doubt)
        if self._rounded and found.length is not None:
            terms.lengths.append(found.length)

    def _is_affine(self, pieces: list[PerRecordGradient], uses: Mapping[str, int]) -> bool:
        """Whether these are a weight and its bias, each used once, by one token per record, and clipped together: then
        they share lengths."""
        if len(pieces) != 2:
            return False
        weight, bias = pieces
        return (
            isinstance(weight, OuterProduct) and weight.tokens == 1 and not weight.sparse
            and isinstance(bias, Dense) and bias.value.data_ptr() == weight.left.data_ptr()
            and bias.elements == weight.left.shape[2] and bias.dtype == weight.left.dtype
            and uses[weight.name] == uses[bias.name] == 1
            and self._group_of[weight.name] == self._group_of[bias.name]
            and not self._pieces.keys() & {weight.name, bias.name}
        )  # fmt: skip

    def _worth_holding(self, piece: PerRecordGradient) -> bool:
        if isinstance(piece, Recomputed):
            return piece.elements * piece.records <= self._hold * (piece.inputs[0].numel() + piece.upstream.numel())
        if not isinstance(piece, OuterProduct) or piece.sparse or piece.tokens == 1:
            return False
        return piece.elements <= self._hold * piece.tokens * (piece.rows + piece.columns)

    def norms(self, eligible: Tensor) -> Tensor:
        """[groups, B], fp64. Also decides which records are kept: all that are `eligible` and have a norm. Their norms
        are right to within half of TOLERANCE for products, and for convolutions and functions without a rule if their
        rounding errors are independent."""
        for name in self._pieces.keys() - self._measured:  # some use never reached the loss
            self._measure(name)
        found = [terms.added(self._none) for terms in self._terms]
        squares, doubts, roundings = (torch.stack(each) for each in zip(*found, strict=True))
        # Comparisons with NaN are false, and an infinite doubt exceeds any norm in range.
        sure = (squares > SMALLEST) & (squares < LARGEST) & (doubts <= TOLERANCE * squares)
        doubtful = (eligible & ~sure).any(0)
        norms = self._norms(squares, roundings)
        self.keep = eligible & (norms < math.inf).all(0)
        # One query in the usual case, since on a GPU the host waits for each answer; two only where some slot is empty.
        self._keeps_all = bool((self.keep & ~doubtful).all())
        if not self._keeps_all and bool(doubtful.any()):
            self.doubtful = doubtful
            rows = self.doubtful.nonzero().squeeze(1)
            squares[:, rows] = 0.0
            roundings[:, rows] = 0.0
            for name in self._pieces:
                for part, written in self._written(name, rows):
                    squares[self._group_of[name], part] += squared(written)
            norms = self._norms(squares, roundings)
            self.keep = eligible & (norms < math.inf).all(0)
        return norms

    def _norms(self, squares: Tensor, roundings: Tensor) -> Tensor:
        norms = squares.sqrt()
        return norms + roundings.sqrt() if self._rounded else norms

    def write_sums(self, factors: Tensor, sums: GradientSums) -> None:
        """Adds the sums with `factors` [groups, B] over the kept records to the totals, and empties the book.

        An exact norm does not hold for a sum that is then rounded differently: for doubtful records, the very numbers
        that were measured are added, separately from the products of the other records.
        """
        apart, keep = None, self.keep
        if self.doubtful is not None:
            apart = (keep & self.doubtful).nonzero().squeeze(1)
            keep = keep & ~self.doubtful
        touch = None if self._keeps_all else keep
        weights = [
            ClipWeights(own if touch is None else torch.where(keep, own, 0.0), touch, self._rounded) for own in factors
        ]
        for name in list(self._pieces):
            group = self._group_of[name]
            for part, written in () if apart is None else self._written(name, apart):
                sums.add(name, torch.tensordot(factors[group, part].double(), written, dims=1))
            for piece in self._pieces.pop(name):
                add_in_stretches(piece, weights[group], sums)

    def _written(self, name: str, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradients of chosen records in fp64, a few at a time."""
        own = self._pieces[name]
        at_once = max(1, CHUNK // 2 // max(piece.elements for piece in own))
        for part in rows.split(at_once) if len(rows) else ():
            total = own[0].instances(part, torch.float64)
            for piece in own[1:]:
                total = total + piece.instances(part, torch.float64)
            yield part, total


def add_in_stretches(piece: PerRecordGradient, weights: ClipWeights, sums: GradientSums) -> None:
    """Adds each stretch's sum to the totals separately (`rounding_allowance`)."""
    parts = stretches(piece.records)
    if len(parts) == 1:
        piece.add_weighted(weights, sums)
        return
    for rows in parts:
        piece.part(rows).add_weighted(weights.part(rows), sums)


def _only_written(piece: PerRecordGradient) -> bool:
    """Whether the terms of its gradient are unknown, so that what is added must be exactly what was measured."""
    inner = piece.inner if isinstance(piece, ViaReparametrisation) else piece
    return isinstance(inner, Recomputed) and inner.terms is None
