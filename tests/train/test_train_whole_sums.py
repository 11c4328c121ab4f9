"""Totals of a model that every rank has whole: added up in place, each where it is needed, with a proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from murmuration.train.clip.sums import ExactSums
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines import exchange
from murmuration.train.engines.exchange import WholeSums
from murmuration.train.engines.shard_map import ShardMapError
from murmuration.train.noise.update import UpdateError
from tests.support.train_helpers import on_ranks

CPU = torch.device("cpu")
SHAPES = {"w": torch.Size((7, 5)), "bias": torch.Size((3,)), "one": torch.Size(()), "table": torch.Size((40, 6))}


def slices(rank: int, world: int) -> list[Fragment]:
    """As ZeRO-1 cuts: all parameters in one row, of which each rank has an equal part."""
    whole = sum(shape.numel() for shape in SHAPES.values())
    most = -(-whole // world)
    found, first = [], 0
    for number, (name, shape) in enumerate(SHAPES.items()):
        start, stop = max(first, rank * most), min(first + shape.numel(), (rank + 1) * most)
        if start < stop:
            found.append(Fragment(name, number, start - first, stop - start, start - rank * most))
        first += shape.numel()
    return found


def whole(rank: int, world: int) -> list[Fragment]:
    del rank, world
    return [Fragment(name, number, 0, shape.numel(), 0) for number, (name, shape) in enumerate(SHAPES.items())]


def values(rank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}


def summed(ranks: Any, sharded: bool, change: Callable[[WholeSums], object] | None = None) -> dict[str, Tensor]:
    totals = ExactSums(SHAPES, CPU)
    held = (slices if sharded else whole)(ranks.rank, ranks.world)
    sums = WholeSums(totals, SHAPES, held, ranks, sharded)
    for name, value in values(ranks.rank).items():
        totals.add(name, value)
    place = totals.flat.data_ptr()
    if change is not None:
        change(sums)
    sums.reduce()
    assert totals.flat.data_ptr() == place, "a recorded micro-batch adds to the same memory"
    return {fragment.name: sums.of(fragment).clone() for fragment in held}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("at_once", [7, 100, 1 << 20])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_rank_gets_the_sum_of_what_it_steps(
    world: int, at_once: int, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Sent whole or a few elements at a time; added in the order of the ranks, to the last bit, if sharded."""
    monkeypatch.setattr(exchange, "RUNS", 1 << 20)
    monkeypatch.setattr(exchange, "SHORTEST_RUN", at_once)
    for rank, found in enumerate(on_ranks(world, lambda ranks: summed(ranks, sharded))):
        held = (slices if sharded else whole)(rank, world)
        assert set(found) == {fragment.name for fragment in held}
        for f in held:
            expected = values(0)[f.name].view(-1).clone()
            for other in range(1, world):
                expected += values(other)[f.name].view(-1)
            apart = found[f.name] - expected[f.start : f.start + f.length]
            assert not apart.any() if sharded else apart.abs().max() < 1e-12


def test_a_step_after_the_first_is_not_added_to_what_was_reduced_before() -> None:
    """What is left of other ranks' shards is forgotten with the step."""

    def twice(ranks: Any) -> dict[str, Tensor]:
        totals = ExactSums(SHAPES, CPU)
        sums = WholeSums(totals, SHAPES, slices(ranks.rank, ranks.world), ranks, sharded=True)
        for _ in range(2):
            totals.clear()
            for name, value in values(ranks.rank).items():
                totals.add(name, value)
            sums.reduce()
        return {f.name: sums.of(f).clone() for f in slices(ranks.rank, ranks.world)}

    for again, once in zip(on_ranks(3, twice), on_ranks(3, lambda ranks: summed(ranks, True)), strict=True):
        assert all(torch.equal(again[name], once[name]) for name in once)


# What goes wrong on the way is said by every rank.


def poisoned(sums: WholeSums) -> None:
    if sums._ranks.rank == 1:
        sums._sums.totals["w"][3, 2] = float("inf")


def sends(change: Callable[[dict[str, Tensor]], object]) -> Callable[[WholeSums], None]:
    """One rank sends something else than it proves."""

    def plant(sums: WholeSums) -> None:
        assert sums._exchange is not None
        real = sums._exchange.run

        def run(flat: Tensor, take: Any) -> None:
            if sums._ranks.rank == 1:
                change(sums._sums.totals)
            real(flat, take)

        sums._exchange.run = run

    return plant


def scaled(totals: dict[str, Tensor]) -> None:
    totals["table"] *= 1 + 1e-6


def first_element(totals: dict[str, Tensor]) -> None:
    totals["table"][0, 0] += 1e-3


def neighbours_swapped(totals: dict[str, Tensor]) -> None:
    row = totals["table"][20]
    row[2], row[3] = row[3].clone(), row[2].clone()


def through_fp32(totals: dict[str, Tensor]) -> None:
    """Sums that are rounded on their way lose what keeps a record's share within its bound."""
    for total in totals.values():
        total.copy_(total.float())


def shifted(sums: WholeSums) -> None:
    assert sums._exchange is not None
    if sums._ranks.rank == 1:
        own = sums._exchange._parcels[0].own
        own[0] = slice(own[0].start - 1, own[0].stop - 1)


def left_out(sums: WholeSums) -> None:
    """One rank adds nothing of the others."""
    if sums._ranks.rank == 1:
        sums._take = lambda arrived: None


@pytest.mark.parametrize(
    "change", [poisoned, shifted, left_out, *map(sends, (scaled, first_element, neighbours_swapped, through_fp32))]
)
def test_what_happens_to_a_sum_on_its_way_stops_every_rank(change: Callable[[WholeSums], None]) -> None:
    def one(ranks: Any) -> str:
        try:
            summed(ranks, True, change)
        except UpdateError as error:
            return str(error)
        return "went through"

    message = "is not finite" if change is poisoned else "is not the sum over the ranks"
    assert all(message in said for said in on_ranks(3, one))


def test_shards_that_overlap_or_leave_something_out_are_refused() -> None:
    def one(ranks: Any) -> str:
        pieces = slices(0, 2)  # both ranks hold the first half
        try:
            WholeSums(ExactSums(SHAPES, CPU), SHAPES, pieces, ranks, sharded=True)
        except ShardMapError as error:
            return str(error)
        return "went through"

    assert all("are in two shards" in said for said in on_ranks(2, one))
