"""How sums that each rank has of the whole model reach the shards in which they lie, and the proof that they did.

The proof. Before anything is sent, each rank adds up its elements, weighted by their positions, parameter by parameter.
Afterwards the numbers of all ranks must be those of all shards' totals; so a rank that was left out, a part that was
lost or added twice, a scale, a shift, or sums that were rounded on their way are errors, not a wrong gradient. Weights
differ widely between neighbours: 1 and the fraction of a position's multiple of the golden ratio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from murmuration.train.clip.sums import ExactSums
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.shard_map import ShardMapError
from murmuration.train.noise.update import UpdateError

# Sums are sent in so many runs of elements, or fewer where they would be shorter than this. While one is under way, the
# one before it is added: beside the sums there are three runs in memory, one of them as it is sent.
RUNS, SHORTEST_RUN = 64, 1 << 20
# Tolerance of fp64 sums over all elements of a parameter, relative to the sum of their absolute values: of totals that
# were added up over a thousand ranks. fp32 on the wire would be off by more.
AGREEMENT = 1e-12
GOLDEN = (5**0.5 - 1) / 2
# Elements weighted at a time.
WEIGHED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class _Parcel:
    """What is sent at once: stretches of the sums in the order of the ranks that receive them."""

    stretches: list[slice] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Elements for each rank."""
    own: list[slice] = field(default_factory=list)
    """The stretches that this rank receives."""


@dataclass(frozen=True)
class Arrived:
    """A stretch of this rank's shard, as each rank has it."""

    parts: Tensor
    """[ranks, elements]"""
    stretches: list[slice]
    """Where these elements lie in the sums."""


class Exchange:
    """`fragments` are the pieces of parameters that this rank's optimizer holds, `places` says where parameters lie in
    the sums. Collective."""

    def __init__(
        self, shapes: Mapping[str, torch.Size], places: Mapping[str, slice], fragments: Sequence[Fragment], ranks: Ranks
    ) -> None:  # fmt: skip
        self._ranks = ranks
        self._parcels = _parcels(_held_by_all(shapes, fragments, ranks), places, ranks.rank)

    def run(self, flat: Tensor, take: Callable[[Arrived], None]) -> None:
        """Sends every rank its part of these sums, and has taken what arrives for this one, in the order of its pieces.
        Its own stretches of `flat` may be changed as soon as they have arrived. Collective."""
        before: Arrived | None = None
        for parcel in self._parcels:
            own = parcel.sizes[self._ranks.rank]
            parts = torch.empty(self._ranks.world, own, dtype=flat.dtype, device=flat.device)
            parcelled = torch.cat([flat[stretch] for stretch in parcel.stretches])
            arrive = self._ranks.swap(parts.view(-1), parcelled, parcel.sizes)
            if before is not None:
                take(before)
            arrive()
            del parcelled, arrive  # both hold what was sent
            before = Arrived(parts, parcel.own)
        if before is not None:
            take(before)


def _held_by_all(
    shapes: Mapping[str, torch.Size], fragments: Sequence[Fragment], ranks: Ranks
) -> list[list[tuple[str, int, int]]]:  # fmt: skip
    """Every rank's pieces as (name, start, length), after proving that each element is in exactly one of them."""
    every = ranks.gather([(f.name, f.start, f.length) for f in fragments])
    if any(number > 1 for held in every for number in Counter(name for name, _, _ in held).values()):
        raise ShardMapError("a rank holds two pieces of one parameter, which is not a known layout")
    for name, shape in shapes.items():
        end = 0
        for start, length in sorted((s, n) for held in every for other, s, n in held if other == name and n):
            if start != end:
                raise ShardMapError(f"{name}: its elements up to {max(start, end)} are in two shards, or in none")
            end = start + length
        if end != shape.numel():
            raise ShardMapError(f"{name}: the shards hold {end} of {shape.numel()} elements")
    return every


def _parcels(every: list[list[tuple[str, int, int]]], places: Mapping[str, slice], rank: int) -> list[_Parcel]:
    """Cuts every rank's shard, in the order of its pieces, into equally many runs."""
    whole = sum(length for held in every for _, _, length in held)
    at_once = max(1, max(SHORTEST_RUN, whole // RUNS) // len(every))
    longest = max(sum(length for _, _, length in held) for held in every)
    parcels = [_Parcel() for _ in range(0, longest, at_once)]
    for number_of_rank, held in enumerate(every):
        sizes, at = [0] * len(parcels), 0
        for name, start, length in held:
            first, end = places[name].start + start, places[name].start + start + length
            while first < end:
                number, filled = divmod(at, at_once)
                taken = min(end - first, at_once - filled)
                parcels[number].stretches.append(slice(first, first + taken))
                if number_of_rank == rank:
                    parcels[number].own.append(slice(first, first + taken))
                sizes[number] += taken
                first, at = first + taken, at + taken
        for parcel, size in zip(parcels, sizes, strict=True):
            parcel.sizes.append(size)
    return parcels


def weigh(totals: Mapping[str, Tensor]) -> Tensor:
    """[2, parameters]: each parameter's sum and sum of absolute values, with weights from 1 to 2 for its elements."""
    return torch.stack([weighed(total.view(-1), 0) for total in totals.values()], dim=1)


def weighed(piece: Tensor, first: int) -> Tensor:
    """[2], for a piece that begins at element `first` of a parameter."""
    found = torch.zeros(2, dtype=torch.float64, device=piece.device)
    for start in range(0, len(piece), WEIGHED_AT_ONCE):
        part = piece[start : start + WEIGHED_AT_ONCE]
        numbers = torch.arange(first + start, first + start + len(part), dtype=torch.float64, device=piece.device)
        weights = numbers.mul_(GOLDEN).frac_().add_(1.0)
        products = weights.mul_(part)
        found += torch.stack([products.sum(), products.abs_().sum()])
    return found


def require_sums(
    names: Sequence[str], expected: Tensor, size: Tensor, found: Tensor, agreement: float = AGREEMENT
) -> None:  # fmt: skip
    """For each parameter: the weighted sum of what all ranks had, that of absolute values, and that of all shards."""
    wrong = ~((found - expected).abs() <= agreement * size)
    if not bool(wrong.any()):
        return
    name = names[int(wrong.nonzero()[0])]
    if not bool(torch.isfinite(size).all()):
        raise UpdateError(
            f"the sum of clipped gradients of {name} is not finite; the clip engine let a bad record through"
        )
    raise UpdateError(
        f"what was reduced for {name} is not the sum over the ranks; collective operations are unreliable here"
    )


class WholeSums:
    """The totals of a logical step where each rank has the whole model (ZeRO-0 to 2), added up where they are needed.

    At ZeRO-1 and 2 a rank steps a shard of the optimizer's state, and needs the sum of that shard alone. So each total
    crosses the wire once, in fp64, to the rank that needs it: 8 bytes per weight, where an all-reduce moves 16. What
    arrives is added in the order of the ranks, in place, so that nothing is in memory twice but what is under way. At
    ZeRO-0 every rank needs the whole sum.

    `fragments` are the pieces of parameters that this rank's optimizer holds: all of each, or, if `sharded`, such that
    each element is in one rank's. Ranks make and reduce their sums together.
    """

    def __init__(
        self, sums: ExactSums, shapes: Mapping[str, torch.Size], fragments: Sequence[Fragment], ranks: Ranks,
        sharded: bool,
    ) -> None:  # fmt: skip
        self._sums, self._shapes, self._fragments, self._ranks = sums, shapes, fragments, ranks
        self._exchange = Exchange(shapes, sums.places, fragments, ranks) if sharded else None

    @torch.no_grad()
    def reduce(self) -> frozenset[str]:
        """Adds up over the ranks, and proves it. Afterwards only this rank's pieces hold sums. Returns the parameters
        of which any rank had more than zeros: the same on all. Collective."""
        sent = weigh(self._sums.totals)
        if self._exchange is None:
            self._sums.reduce(self._ranks)
        elif self._ranks.world > 1:
            self._exchange.run(self._sums.flat, self._take)
        copies = 1 if self._exchange is not None else self._ranks.world
        expected, size, found = self._ranks.add(torch.stack([*sent, self._weighed()]))
        require_sums(list(self._shapes), expected, size, found / copies)
        return frozenset(name for name, whole in zip(self._shapes, size.tolist(), strict=True) if whole > 0)

    def _take(self, arrived: Arrived) -> None:
        total = arrived.parts[0]
        for part in arrived.parts[1:]:
            total += part
        lengths = [stretch.stop - stretch.start for stretch in arrived.stretches]
        for stretch, values in zip(arrived.stretches, total.split(lengths), strict=True):
            self._sums.flat[stretch] = values

    def _weighed(self) -> Tensor:
        """[parameters]: of the pieces that this rank holds."""
        held = {fragment.name: fragment for fragment in self._fragments}
        none = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        return torch.stack([
            weighed(self.of(held[name]), held[name].start)[0] if name in held else none for name in self._shapes
        ])  # fmt: skip

    def of(self, fragment: Fragment) -> Tensor:
        """A piece that this rank holds, in fp64; after `reduce`, the sum over all ranks."""
        whole = self._sums.totals[fragment.name].view(-1)
        return whole[fragment.start : fragment.start + fragment.length]
