"""Weights that are standardised row by row before they are used, as in BiT's convolutions.

w' = γ·ŵ with ŵ = (w - mean)/√(var + ε). All records share the weight, and hence the Jacobian J of this map. For a row
of n elements

    Jᵀg = γ/√(var + ε) · (g' - mean(g'·ŵ)·ŵ) with g' = g - mean(g).

It scales a row, and takes away what lies along ones and then along ŵ. So the norm of a record's gradient with respect
to w follows from three sums over each row of its gradient with respect to the standardised weight
(`Standardisation.row_sums`). Since Jᵀ is linear, the clipped sum is Jᵀ of the clipped sum for that weight, which is one
product like that of any other layer.

Rounding. Let h be g with its rows scaled, |h| ≥ |Jᵀg| the size before anything is taken away, and κ = |h|/|Jᵀg|, both
over all parameters that are clipped together.

- The norm. |h|² and both parts that are subtracted are no larger than |h|² each. Each number is added up in fp32 over
  at most ALONG elements and beyond them in fp64, so it errs by ALONG·u of Σ|terms| at most, and the three together by
  at most 6·ALONG·u·|h|², whichever elements cancel: 1 for Σg², 2 for (Σg)²/n, and for the last part 2, or 2.6 where ŵ
  has a mean of its own. Jᵀ never lengthens the error of h itself.
- The sum. Records are added up in fp32 before Jᵀ, where each has a size of κ·C instead of C; what Jᵀ takes away of the
  sum leaves the rounding of that sum behind. A chain of b additions of terms of size S errs by b·u·b·S, and tokens that
  are added to what other records have summed to by √(b·T)·u·b·S (`rule.rounding_allowance`, which allows for b = 128
  and S = C). Weights that are standardised are added up over b = 128/FEWER records, and Jᵀ is applied in fp64. At
  FEWER = 4, neither exceeds what is allowed for as long as κ ≤ LARGEST = 8: 32²·8 < 128² and 32^1.5·8 = 128^1.5.

A record whose norm may be wrong, or of which more than that is taken away, is in doubt (`taken`): its gradient is
written out in fp64, Jᵀ and all, and what was measured is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from murmuration.train.clip import kernels
from murmuration.train.clip.per_record import (
    CHUNK,
    ClipWeights,
    OuterProduct,
    Recomputed,
    Through,
    wide,
)
from murmuration.train.clip.sums import GradientSums

# Elements of a row that are added up in fp32.
ALONG = 1 << 9
# Elements of per-record gradients that are written out at a time on a GPU, where fewer kernels count for more.
ON_GPU = 1 << 26
# How many times fewer records are added up in fp32 than for other weights, and how much longer they may be before
# parts are taken away.
FEWER, LARGEST = 4, 8.0


@dataclass(frozen=True)
class Standardisation:
    """The Jacobian. `direction` is ŵ, [rows, elements of one]; `scale` is γ/√(var + ε), [rows]."""

    direction: Tensor
    scale: Tensor

    @staticmethod
    def of(weight: Tensor, gain: Tensor | None, eps: float) -> Standardisation:
        """`weight` is [1, rows, elements of one], as `batch_norm` takes it."""
        direction, _, inverse = torch.native_batch_norm(weight, None, None, None, None, True, 0.0, eps)
        return Standardisation(direction[0], inverse if gain is None else inverse * gain)

    @property
    def shape(self) -> torch.Size:
        return self.direction.shape

    def back(self, gradient: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[B, …, elements of the weight, in order] -> Jᵀ of each, in `dtype` or else the same precision: [B, rows,
        elements of one]."""
        own, dtype = gradient.reshape(-1, *self.shape), dtype or gradient.dtype
        kernel = kernels.standardised(own.device)
        if kernel is not None:
            return kernel.back(own, self.direction, self.scale, dtype)
        own = own.to(dtype)
        direction = self.direction.to(own.dtype)
        found = own - own.mean(2, keepdim=True)
        along = (found * direction).mean(2, keepdim=True)
        return found.addcmul_(direction, along, value=-1).mul_(self.scale.to(own.dtype).unsqueeze(1))

    def row_sums(self, gradients: Tensor) -> Tensor:
        """[B, rows, elements of one], which may be changed -> Σg², Σg, and Σg·ŵ of each row, fp64 [3, B, rows]."""
        kernel = kernels.standardised(gradients.device) if gradients.dtype == torch.float32 else None
        if kernel is not None:
            return kernel.sums(gradients, self.direction)
        lengths = along(gradients, lambda x: torch.linalg.vector_norm(x, dim=-1)).double()
        ones = along(gradients, lambda x: x.sum(-1)).double()
        inner = along(gradients.mul_(self.direction), lambda x: x.sum(-1)).double()
        return torch.stack([lengths.square().sum(-1), ones.sum(-1), inner.sum(-1)])

    def squares(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """`row_sums` -> [B] in fp64: the squared lengths of Jᵀg, and of g with its rows scaled.

        With ŵ as it was rounded: where a row is nearly constant, its mean is not 0.
        """
        kernel, elements = kernels.standardised(sums.device), self.shape[1]
        level = self.direction.sum(1, dtype=torch.float64) / elements
        size = torch.linalg.vector_norm(self.direction, dim=1, dtype=torch.float64).square() / elements
        if kernel is not None:
            left, whole = kernel.squares(sums, self.scale, level, size, elements)
            return left, whole
        squares, ones, inner = sums
        inner, scale = inner - ones * level, self.scale.double().square()
        # A square below the smallest number of fp32 may have vanished, and its row's scale may lift it.
        whole = squares + torch.finfo(torch.float32).tiny * elements
        left = whole - (ones.square() + (2 - size) * inner.square()) / elements
        return (left * scale).sum(1), (whole * scale).sum(1)


@cache
def cut(elements: int) -> list[int]:
    """Lengths of at most ALONG; equal ones where the elements have such a divisor, else with a shorter one at the
    end."""
    equal = max(length for length in range(1, min(ALONG, elements) + 1) if elements % length == 0)
    return [equal] if equal >= min(64, elements) else [ALONG, elements % ALONG]


def along(values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """[…, elements] -> […, stretches], reduced over at most ALONG elements at a time."""
    length, *rest = cut(values.shape[-1])
    if not rest:
        return reduce(values.unflatten(-1, (-1, length)))
    whole = reduce(values[..., : -rest[0]].unflatten(-1, (-1, length)))
    return torch.cat([whole, reduce(values[..., -rest[0] :]).unsqueeze(-1)], -1)


@dataclass(frozen=True)
class ViaStandardisation(Through):
    """A piece of a weight that was standardised from the parameter `leaf`."""

    inner: OuterProduct | Recomputed
    leaf: Tensor
    by: Standardisation
    known: Tensor | None = None
    """`row_sums`, where they were needed for another parameter."""

    @property
    def elements(self) -> int:
        return self.inner.elements

    def instances(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        written = self.inner.instances(rows, dtype)
        return self.by.back(written).view(len(written), *self.leaf.shape)

    def part(self, rows: slice) -> ViaStandardisation:
        known = self.known if self.known is None else self.known[:, rows]
        return replace(self, inner=self.inner.part(rows), known=known)

    def scaled(self) -> OuterProduct | Recomputed:
        """The inner piece with its rows scaled: what parts are taken away from."""
        inner, scale = self.inner, self.by.scale
        if isinstance(inner, OuterProduct):
            return replace(inner, left=inner.left.to(wide(inner.left.dtype)) * scale)
        assert inner.row_dimension is not None, "such pieces have no scaled rows"
        places = [1] * inner.upstream.dim()
        places[inner.row_dimension] = -1
        return replace(inner, upstream=inner.upstream.to(wide(inner.dtype)) * scale.view(places))

    def spread(self) -> Tensor:
        return self.scaled().spread()

    def row_sums(self) -> Tensor:
        """`Standardisation.row_sums`. Writes the gradients out, some records at a time."""
        if self.known is not None:
            return self.known
        at_once = max(1, (ON_GPU if self.by.scale.is_cuda else CHUNK) // self.elements)
        found = [
            self.by.row_sums(self.inner.instances(rows, wide(self.dtype)).reshape(-1, *self.by.shape))
            for rows in (slice(start, start + at_once) for start in range(0, self.records, at_once))
        ]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def add_weighted(self, weights: ClipWeights, sums: GradientSums) -> None:
        total = self.inner.weighted(weights)
        sums.add(self.name, self.by.back(total, torch.float64).view(self.leaf.shape))


def taken(piece: ViaStandardisation, whole: Tensor, tolerance: float) -> Tensor:
    """[B]: what makes a record's norm doubtful where errors beyond `tolerance` of its square do: both the error of the
    square and, if sizes before anything is taken away exceed LARGEST times those after it, its rounding in the sum."""
    return max(6 * ALONG * torch.finfo(wide(piece.dtype)).eps / 2, tolerance / LARGEST**2) * whole
