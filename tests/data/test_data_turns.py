"""Records that take turns: each step draws from one part, exactly at its rate, the same on any number of ranks."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest

from murmuration.data.draw.poisson import LANES, PoissonSampler
from tests.data.test_data_shared_draw import shared

KEY, DIGEST = b"k" * 32, b"d" * 32


def sampler(records: int = 1003, threshold: int = LANES // 4, parts: int = 7) -> PoissonSampler:
    return PoissonSampler(KEY, DIGEST, records, threshold, parts)


def test_a_block_draws_every_record_once_where_all_whose_turn_it_is_are_drawn() -> None:
    for begin in (1, 4):  # a block may begin anywhere
        drawn = [sampler(threshold=LANES).draw(step).ids for step in range(begin, begin + 7)]
        assert np.array_equal(np.sort(np.concatenate(drawn)), np.arange(1003))
        assert all(np.array_equal(ids, np.sort(ids)) for ids in drawn)


def test_a_step_draws_from_its_own_part_alone_and_at_its_rate() -> None:
    drawing = sampler(records=70_000)
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
    assert np.array_equal(sampler(records=7 * 144).draw(5).ids, places * 7 + 5)


def test_the_digest_names_the_number_of_parts_and_without_parts_is_as_before() -> None:
    found = sampler().draw(3)
    numbers = np.array([3, LANES // 4, 1003, 7], "<u8").tobytes() + found.ids.astype("<i8").tobytes()
    assert found.parts == 7 and found.digest == hmac.new(DIGEST, numbers, hashlib.sha256).hexdigest()
    plain = PoissonSampler(KEY, DIGEST, 1003, LANES // 4).draw(3)
    numbers = np.array([3, LANES // 4, 1003], "<u8").tobytes() + plain.ids.astype("<i8").tobytes()
    assert plain.parts == 1 and plain.digest == hmac.new(DIGEST, numbers, hashlib.sha256).hexdigest()


@pytest.mark.parametrize(("records", "parts"), [(1003, 7), (9, 9), (20, 3), (64, 2)])
def test_ranks_that_share_a_draw_draw_the_same(records: int, parts: int) -> None:
    alone = PoissonSampler(KEY, DIGEST, records, LANES // 2, parts)
    for world in (2, 3, 5):
        for step in range(1, 6):
            expected = alone.draw(step)
            for found in shared([alone] * world, step):
                assert found.digest == expected.digest and np.array_equal(found.ids, expected.ids)
