"""The totals of a logical step where each rank has the whole model (ZeRO-0 to 2), added up where they are needed.

At ZeRO-1 and 2 a rank steps a shard of the optimizer's state, and needs the sum of that shard alone. So each total
crosses the wire once, in fp64, to the rank that needs it: 8 bytes per weight, where an all-reduce moves 16. What
arrives is added in the order of the ranks, in place, so that nothing is in memory twice but what is under way. At
ZeRO-0 every rank needs the whole sum. The proof is that of `exchange.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from murmuration.train.clip.sums import ExactSums
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.exchange import Arrived, Exchange, require_sums, weigh, weighed


class WholeSums:
    """`fragments` are the pieces of parameters that this rank's optimizer holds: all of each, or, if `sharded`, such
    that each element is in one rank's. Ranks make and reduce their sums together."""

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
        for stretch, values in zip(arrived.stretches, total.split(_lengths(arrived.stretches)), strict=True):
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


def _lengths(stretches: Sequence[slice]) -> list[int]:
    return [stretch.stop - stretch.start for stretch in stretches]
