"""A draw that ranks share: the same records and the same digest as one processor's, and no part that errs unnoticed."""

from __future__ import annotations

import hashlib
import hmac
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from murmuration.accounting.sampling import CyclicPoisson, Poisson
from murmuration.data.draw.poisson import LANES, Draw, PoissonSampler
from murmuration.data.draw.samplers import DrawError, Exchange, SharedSampler

KEY, DIGEST_KEY = b"k" * 32, b"d" * 32


def sampler(records: int, threshold: int = LANES // 7) -> PoissonSampler:
    return PoissonSampler(KEY, DIGEST_KEY, records, threshold)


class Table:
    """Where ranks that are threads lay their arrays down."""

    def __init__(self, world: int) -> None:
        self.parts: list[np.ndarray] = [np.zeros(0)] * world
        self.barrier = threading.Barrier(world, timeout=60)

    def exchange(self, rank: int) -> Exchange:
        def gather(own: np.ndarray) -> list[np.ndarray]:
            self.parts[rank] = own
            self.barrier.wait()
            found = list(self.parts)
            self.barrier.wait()
            return found

        return gather


def shared(samplers: list[PoissonSampler], step: int) -> list[Draw]:
    world, table = len(samplers), Table(len(samplers))
    ranks = [SharedSampler(own, rank, world, table.exchange(rank)) for rank, own in enumerate(samplers)]
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: rank.draw(step), ranks))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("records", [1, 5, 1000, 1027, (1 << 20) * 2 + 3])
def test_it_is_the_draw_of_one_processor(world: int, records: int) -> None:
    expected = sampler(records).draw(3)
    for found in shared([sampler(records) for _ in range(world)], 3):
        assert np.array_equal(found.ids, expected.ids) and found.ids.dtype == expected.ids.dtype
        assert (found.digest, found.rule, found.records, found.step) == (
            expected.digest, expected.rule, expected.records, expected.step,
        )  # fmt: skip
        assert not found.ids.flags.writeable


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_rank_that_draws_other_records_is_noticed_whichever_it_is(wrong: int) -> None:
    class Errs(PoissonSampler):
        def part(self, step: int, first: int, stop: int) -> np.ndarray:
            found = super().part(step, first, stop)
            return found[1:]

    ranks = [sampler(999) for _ in range(3)]
    ranks[wrong] = Errs(KEY, DIGEST_KEY, 999, LANES // 7)
    with pytest.raises(DrawError, match="drew different records from the same part of step 5"):
        shared(ranks, 5)


def test_parts_lie_side_by_side_and_begin_with_a_block_of_the_cipher() -> None:
    own = sampler(103)
    whole = own.draw(9).ids
    cuts = [0, 4, 52, 100, 103]
    parts = [own.part(9, first, stop) for first, stop in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_part_is_drawn_by_two_ranks(world: int) -> None:
    drawn: dict[int, set[int]] = {4 * rank: set() for rank in range(world)}

    class Counting:
        def candidates(self, step: int) -> int:
            return 4 * world

        def part(self, step: int, first: int, stop: int) -> np.ndarray:
            drawn[first].add(now)
            return np.arange(first, stop)

        def whole(self, step: int, ids: np.ndarray) -> np.ndarray:
            return ids

    parts = [np.arange(4 * rank, 4 * rank + 4) for rank in range(world)]
    for now in range(world):
        SharedSampler(Counting(), now, world, lambda own: parts).draw(1)  # pyright: ignore[reportArgumentType]
    assert all(len(ranks) == 2 for ranks in drawn.values())


# Records that take turns: each step draws from one part, exactly at its rate, the same on any number of ranks.


KEY, DIGEST = b"k" * 32, b"d" * 32


def turning(records: int = 1003, threshold: int = LANES // 4, parts: int = 7) -> PoissonSampler:
    return PoissonSampler(KEY, DIGEST, records, threshold, parts)


def test_a_block_draws_every_record_once_where_all_whose_turn_it_is_are_drawn() -> None:
    for begin in (1, 4):  # a block may begin anywhere
        drawn = [turning(threshold=LANES).draw(step).ids for step in range(begin, begin + 7)]
        assert np.array_equal(np.sort(np.concatenate(drawn)), np.arange(1003))
        assert all(np.array_equal(ids, np.sort(ids)) for ids in drawn)


def test_a_step_draws_from_its_own_part_alone_and_at_its_rate() -> None:
    drawing = turning(records=70_000)
    for step in range(1, 15):
        ids = drawing.draw(step).ids
        assert (ids % 7 == step % 7).all()
        assert abs(len(ids) - 2500) < 5 * np.sqrt(10_000 * 0.25 * 0.75)
    turns = [set(drawing.draw(step).ids) for step in range(3, 7 * 40, 7)]
    taken = np.array([[record in turn for turn in turns] for record in range(3, 7 * 400, 7)])
    assert abs(np.corrcoef(taken[:, ::2].ravel(), taken[:, 1::2].ravel())[0, 1]) < 0.03, "turns are independent"


def test_lanes_are_counted_within_the_part() -> None:
    whole = PoissonSampler(KEY, DIGEST, 144, LANES // 4)
    places = whole.draw(5).ids
    assert np.array_equal(turning(records=7 * 144).draw(5).ids, places * 7 + 5)


def test_the_digest_names_the_number_of_parts_and_without_parts_is_as_before() -> None:
    found = turning().draw(3)
    numbers = np.array([3, LANES // 4, 1003, 7], "<u8").tobytes() + found.ids.astype("<i8").tobytes()
    assert (
        found.rule == CyclicPoisson(LANES // 4, 7)
        and found.digest == hmac.new(DIGEST, numbers, hashlib.sha256).hexdigest()
    )
    plain = PoissonSampler(KEY, DIGEST, 1003, LANES // 4).draw(3)
    numbers = np.array([3, LANES // 4, 1003], "<u8").tobytes() + plain.ids.astype("<i8").tobytes()
    assert plain.rule == Poisson(LANES // 4) and plain.digest == hmac.new(DIGEST, numbers, hashlib.sha256).hexdigest()


@pytest.mark.parametrize(("records", "parts"), [(1003, 7), (9, 9), (20, 3), (64, 2)])
def test_ranks_that_share_a_draw_draw_the_same(records: int, parts: int) -> None:
    alone = PoissonSampler(KEY, DIGEST, records, LANES // 2, parts)
    for world in (2, 3, 5):
        for step in range(1, 6):
            expected = alone.draw(step)
            for found in shared([alone] * world, step):
                assert found.digest == expected.digest and np.array_equal(found.ids, expected.ids)
