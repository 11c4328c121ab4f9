"""The books of one micro-batch: it collects pieces from the backward pass, measures norms, and writes weighted sums.

A parameter's norm is computed as soon as its last use has reported, while its tensors are still in the caches. The
products with the clip factors wait until the norms of all parameters are known; each product then frees its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from murmuration.train.clip.norms import TOLERANCE, Squares, measure, measure_affine, squared
from murmuration.train.clip.per_record import (
    CHUNK,
    ChannelsLast,
    ClipWeights,
    Dense,
    OuterProduct,
    PerRecordGradient,
    Recomputed,
    Reported,
    TokenSum,
    ViaReparametrisation,
    flat,
    lengths_of_stretches,
    operands_of,
    wide,
)
from murmuration.train.clip.rule import ClipError, stretch, stretches
from murmuration.train.clip.standardised import FEWER, ViaStandardisation
from murmuration.train.clip.sums import SMALL, WIDEST_SPAN, GradientSums, OnlyIf, SpanSums, products_into

# Outside this range, squares may have overflowed or vanished in fp32.
SMALLEST, LARGEST = 1e-24, 1e24
# Relative rounding error of the elements of a bf16 operand that carries the clip factor.
BF16_ROUNDING = 2.0**-8
# Uses of a weight from which on they are joined before they are measured.
MANY = 2

Piece = TypeVar("Piece", bound=PerRecordGradient)


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


class _Joined(NamedTuple):
    """Where a small parameter's per-record gradients lie: columns of `values` [B, elements of all in the group]."""

    group: int
    values: Tensor
    start: int
    stop: int


class NormAccumulator:
    """`group_of` says which parameters are clipped together; `hold`, how large a per-record gradient may be, relative
    to the activations that it replaces, to be kept instead of them; `rounded`, whether weighted bf16 operands are
    rounded to bf16; `together`, whether small parameters are measured together and products of many parameters added at
    once, which saves launches on GPUs; `rows`, how many rows of activations a record has.

    With `defer`, nothing is asked of the device. The sums are added only if the micro-batch is `ordinary`: every norm
    is finite, and none is in doubt.
    """

    def __init__(
        self, group_of: Mapping[str, int], records: int, hold: float, rounded: bool, device: torch.device,
        together: bool = False, defer: bool = False, rows: int = 1,
    ) -> None:  # fmt: skip
        self._rows = rows
        self._group_of, self._hold = group_of, hold
        self._together, self._defer = together, defer
        self._small: set[str] = set()
        self._joined: dict[str, _Joined] = {}
        self.ordinary: Tensor | None = None
        self._pieces: dict[str, list[PerRecordGradient]] = {}
        self._measured: set[str] = set()
        self._operands: list[tuple[str, Tensor, int]] = []
        """Of each parameter's gradient, with the version that its norm was computed of."""
        self._rounded = rounded
        self.doubtful: Tensor | None = None
        self.measured: Tensor | None = None
        """Norms [groups, B] without what rounding of operands may add; None if nothing is added for it."""
        self._records = records
        self.keep = torch.zeros(records, dtype=torch.bool, device=device)
        self._keeps_all = self._finite = False
        self._none = torch.zeros(records, dtype=torch.float64, device=device)
        self._terms = [Terms() for _ in range(max(group_of.values()) + 1)]

    def add(self, pieces: Sequence[Reported], uses: Mapping[str, int]) -> None:
        if self._is_affine(pieces, uses):
            weight, bias = pieces
            assert isinstance(weight, OuterProduct) and isinstance(bias, Dense)
            self._pieces[weight.name], self._pieces[bias.name] = [weight], [bias]
            self._add(weight.name, measure_affine(weight, lengths=self._rounded))
            self._has_measured(weight.name)
            self._has_measured(bias.name)
            return
        over, sums = next((piece.over for piece in pieces if isinstance(piece, TokenSum)), None), None
        for reported in pieces:  # a weight, and then its bias
            piece = reported.taken(sums) if isinstance(reported, TokenSum) else reported
            own = self._pieces.setdefault(piece.name, [])
            own.append(piece)
            if piece.name in self._measured or len(own) > uses[piece.name]:
                raise ClipError(f"{piece.name} reported more uses than the forward pass had; its norm would be wrong")
            if len(own) == uses[piece.name]:
                sums = self._measure(piece.name, over)

    def _measure(self, name: str, over: Tensor | None = None) -> Tensor | None:
        """Also returns the sum over tokens of `over`, if that was a by-product."""
        own = self._pieces[name] = joined(self._pieces[name])
        for number, piece in enumerate(own):
            if _only_written(piece) or (len(own) == 1 and self._worth_holding(piece)):
                own[number] = Dense(name, piece.instances(slice(None), wide(piece.dtype)))
        self._has_measured(name)
        if self._together and len(own) == 1 and _is_small(own[0]):
            self._small.add(name)
            return None
        if len(own) == 1 and isinstance(own[0], Dense):
            self._terms[self._group_of[name]].roots += lengths_of_stretches(flat(own[0].value))
            return None
        found = measure(own, lengths=self._rounded, over=over)
        self._add(name, found)
        return found.sums

    def _has_measured(self, name: str) -> None:
        self._measured.add(name)
        self._operands += [(name, x, x._version) for piece in self._pieces[name] for x in operands_of(piece)]

    def _require_unchanged(self) -> None:
        """What is added must be what was measured. In between, backward passes of the model's own functions ran, and
        the tensors that these were given are held here, too."""
        for name, tensor, version in self._operands:
            if tensor._version != version:
                raise ClipError(
                    f"the backward pass of a function of the model's own writes into a tensor that the gradient of "
                    f"{name} is made of; let it make new ones (g * w, not g.mul_(w))"
                )
        self._operands.clear()  # or they would be held until all parameters are added

    def _add(self, name: str, found: Squares) -> None:
        terms = self._terms[self._group_of[name]]
        terms.squares.append(found.square)
        if found.doubt is not None:
            terms.doubts.append(found.doubt)
        if self._rounded and found.length is not None:
            terms.lengths.append(found.length)

    def _is_affine(self, pieces: Sequence[Reported], uses: Mapping[str, int]) -> bool:
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
        if isinstance(piece, ViaStandardisation):
            return self._worth_holding(piece.inner)
        if isinstance(piece, Recomputed):
            return piece.elements * piece.records <= self._hold * (piece.inputs[0].numel() + piece.upstream.numel())
        if not isinstance(piece, OuterProduct) or piece.sparse or piece.tokens == 1:
            return False
        return piece.elements <= self._hold * piece.tokens * (piece.rows + piece.columns)

    def norms(self, eligible: Tensor) -> Tensor:
        """[groups, B], fp64. Also decides which records are kept: all that are `eligible` and have a norm. Their norms
        are right to within half of TOLERANCE for products, and for convolutions and functions without a rule if their
        rounding errors are independent. With `defer`, that holds for ordinary micro-batches."""
        self._require_unchanged()
        for name in self._pieces.keys() - self._measured:  # some use never reached the loss
            self._measure(name)
        self._join_small()
        found = [terms.added(self._none) for terms in self._terms]
        squares, doubts, roundings = (torch.stack(each) for each in zip(*found, strict=True))
        # Comparisons with NaN are false, and an infinite doubt exceeds any norm in range.
        sure = (squares > SMALLEST) & (squares < LARGEST) & (doubts <= TOLERANCE * squares)
        doubtful = (eligible & ~sure).any(0)
        norms = self._norms(squares, roundings)
        finite = (norms < math.inf).all(0)
        self.keep = eligible & finite
        # Where every norm is finite, so are all operands, and a factor of 0 suffices to leave out a record or padding.
        ordinary = (finite & ~doubtful).all()
        if self._defer:
            self.doubtful, self._keeps_all, self._finite, self.ordinary = doubtful, True, True, ordinary
            return norms
        # One query in the usual case, since on a GPU the host waits for each answer.
        self._keeps_all = bool(ordinary)
        self._finite = self._keeps_all or bool(finite.all())
        if not self._keeps_all and bool(doubtful.any()):
            self.doubtful = doubtful
            # Measured again from gradients that are written out in fp64, and added from these very numbers as well
            # (`write_sums`).
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
        if not self._rounded:
            return norms
        self.measured = norms
        # What rounding the weighted operands may add is counted as if it were there, so the factor falls by as much.
        return norms + roundings.sqrt()

    def write_sums(self, factors: Tensor, sums: GradientSums) -> None:
        """Adds the sums with `factors` [groups, B] over the kept records to the totals, and empties the book.

        An exact norm does not hold for a sum that is then rounded differently: for doubtful records, the very numbers
        that were measured are added, separately from the products of the other records.
        """
        apart, keep = None, self.keep
        if self.doubtful is not None and not self._defer:
            apart = (keep & self.doubtful).nonzero().squeeze(1)
            keep = keep & ~self.doubtful
        # A factor of 0 leaves out any finite record. Where one is not finite, 0·inf would be NaN in every sum, so both
        # operands are masked as well.
        touch = None if self._finite else keep
        chosen = factors if self._keeps_all else torch.where(keep, factors, 0.0)
        weights = [ClipWeights(own, touch, self._rounded) for own in chosen]
        if apart is not None:
            for name in self._pieces:
                for part, written in self._written(name, apart):
                    sums.add(name, torch.tensordot(factors[self._group_of[name], part].double(), written, dims=1))
        if self._together and isinstance(sums, SpanSums):
            self._write_spans(weights, sums)
        if self.ordinary is not None:
            sums = OnlyIf(sums, self.ordinary)
        for name in list(self._pieces):
            for piece in self._pieces.pop(name):
                add_in_stretches(piece, weights[self._group_of[name]], sums, self._rows)

    def _join_small(self) -> None:
        """Puts small per-record gradients side by side, [B, elements of all] for each group, and measures them."""
        in_order = [piece for name in self._group_of if name in self._small for piece in self._pieces[name]]
        for group, terms in enumerate(self._terms):
            own = [piece for piece in in_order if isinstance(piece, Dense) and self._group_of[piece.name] == group]
            if not own:
                continue
            joined = torch.cat([flat(piece.value) for piece in own], 1)
            terms.roots += lengths_of_stretches(joined)
            start = 0
            for piece in own:
                stop = start + piece.elements
                self._pieces[piece.name] = [Dense(piece.name, joined[:, start:stop].view(piece.value.shape))]
                self._joined[piece.name] = _Joined(group, joined, start, stop)
                start = stop

    def _write_spans(self, weights: list[ClipWeights], sums: SpanSums) -> None:
        """The sums of parameters that are used once, as one product or written out; not where records cannot
        be cut into equally long stretches."""
        parts = len(stretches(self._records, self._rows))
        if self._records % parts:
            return
        simple = [name for name, own in self._pieces.items() if len(own) == 1 and _is_product(own[0])]
        fitting = [name for name in simple if parts * self._pieces[name][0].elements <= WIDEST_SPAN]
        for names in sums.spans(fitting, parts):
            sizes = {name: self._pieces[name][0].elements for name in names}
            found = torch.empty(parts, sum(sizes.values()), device=self.keep.device)
            start = 0
            for _, neighbours in groupby(names, key=self._neighbourhood):
                several = list(neighbours)
                stop = start + sum(sizes[name] for name in several)
                operands = self._taken(several).operands(weights[self._group_of[several[0]]])
                left, right = (x.unflatten(0, (parts, -1)) for x in operands)
                products_into(found[:, start:stop].unflatten(1, (left.shape[2], right.shape[2])), left, right)
                start = stop
            sums.add_span(names, found, self.ordinary)

    def _neighbourhood(self, name: str) -> object:
        """The same for names that lie side by side, in the totals and in what was joined."""
        return self._joined[name].group if name in self._joined else name

    def _taken(self, names: list[str]) -> OuterProduct | Dense:
        """The piece of one parameter, or of several that lie side by side; it leaves the book."""
        (piece, *_) = [self._pieces.pop(name)[0] for name in names]
        if len(names) > 1:
            first, last = self._joined[names[0]], self._joined[names[-1]]
            piece = Dense(names[0], first.values[:, first.start : last.stop])
        assert isinstance(piece, (OuterProduct, Dense)), "only products are added together"
        return piece

    def _written(self, name: str, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradients of chosen records in fp64, a few at a time."""
        own = self._pieces[name]
        at_once = max(1, CHUNK // 2 // max(piece.elements for piece in own))
        for part in rows.split(at_once) if len(rows) else ():
            total = own[0].instances(part, torch.float64)
            for piece in own[1:]:
                total = total + piece.instances(part, torch.float64)
            yield part, total


def joined(pieces: list[PerRecordGradient]) -> list[PerRecordGradient]:
    """The pieces of a weight that is used many times, as by a recurrent layer at each of its steps: its products become
    one of all their tokens, which otherwise would be compared pair by pair."""
    products = [piece for piece in pieces if isinstance(piece, OuterProduct) and not piece.sparse]
    dense = [piece for piece in pieces if isinstance(piece, Dense)]
    if len(products) > MANY:
        first = products[0]
        left, right = (torch.cat([getattr(piece, side) for piece in products], 1) for side in ("left", "right"))
        pieces = [piece for piece in pieces if not any(piece is own for own in products)] + [
            replace(first, left=left, right=right)
        ]
    if len(dense) > MANY:
        total = torch.stack([piece.value for piece in dense]).sum(0)
        rest = [piece for piece in pieces if not any(piece is own for own in dense)]
        pieces = [*rest, Dense(dense[0].name, total)]
    return pieces


def _is_small(piece: PerRecordGradient) -> bool:
    return isinstance(piece, Dense) and piece.elements <= SMALL and piece.dtype == torch.float32


def _is_product(piece: PerRecordGradient) -> TypeGuard[OuterProduct | Dense]:
    """Whether its weighted sum is one product in fp32."""
    if isinstance(piece, ChannelsLast) or (isinstance(piece, OuterProduct) and piece.sparse):
        return False
    return isinstance(piece, (OuterProduct, Dense)) and wide(piece.dtype) == torch.float32


def add_in_stretches(piece: PerRecordGradient, weights: ClipWeights, sums: GradientSums, rows: int = 1) -> None:
    """Adds each stretch's sum to the totals separately (`rounding_allowance`)."""
    at_once = stretch(rows * FEWER if isinstance(piece, ViaStandardisation) else rows)
    if not _is_product(piece):
        for own, chosen in _in_parts(piece, weights, at_once):
            own.add_weighted(chosen, sums)
        return
    # Several stretches share a call where copies of their operands take no more memory than the product. Whether any is
    # copied depends on the records; how they are cut must not.
    together = max(1, piece.elements // (at_once * piece.tokens * piece.width))
    for own, chosen in _in_parts(piece, weights, at_once * together):
        sums.add_product(piece.name, *own.operands(chosen), at_once * piece.tokens)


def _in_parts(piece: Piece, weights: ClipWeights, records: int) -> Iterator[tuple[Piece, ClipWeights]]:
    """The piece with its factors, so many records at a time."""
    if piece.records <= records:
        yield piece, weights
        return
    for start in range(0, piece.records, records):
        part = slice(start, start + records)
        yield piece.part(part), weights.part(part)


def _only_written(piece: PerRecordGradient) -> bool:
    """Whether the terms of its gradient are unknown, so that what is added must be exactly what was measured."""
    inner = piece.inner if isinstance(piece, ViaReparametrisation) else piece
    return isinstance(inner, Recomputed) and inner.terms is None
