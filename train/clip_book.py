"""The books of one micro-batch: pieces as the backward pass brings them, norms at once, and the weighted sums.

A parameter's norm is taken as soon as its last use has reported, while its tensors are still in the caches. The
products with the clip factors wait until the norms of all parameters are known; each frees its tensors as it is made.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from train.clip_norms import CHUNK, measure, squared
from train.clip_pieces import Outer, Piece, Weights, Whole, wide
from train.sums import GradientSums

# Squared norms may be wrong by this much of themselves before they are taken again; outside the range, squares may
# have overflown or vanished in fp32.
TOLERANCE = 1e-4
SMALLEST, LARGEST = 1e-24, 1e24


class Book:
    """`group_of` says which parameters are clipped together; `hold` how large a gradient per record may be, beside
    the activations that it replaces, to be kept instead of them; `rounded`, that operands are in half precision."""

    def __init__(
        self, group_of: Mapping[str, int], records: int, hold: float, rounded: bool, device: torch.device
    ) -> None:
        self._group_of, self._hold = group_of, hold
        self._pieces: dict[str, list[Piece]] = {}
        self._measured: set[str] = set()
        self._rounded = rounded
        shape = (max(group_of.values()) + 1, records)
        self._squares = torch.zeros(shape, dtype=torch.float64, device=device)
        self._doubts = torch.zeros_like(self._squares)

    def enter(self, pieces: list[Piece], uses: Mapping[str, int]) -> None:
        for piece in pieces:
            own = self._pieces.setdefault(piece.name, [])
            own.append(piece)
            if len(own) == uses[piece.name]:
                self._measure(piece.name)

    def _measure(self, name: str) -> None:
        own = self._pieces[name]
        first = own[0]
        if len(own) == 1 and isinstance(first, Outer) and self._worth_holding(first):
            own[:] = [Whole(name, first.instances(slice(None), wide(first.right.dtype)))]
        found = measure(own)
        self._squares[self._group_of[name]] += found.square
        self._doubts[self._group_of[name]] += found.doubt
        self._measured.add(name)

    def _worth_holding(self, piece: Outer) -> bool:
        if piece.sparse or piece.tokens == 1:
            return False
        return piece.elements <= self._hold * piece.tokens * (piece.rows + piece.columns)

    def norms(self, eligible: Tensor) -> Tensor:
        """[groups, B], fp64. Of records that are `eligible`, to within a relative 1e-4 in all cases."""
        for name in self._pieces.keys() - self._measured:  # some use never reached the loss
            self._measure(name)
        in_range = (self._squares > SMALLEST) & (self._squares < LARGEST) & torch.isfinite(self._doubts)
        sure = in_range & (self._doubts <= TOLERANCE * self._squares)
        doubtful = (~sure & eligible).any(0)
        if bool(doubtful.any()):
            rows = doubtful.nonzero().squeeze(1)
            self._squares[:, rows] = self._exact(rows)
        return (self._squares + self._doubts if self._rounded else self._squares).sqrt()

    def _exact(self, rows: Tensor) -> Tensor:
        """Written out, in fp64."""
        squares = self._squares.new_zeros(len(self._squares), len(rows))
        for name, own in self._pieces.items():
            at_once = max(1, CHUNK // 2 // max(piece.elements for piece in own))
            for start in range(0, len(rows), at_once):
                part = rows[start : start + at_once]
                total = sum(piece.instances(part, torch.float64) for piece in own)
                assert isinstance(total, Tensor)
                squares[self._group_of[name], start : start + at_once] += squared(total)
        return squares

    def pay_out(self, weights: list[Weights], sums: GradientSums) -> None:
        """The weighted sums into the totals; nothing is left in the book."""
        for name in list(self._pieces):
            for piece in self._pieces.pop(name):
                piece.add_weighted(weights[self._group_of[name]], sums)
