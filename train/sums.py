"""Where a clip engine adds what it computed: one running total per trainable parameter, by name.

The clip engine never sees how totals are kept or how they reach the sharded engine; the totals never see a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn


class GradientSums(Protocol):
    """Totals of clipped gradients over the micro-batches of one logical step."""

    def add(self, name: str, value: Tensor) -> None:
        """`value` has the shape of the parameter and fp32 or better precision."""
        ...

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """leftᵀ @ right, computed with fp32 accumulation, is added to the parameter seen as [rows, columns].

        `left` is [k, rows], `right` is [k, columns]; operands may be bf16, the product leaves in fp32.
        """
        ...


class Float32Sums:
    """Plain fp32 totals, made at the first use of each name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.totals: dict[str, Tensor] = {}

    def _total(self, name: str) -> Tensor:
        if name not in self.totals:
            self.totals[name] = torch.zeros_like(self._parameters[name], dtype=torch.float32)
        return self.totals[name]

    @torch.no_grad()
    def add(self, name: str, value: Tensor) -> None:
        self._total(name).add_(value)

    @torch.no_grad()
    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        total = self._total(name).view(left.shape[-1], right.shape[-1])
        total.addmm_(left.float().t(), right.float())
