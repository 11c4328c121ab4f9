"""The totals to which a clip engine adds: one running total per trainable parameter, by name.

The clip engine does not know how totals are stored or how they reach the sharded engine; the totals never see a record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from murmuration.train.distributed.process import keep_from_swap
from murmuration.train.distributed.ranks import Ranks

# Devices on which sums are added by a kernel.
KERNEL_DEVICES = ("cuda",)
# Elements that are added to the totals at once, over all parts: those of neighbouring parameters, or of a single one. A
# parameter with more is added part by part, in memory for one.
SPAN, WIDEST_SPAN = 1 << 25, 1 << 28
# Parameters with at most this many elements are neighbours in the totals: one product and one addition serve them all.
SMALL = 1 << 14
# Fewer columns than these make a product slow in oneDNN and MKL, unless they stand first.
NARROW = 16
# The longest sum of products of halves that is left to tensor cores.
AT_ONCE = 1 << 10


class GradientSums(Protocol):
    """Totals of clipped gradients over the micro-batches of one logical step."""

    def add(self, name: str, value: Tensor) -> None:
        """`value` has the shape of the parameter and fp32 or better precision."""
        ...

    def add_product(self, name: str, left: Tensor, right: Tensor, at_once: int | None = None) -> None:
        """Adds leftᵀ @ right, computed with fp32 accumulation, to the parameter seen as [rows, columns].

        `left` is [k, rows], `right` is [k, columns]; operands may be bf16, the product is in fp32. With `at_once`, each
        product is over so many of the k at most, and what they give is added one after the other.
        """
        ...


@runtime_checkable
class SpanSums(GradientSums, Protocol):
    """Totals to which the products of many parameters can be added at once: on a GPU, launching a kernel for every
    layer takes longer than the additions."""

    def spans(self, names: Collection[str], parts: int) -> list[list[str]]:
        """Cuts the names into runs of neighbours."""
        ...

    def add_span(self, names: list[str], found: Tensor, only_if: Tensor | None = None) -> None:
        """`found` is [parts, elements of all these parameters]; parts are added separately. With `only_if`, a scalar
        on the device, nothing is added where it is false, even if what was found is not finite."""
        ...


class FlatSums:
    """One flat buffer, viewed as one total per parameter; small parameters are neighbours. Whatever is added is rounded
    once for each element: several parts are added up in fp64 first."""

    def __init__(self, shapes: Mapping[str, torch.Size], device: torch.device, dtype: torch.dtype) -> None:
        sizes = {name: shapes[name].numel() for name in sorted(shapes, key=lambda name: shapes[name].numel() > SMALL)}
        self._flat = torch.zeros(sum(sizes.values()), dtype=dtype, device=device)
        ends = accumulate(sizes.values())
        self._places = {name: slice(end - sizes[name], end) for name, end in zip(sizes, ends, strict=True)}
        self.totals = {name: self._flat[self._places[name]].view(shape) for name, shape in shapes.items()}

    @torch.no_grad()
    def add(self, name: str, value: Tensor) -> None:
        require_wide(name, value)
        self.totals[name].add_(value)

    def spans(self, names: Collection[str], parts: int) -> list[list[str]]:
        found: list[list[str]] = []
        end = first = -1
        for name in (name for name in self._places if name in names):
            place = self._places[name]
            if place.start != end or (place.stop - first) * parts > SPAN:
                found.append([])
                first = place.start
            found[-1].append(name)
            end = place.stop
        return found

    @torch.no_grad()
    def add_span(self, names: list[str], found: Tensor, only_if: Tensor | None = None) -> None:
        total = self._flat[self._places[names[0]].start : self._places[names[-1]].stop]
        kernel = _add_parts() if total.device.type in KERNEL_DEVICES else None
        if kernel is not None:
            kernel(total, found, only_if)
            return
        parts = _or_nothing(found, only_if)
        if total.dtype == torch.float64:
            for part in parts:
                total.add_(part)
        else:
            total.add_(parts.sum(0, dtype=torch.float64))

    @property
    def flat(self) -> Tensor:
        return self._flat

    @property
    def places(self) -> Mapping[str, slice]:
        """Where each parameter's total lies in `flat`."""
        return self._places

    def clear(self) -> None:
        self._flat.zero_()

    def keep_from_swap(self) -> bool:
        """Locks the totals in memory if the system allows it; returns whether it does."""
        return keep_from_swap(self._flat)


class ExactSums(FlatSums):
    """fp64 on each rank and across the ranks.

    Neighbouring data sets differ in one record, hence in one stretch of a micro-batch on one rank. All other products
    are the same numbers for both. Each of N additions in fp64 errs by at most 2⁻⁵³ of a total whose norm is at most
    B·C: for a million records, 128 at a time, 2e-6·C at worst for both together. Beyond that, rounding can move only
    the product of that one stretch, and its bound (in `rule.py`) does not grow with the logical batch.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        super().__init__(shapes, device, torch.float64)

    @torch.no_grad()
    def add_product(self, name: str, left: Tensor, right: Tensor, at_once: int | None = None) -> None:
        total = self.totals[name].view(left.shape[1], right.shape[1])
        own: Tensor | None = None
        for part in cut(left, right, at_once):
            # In the memory of the one before, which is still in the caches.
            own = product(*part, own)
            total.add_(own)

    def reduce(self, ranks: Ranks) -> None:
        """Sums over all ranks, in one collective."""
        ranks.add(self._flat)


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

    def spans(self, names: Collection[str], parts: int) -> list[list[str]]:
        del parts
        return [[name] for name in names]

    @torch.no_grad()
    def add_span(self, names: list[str], found: Tensor, only_if: Tensor | None = None) -> None:
        sizes = [self._shapes[name].numel() for name in names]
        for name, parts in zip(names, _or_nothing(found, only_if).split(sizes, 1), strict=True):
            for part in parts:
                self.add(name, part.view(self._shapes[name]))

    @torch.no_grad()
    def add_product(self, name: str, left: Tensor, right: Tensor, at_once: int | None = None) -> None:
        total = self._total(name, left.device).view(left.shape[1], right.shape[1])
        in_place = left.dtype == right.dtype == torch.float32
        for part in cut(left, right, at_once):
            if in_place:
                total.addmm_(part[0].t(), part[1])
            else:
                total.add_(product(*part))


class OnlyIf:
    """Adds to other totals where a scalar on the device is true, and nothing where it is false."""

    def __init__(self, sums: GradientSums, ordinary: Tensor) -> None:
        self._sums, self._ordinary = sums, ordinary

    def add(self, name: str, value: Tensor) -> None:
        self._sums.add(name, _or_nothing(value, self._ordinary))

    def add_product(self, name: str, left: Tensor, right: Tensor, at_once: int | None = None) -> None:
        self._sums.add_product(name, _or_nothing(left, self._ordinary), _or_nothing(right, self._ordinary), at_once)


def _or_nothing(value: Tensor, only_if: Tensor | None) -> Tensor:
    """A product with 0 would not do: 0·inf is NaN."""
    return value if only_if is None else torch.where(only_if, value, 0.0)


@cache
def _add_parts() -> Callable[[Tensor, Tensor, Tensor | None], None] | None:
    """Some builds of PyTorch come without Triton."""
    if find_spec("triton") is None:
        return None
    from murmuration.train.clip.add_parts_triton import add_parts

    return add_parts


def require_wide(name: str, value: Tensor) -> None:
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name}: sums take fp32 or fp64, not {value.dtype}, which would round records away")


def trainable_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Call this before an engine shards the parameters: afterwards they may have lost their shapes."""
    return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}


def cut(left: Tensor, right: Tensor, at_once: int | None) -> Iterable[tuple[Tensor, Tensor]]:
    """The operands of products over at most so many of the rows."""
    if at_once is None or len(left) <= at_once:
        return ((left, right),)
    return zip(left.split(at_once), right.split(at_once), strict=True)


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """leftᵀ @ right, accumulated and returned in fp32 (fp64 stays fp64), whatever the operands' types; in the memory of
    `out`, if that is given, which an earlier product of these sizes returned."""
    if left.is_cuda and left.dtype == right.dtype and left.dtype.itemsize == 2:
        return torch.mm(left.t(), right, out_dtype=torch.float32, out=out)
    if left.dtype != right.dtype or left.dtype.itemsize == 2:
        left, right = left.float(), right.float()
    if _narrow(left, right):
        return torch.mm(right.t(), left, out=None if out is None else out.t()).t()
    return torch.mm(left.t(), right, out=out)


def _narrow(left: Tensor, right: Tensor) -> bool:
    """Whether rightᵀ @ left is several times as fast on a processor, as with adapters of rank 8."""
    return right.shape[-1] < NARROW <= left.shape[-1] and not left.is_cuda


def products(left: Tensor, right: Tensor) -> Tensor:
    """`product` for each of several parts: left [parts, k, rows] and right [parts, k, columns], in fp32.

    Tensor cores truncate, always towards zero, so that their errors do not even out over a long sum. Halves are added
    up there over at most AT_ONCE of k, and these sums by ordinary additions.
    """
    out = torch.empty(len(left), left.shape[2], right.shape[2], device=left.device)
    at_once = AT_ONCE if left.dtype.itemsize == right.dtype.itemsize == 2 else left.shape[1]
    products_into(out, left[:, :at_once], right[:, :at_once])
    for start in range(at_once, left.shape[1], at_once):
        along, more = slice(start, start + at_once), torch.empty_like(out)
        products_into(more, left[:, along], right[:, along])
        out += more
    return out


def products_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """The same into `out`."""
    if left.is_cuda and left.dtype == right.dtype and left.dtype.itemsize == 2:
        torch.bmm(left.transpose(1, 2), right, out_dtype=torch.float32, out=out)
        return
    left, right = left.float(), right.float()
    if _narrow(left, right):
        out.copy_(torch.bmm(right.transpose(1, 2), left).transpose(1, 2))
    else:
        torch.bmm(left.transpose(1, 2), right, out=out)
