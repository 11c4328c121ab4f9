"""The totals to which a clip engine adds: one running total per trainable parameter, by name.

The clip engine does not know how totals are stored or how they reach the sharded engine; the totals never see a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from murmuration.train.distributed.memory import keep_from_swap
from murmuration.train.distributed.ranks import Ranks


class GradientSums(Protocol):
    """Totals of clipped gradients over the micro-batches of one logical step."""

    def add(self, name: str, value: Tensor) -> None:
        """`value` has the shape of the parameter and fp32 or better precision."""
        ...

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Adds leftᵀ @ right, computed with fp32 accumulation, to the parameter seen as [rows, columns].

        `left` is [k, rows], `right` is [k, columns]; operands may be bf16, the product is in fp32.
        """
        ...


class ExactSums:
    """fp64 on each rank and across the ranks: one flat buffer, viewed as one total per parameter.

    Neighbouring data sets differ in one record, hence in one stretch of a micro-batch on one rank. All other products
    are the same numbers for both. Each of N additions in fp64 errs by at most 2⁻⁵³ of a total whose norm is at most
    B·C: for a million records, 128 at a time, 2e-6·C at worst for both together. Beyond that, rounding can move only
    the product of that one stretch, and its bound (in `rule.py`) does not grow with the logical batch.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        sizes = [shape.numel() for shape in shapes.values()]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        pieces = self._flat.split(sizes)
        self.totals = {name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}

    @torch.no_grad()
    def add(self, name: str, value: Tensor) -> None:
        if value.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name}: sums take fp32 or fp64, not {value.dtype}, which would round records away")
        self.totals[name].add_(value)

    @torch.no_grad()
    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        self.add(name, product(left, right).view_as(self.totals[name]))

    def reduce(self, ranks: Ranks) -> None:
        """Sums over all ranks, in one collective."""
        ranks.add(self._flat)

    def clear(self) -> None:
        self._flat.zero_()

    def keep_from_swap(self) -> bool:
        """Locks the totals in memory if the system allows it; returns whether it does."""
        return keep_from_swap(self._flat)


class Float32Sums:
    """Plain fp32 totals, created at the first use of each name: for probes and measurements."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes
        self.totals: dict[str, Tensor] = {}

    def _total(self, name: str, device: torch.device) -> Tensor:
        if name not in self.totals:
            self.totals[name] = torch.zeros(self._shapes[name], dtype=torch.float32, device=device)
        return self.totals[name]

    @torch.no_grad()
    def add(self, name: str, value: Tensor) -> None:
        self._total(name, value.device).add_(value)

    @torch.no_grad()
    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        total = self._total(name, left.device).view(left.shape[-1], right.shape[-1])
        if left.dtype == right.dtype == torch.float32:
            total.addmm_(left.t(), right)
        else:
            total.add_(product(left, right))


def trainable_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Call this before an engine shards the parameters: afterwards they may have lost their shapes."""
    return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}


def product(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ @ right, accumulated and returned in fp32 (fp64 stays fp64), whatever the operands' types."""
    if left.dtype == right.dtype and left.dtype in (torch.float32, torch.float64):
        return left.t() @ right
    if left.is_cuda and left.dtype == right.dtype:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    return left.float().t() @ right.float()
