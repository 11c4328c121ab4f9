"""Per-record gradients of one parameter, in the form in which the backward pass produces them.

A piece represents the gradient of every record of the micro-batch, without writing it out where possible: a product of
two matrices, a convolution, a plain tensor. It can write out the gradients of chosen records, and add the weighted sum
of all of them to the totals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from murmuration.train.clip import kernels
from murmuration.train.clip.sums import GradientSums, product, products


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums are taken: never below fp32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def over_tokens(x: Tensor) -> Tensor:
    """[B, T, …] -> [B, …], added up in fp32 or better; one token is its own sum."""
    return x.squeeze(1) if x.shape[1] == 1 else x.sum(1, dtype=wide(x.dtype))


def flat(x: Tensor) -> Tensor:
    """[B, …] -> [B, elements]; a scalar has one element."""
    return x.reshape(len(x), -1)


# Elements of per-record gradients that are written out at a time, where they are not kept.
CHUNK = 1 << 23
# Squares are added one after the other in fp32 only along stretches of this length: over millions, errors would grow.
STRETCH = 1 << 11


def squared_length(x: Tensor) -> Tensor:
    """Squared length along the last dimension, in fp64."""
    whole, rest = _stretches(x)
    total = rest.double().square()
    return total if whole is None else whole.double().square().sum(-1) + total


def lengths_of_stretches(x: Tensor) -> list[Tensor]:
    """[B, elements] -> lengths [B], whose squares add up to that of the whole."""
    whole, rest = _stretches(x)
    return [rest] if whole is None else [*whole.unbind(-1), rest]


def _stretches(x: Tensor) -> tuple[Tensor | None, Tensor]:
    """[…, stretches] and […]: lengths of the whole stretches, if there are any, and of the remainder."""
    whole = x.shape[-1] // STRETCH * STRETCH
    if not whole:
        return None, torch.linalg.vector_norm(x, dim=-1, dtype=wide(x.dtype))
    rest = torch.linalg.vector_norm(x[..., whole:], dim=-1, dtype=wide(x.dtype))
    return torch.linalg.vector_norm(x[..., :whole].unflatten(-1, (-1, STRETCH)), dim=-1, dtype=wide(x.dtype)), rest


@dataclass(frozen=True)
class ClipWeights:
    """A factor for each record, and which records may be used at all (None: all).

    A factor of 0 does not remove a record that is not finite, since 0·inf is NaN; such records are replaced by zeros,
    in both operands of a product.
    """

    factors: Tensor
    keep: Tensor | None
    rounded: bool = False
    """Whether a bf16 operand that carries the factor is rounded back to bf16, for fast products on GPUs."""

    def apply(self, value: Tensor) -> Tensor:
        """Scales every record of `value` [B, …] by its factor, in fp32 or better."""
        return self.mask(value) * self._over(value)

    def operand(self, value: Tensor) -> Tensor:
        """Like `apply`, for a matrix product. Never in fp16, in which small numbers would vanish."""
        if not (self.rounded and value.dtype == torch.bfloat16):
            return self.apply(value)
        # In one pass: multiplied in fp32, written in bf16.
        kernel = kernels.scale(value.device)
        if kernel is not None:
            return kernel(value, self.factors, self.keep)
        kept = self.mask(value)
        return torch.mul(kept, self._over(value), out=torch.empty_like(kept))

    def _over(self, value: Tensor) -> Tensor:
        return self.factors.view(len(value), *[1] * (value.dim() - 1))

    def part(self, rows: slice) -> ClipWeights:
        return ClipWeights(self.factors[rows], None if self.keep is None else self.keep[rows], self.rounded)

    def mask(self, value: Tensor) -> Tensor:
        if self.keep is None:
            return value
        return torch.where(self.keep.view(len(value), *[1] * (value.dim() - 1)), value, torch.zeros_like(value))


class PerRecordGradient(Protocol):
    """One use of a parameter."""

    @property
    def name(self) -> str:
        """The name of the parameter."""
        ...

    @property
    def records(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the backward pass produced it."""
        ...

    @property
    def elements(self) -> int:
        """Number of elements of one record's gradient."""
        ...

    def instances(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """[chosen records, *shape of the parameter]"""
        ...

    def part(self, rows: slice) -> Self:
        """The piece of only these records."""
        ...

    def spread(self) -> Tensor:
        """[B], fp64: the sum of the squared terms of a record's gradient. Where terms cancel, the gradient is much
        smaller than their rounding error."""
        ...

    def add_weighted(self, weights: ClipWeights, sums: GradientSums) -> None: ...


@dataclass(frozen=True)
class Dense:
    """Written out: [B, *shape of the parameter]. For parameters that are small next to their layer's activations."""

    name: str
    value: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def records(self) -> int:
        return len(self.value)

    @property
    def elements(self) -> int:
        return self.value[0].numel()

    def instances(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        return self.value[rows].to(dtype)

    @property
    def tokens(self) -> int:
        """Rows of the operands for each record."""
        return 1

    @property
    def width(self) -> int:
        """Columns of both operands."""
        return 1 + self.elements

    def part(self, rows: slice) -> Dense:
        return Dense(self.name, self.value[rows])

    def spread(self) -> Tensor:
        return squared_length(flat(self.value))

    def operands(self, weights: ClipWeights) -> tuple[Tensor, Tensor]:
        """[B, 1] and [B, elements], whose product is the weighted sum. Contiguous whether masked or not: a library that
        chose its kernel by strides would sum the other records otherwise if one of them is not finite."""
        kept = weights.mask(self.value)
        kept = kept.to(wide(kept.dtype))
        return weights.factors.to(kept.dtype).unsqueeze(1), flat(kept).contiguous()

    def add_weighted(self, weights: ClipWeights, sums: GradientSums) -> None:
        sums.add_product(self.name, *self.operands(weights))


@dataclass(frozen=True)
class TokenSum:
    """A bias: each record's gradient is the sum over its tokens of `over` [B, T, …], which is not taken yet.

    A kernel that reads `over` for the norm of the weight may take the sum on the way (`norms.measure`). In whichever
    order T numbers are added in fp32, there are T - 1 additions, each of which errs by at most u of a sum that is no
    larger than Σ|g|: both ways, an element is right to within (T - 1)·u/(1 - (T - 1)·u) of its Σ|g|. The norm is that
    of the very numbers that are then added with the clip factor, so a record's share is as large as was measured,
    whatever their rounding, and there is nothing to doubt.
    """

    name: str
    over: Tensor
    shape: torch.Size

    def taken(self, sums: Tensor | None = None) -> Dense:
        """Written out; `sums` [B, elements] are those of a kernel, if one has taken them."""
        value = over_tokens(self.over) if sums is None else sums
        return Dense(self.name, value.reshape(len(self.over), *self.shape))


@dataclass(frozen=True)
class OuterProduct:
    """leftᵀ·right for each record: [B, T, rows]ᵀ [B, T, columns], the parameter seen as [rows, columns].

    Where `left` is a table of row numbers ([B, T], integers), it represents their one-hot rows: an embedding.
    """

    name: str
    left: Tensor
    right: Tensor
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        return self.right.dtype

    @property
    def sparse(self) -> bool:
        return not self.left.is_floating_point()

    @property
    def records(self) -> int:
        return len(self.right)

    @property
    def tokens(self) -> int:
        return self.right.shape[1]

    @property
    def columns(self) -> int:
        return self.right.shape[2]

    @property
    def rows(self) -> int:
        return self.elements // self.columns

    @property
    def elements(self) -> int:
        return self.shape.numel()

    def instances(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        if self.sparse:
            right = self.right[rows].to(dtype)
            written = right.new_zeros(len(right), self.rows, self.columns)
            written.scatter_add_(1, self.left[rows].unsqueeze(-1).expand_as(right), right)
        elif dtype == torch.float32:
            written = products(self.left[rows], self.right[rows])
        else:
            written = self.left[rows].to(dtype).transpose(1, 2) @ self.right[rows].to(dtype)
        return written.view(-1, *self.shape)

    @property
    def width(self) -> int:
        """Columns of both operands."""
        return self.rows + self.columns

    def part(self, rows: slice) -> Self:
        return replace(self, left=self.left[rows], right=self.right[rows])

    def spread(self) -> Tensor:
        lengths = squared_length(self.right)
        return (lengths if self.sparse else lengths * squared_length(self.left)).sum(1)

    def add_weighted(self, weights: ClipWeights, sums: GradientSums) -> None:
        if self.sparse:
            sums.add(self.name, self._over_rows(weights.apply(self.right).flatten(0, 1)).view(self.shape))
            return
        sums.add_product(self.name, *self.operands(weights))

    def _over_rows(self, scaled: Tensor) -> Tensor:
        """[tokens, columns] -> [rows, columns], for a table of row numbers."""
        kernel = kernels.row_sums(scaled.device) if scaled.dtype == torch.float32 else None
        if kernel is not None:
            return kernel(self.left.flatten(), scaled, self.rows)
        total = torch.zeros(self.rows, self.columns, dtype=wide(scaled.dtype), device=scaled.device)
        return total.index_add_(0, self.left.flatten(), scaled.to(total.dtype))

    def weighted(self, weights: ClipWeights) -> Tensor:
        """The weighted sum itself, in fp32 or better. Not for tables of row numbers."""
        return product(*self.operands(weights)).view(self.shape)

    def operands(self, weights: ClipWeights) -> tuple[Tensor, Tensor]:
        """[B·T, rows] and [B·T, columns], whose product is the weighted sum; contiguous, as above. Not for tables of
        row numbers."""
        left, right = self.left, self.right
        if self.rows <= self.columns:
            left, right = weights.operand(left), weights.mask(right)
        else:
            left, right = weights.mask(left), weights.operand(right)
        return left.flatten(0, 1).contiguous(), right.flatten(0, 1).contiguous()


@dataclass(frozen=True)
class ChannelsLast(OuterProduct):
    """Of a convolution [rows, channels, *kernel], whose patches have their columns in the order [*kernel, channels]. A
    norm does not depend on the order; what is added up or written out has the parameter's."""

    def instances(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        return self._in_order(super().instances(rows, dtype))

    def add_weighted(self, weights: ClipWeights, sums: GradientSums) -> None:
        sums.add(self.name, self.weighted(weights))

    def weighted(self, weights: ClipWeights) -> Tensor:
        return self._in_order(super().weighted(weights).unsqueeze(0)).squeeze(0)

    def _in_order(self, found: Tensor) -> Tensor:
        channels, *kernel = self.shape[1:]
        return found.view(len(found), self.rows, *kernel, channels).movedim(-1, 2)


@dataclass(frozen=True)
class Recomputed:
    """Computed by one function that writes out the gradients of chosen records and another that adds up weighted output
    gradients: for convolutions, and everything that has no rule of its own.

    Both take `inputs` [B, …] and the output gradients `upstream` [B, …]. `terms` gives the sum of the squared terms of
    a record's gradient, if known; `row_dimension`, which dimension of `upstream` has one place for each row of the
    parameter.
    """

    name: str
    inputs: tuple[Tensor, ...]
    upstream: Tensor
    shape: torch.Size
    write: Callable[[tuple[Tensor, ...], Tensor], Tensor]
    total: Callable[[tuple[Tensor, ...], Tensor], Tensor]
    terms: Callable[[tuple[Tensor, ...], Tensor], Tensor] | None = None
    row_dimension: int | None = None
    write_halves: Callable[[Tensor, Tensor], Tensor] | None = None
    """`write` for a single input in half precision, as its output gradients are: a product that adds up in fp32."""

    @property
    def dtype(self) -> torch.dtype:
        return self.upstream.dtype

    @property
    def records(self) -> int:
        return len(self.upstream)

    @property
    def elements(self) -> int:
        return self.shape.numel()

    def instances(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        if self.write_halves is not None and dtype == torch.float32:
            return self.write_halves(self.inputs[0][rows], self.upstream[rows])
        inputs = tuple(x[rows].to(dtype) if x.is_floating_point() else x[rows] for x in self.inputs)
        return self.write(inputs, self.upstream[rows].to(dtype))

    def part(self, rows: slice) -> Recomputed:
        return replace(self, inputs=tuple(x[rows] for x in self.inputs), upstream=self.upstream[rows])

    def spread(self) -> Tensor:
        assert self.terms is not None, "without knowledge of its terms, a gradient is written out and kept"
        return self.terms(self.inputs, self.upstream)

    def add_weighted(self, weights: ClipWeights, sums: GradientSums) -> None:
        sums.add(self.name, self.weighted(weights))

    def weighted(self, weights: ClipWeights) -> Tensor:
        inputs = tuple(_widened(weights.mask(x)) for x in self.inputs)
        return self.total(inputs, _widened(weights.apply(self.upstream)))


@dataclass(frozen=True)
class Through:
    """A piece of a tensor that was computed from a parameter: the chain rule leads on from `inner`."""

    name: str
    inner: PerRecordGradient

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def records(self) -> int:
        return self.inner.records


@dataclass(frozen=True)
class ViaReparametrisation(Through):
    """A piece of a tensor that was computed from the parameter alone, in any way: a sliced or normalised weight.

    Gradients are written out: the chain rule may shorten them (standardising takes parts away), and rounding before it
    would outgrow what is left.
    """

    made: Tensor
    leaf: Tensor

    @property
    def elements(self) -> int:
        return self.leaf.numel() + self.inner.elements

    def instances(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        inner = self.inner.instances(rows, dtype)
        # The chain rule runs in the precision of the weights; scaled to 1 it can neither vanish nor overflow there.
        size = flat(inner).abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
        size = size.view(-1, *[1] * (inner.dim() - 1))
        found = self._back((inner / size).to(self.made.dtype))
        return found.to(dtype) * size.view(-1, *[1] * (found.dim() - 1))

    def part(self, rows: slice) -> ViaReparametrisation:
        return replace(self, inner=self.inner.part(rows))

    def add_weighted(self, weights: ClipWeights, sums: GradientSums) -> None:
        """Writes the gradients out once more, by the same steps as for the norm."""
        for rows in self.stretches():
            written = self.instances(rows, wide(self.dtype))
            keep = None if weights.keep is None else weights.keep[rows]
            Dense(self.name, written).add_weighted(ClipWeights(weights.factors[rows], keep), sums)

    def stretches(self) -> list[slice]:
        at_once = max(1, CHUNK // self.elements)
        return [slice(start, start + at_once) for start in range(0, self.records, at_once)]

    def spread(self) -> Tensor:
        return torch.cat([squared_length(flat(self.instances(rows, wide(self.dtype)))) for rows in self.stretches()])

    def _back(self, gradient: Tensor) -> Tensor:
        return torch.autograd.grad(self.made, self.leaf, gradient, retain_graph=True, is_grads_batched=True)[0]


def _widened(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype)) if x.is_floating_point() else x


def operands_of(piece: PerRecordGradient) -> Iterator[Tensor]:
    """The tensors of a piece that the backward pass made, or that autograd had saved."""
    while isinstance(piece, Through):
        piece = piece.inner
    for value in vars(piece).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from (x for x in value if isinstance(x, Tensor))


# What a layer reports of one of its parameters.
Reported = PerRecordGradient | TokenSum
