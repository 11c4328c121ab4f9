"""Gradients in the space in which they are clipped: each element multiplied by a public power of two.

`accounting/scale_table.py` says why. Here the scales meet the numbers: a product of two matrices is scaled by its
operands, the left by rows and the right by columns, before anything is measured; whatever else a layer reports is
scaled element by element. A clip engine that is given scales measures, clips and sums scaled gradients, so that C, the
sum's sensitivity and its rounding are of that space; `undo` maps back, once the noise is in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from murmuration.accounting.scale_table import ScaleTable
from murmuration.train.clip.per_record import (
    Dense,
    OuterProduct,
    PerRecordGradient,
    Recomputed,
    Reported,
    TokenSum,
    ViaReparametrisation,
)
from murmuration.train.clip.rule import ClipError
from murmuration.train.clip.standardised import ViaStandardisation
from murmuration.train.clip.sums import product
from murmuration.train.distributed.shards import Fragment

Factors = tuple[Tensor, Tensor]
"""[rows] and [columns], fp32: powers of two, and so is the product of two of them."""


class Scaling:
    def __init__(self, table: ScaleTable) -> None:
        self._table = table
        self._factors: dict[tuple[str, torch.device], Factors] = {}

    @property
    def digest(self) -> str:
        return self._table.digest

    def require_fit(self, shapes: Mapping[str, torch.Size]) -> None:
        """Refuses scales of other shapes than the trained weights have, and scales of none of them."""
        found = [name for name in shapes if name in self._table.weights]
        if not found:
            raise ClipError("none of the trained weights has scales; take them from a run of the same model")
        for name in found:
            rows, columns = (len(each) for each in self._table.weights[name])
            if (rows, columns) != as_matrix(shapes[name]):
                raise ClipError(
                    f"the scales of {name} are for {rows} rows and {columns} columns, but it is {list(shapes[name])}; "
                    "take them from a run of the same model"
                )

    def of(self, pieces: Sequence[Reported]) -> list[Reported]:
        """What a layer reported, scaled."""
        return [self._scaled(piece) if piece.name in self._table.weights else piece for piece in pieces]

    def times(self, name: str, value: Tensor) -> Tensor:
        """Scales a tensor [*shape of the parameter], or [B, *shape]."""
        if name not in self._table.weights:
            return value
        rows, columns = self._on(name, value.device)
        value = _in_range(value)
        matrices = value.reshape(-1, len(rows), len(columns))
        return (matrices * (rows.unsqueeze(1) * columns).to(value.dtype)).view(value.shape)

    @torch.no_grad()
    def undo(self, values: Tensor, fragment: Fragment) -> None:
        """Divides a flat piece of one parameter by its scales, in place."""
        if fragment.name not in self._table.weights:
            return
        rows, columns = self._on(fragment.name, values.device)
        places = torch.arange(fragment.start, fragment.start + fragment.length, device=values.device)
        values.div_(rows[places // len(columns)] * columns[places % len(columns)])

    def _scaled(self, piece: Reported) -> PerRecordGradient:
        if isinstance(piece, TokenSum):
            piece = piece.taken()
        if isinstance(piece, OuterProduct):
            rows, columns = self._on(piece.name, piece.right.device)
            if (piece.rows, piece.columns) == (len(rows), len(columns)):
                return _by_operands(piece, rows, columns)
            return self._written(_recomputed(piece))  # the layer saw the weight in another shape
        if isinstance(piece, Dense):
            return replace(piece, value=self.times(piece.name, piece.value))
        if isinstance(piece, Recomputed):
            return self._written(piece)
        if isinstance(piece, ViaStandardisation):  # scales differ along a row
            piece = piece.written()
        if isinstance(piece, ViaReparametrisation):
            return replace(piece, then=lambda value: self.times(piece.name, value))
        raise ClipError(f"{piece.name} has gradients of a kind that cannot be scaled ({type(piece).__name__})")

    def _written(self, piece: Recomputed) -> Recomputed:
        """Its terms are known only before scaling, so each counts as if it had the largest scale."""
        write, total, terms, name = piece.write, piece.total, piece.terms, piece.name
        largest = math.ldexp(1.0, 2 * sum(max(each) for each in self._table.weights[name]))
        return replace(
            piece,
            write=lambda inputs, upstream: self.times(name, write(inputs, upstream)),
            total=lambda inputs, upstream: self.times(name, total(inputs, upstream)),
            terms=None if terms is None else lambda inputs, upstream: terms(inputs, upstream) * largest,
        )

    def _on(self, name: str, device: torch.device) -> Factors:
        """Kept: a recorded micro-batch reads them where they lay."""
        if (name, device) not in self._factors:
            # Not by exp2, whose vectorised forms need not be exact.
            rows, columns = (
                torch.tensor([math.ldexp(1.0, e) for e in each], dtype=torch.float32, device=device)
                for each in self._table.weights[name]
            )
            self._factors[name, device] = rows, columns
        return self._factors[name, device]


def as_matrix(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns by which a weight is scaled: its first dimension, and all others."""
    rows = shape[0] if shape else 1
    return rows, shape.numel() // rows


def _by_operands(piece: OuterProduct, rows: Tensor, columns: Tensor) -> OuterProduct:
    right = _in_range(piece.right)
    scaled = right * columns.to(right.dtype)
    if piece.sparse:  # one-hot rows: each carries the scale of its row
        return replace(piece, right=scaled * rows.to(right.dtype)[piece.left].unsqueeze(-1))
    left = _in_range(piece.left)
    return replace(piece, left=left * rows.to(left.dtype), right=scaled)


def _recomputed(piece: OuterProduct) -> Recomputed:
    """The same gradients, written out."""

    def again(inputs: tuple[Tensor, ...], upstream: Tensor) -> OuterProduct:
        return replace(piece, left=inputs[0], right=upstream)

    def write(inputs: tuple[Tensor, ...], upstream: Tensor) -> Tensor:
        return again(inputs, upstream).instances(slice(None), upstream.dtype)

    def total(inputs: tuple[Tensor, ...], upstream: Tensor) -> Tensor:
        if piece.sparse:
            return write(inputs, upstream).sum(0)
        return product(inputs[0].flatten(0, 1), upstream.flatten(0, 1)).view(piece.shape)

    def terms(inputs: tuple[Tensor, ...], upstream: Tensor) -> Tensor:
        return again(inputs, upstream).spread()

    return Recomputed(piece.name, (piece.left,), piece.right, piece.shape, write, total, terms)


def _in_range(value: Tensor) -> Tensor:
    """fp16 has too few exponents for scales; every other type has at least those of fp32."""
    return value.float() if value.dtype == torch.float16 else value
