"""A draw that ranks share: the same records and the same digest as one processor's, and no part that errs unnoticed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from murmuration.data.draw.poisson import LANES, Draw, PoissonSampler
from murmuration.data.draw.shared_draw import DrawError, Exchange, SharedSampler

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
        assert (found.digest, found.threshold, found.records, found.step) == (
            expected.digest, expected.threshold, expected.records, expected.step,
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
