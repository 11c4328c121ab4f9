"""The accountant at its edges: no steps, capped batches, equal steps told in parts, numbers rounded for readers."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

from murmuration.accounting.epsilon.accountant import (
    MARGIN,
    Event,
    delta_at,
    deltas_at,
    epsilon,
    epsilon_below,
    merge,
    plain_sigma,
    round_up,
    show_delta,
    within,
)

NOTHING = [[], [Event(0.1, 1.0, 0)]]


@pytest.mark.parametrize("events", NOTHING)
def test_where_nothing_was_released_nothing_is_lost(events: list[Event]) -> None:
    assert epsilon(events, 1e-5) == 0.0 == epsilon(events, 1e-5, "rdp")
    assert epsilon_below(events, 1e-5) == 0.0
    assert deltas_at(events, [0.0, 1.0], 1e-5) == [0.0, 0.0] and delta_at(events, 0.0) == 0.0


def test_the_edges_of_what_can_be_accounted_are_inside() -> None:
    for sigma in (1e-9, 1e9):
        assert Event(1.0, sigma, 0, cap=1, records=1).sigma == sigma


def test_equal_steps_are_counted_together_in_any_order() -> None:
    kinds = [
        Event(0.1, 1.0, 2), Event(0.1, 1.0, 3), Event(0.1, 2.0, 1), Event(0.1, 1.0, 4, cap=7, records=50),
        Event(0.1, 1.0, 4, cap=7, records=60),
    ]  # fmt: skip
    expected = [Event(0.1, 1.0, 5), *kinds[3:], kinds[2]]
    for order in permutations(kinds):
        assert merge(order) == expected


def test_full_batches_are_one_gaussian_and_nothing_else_is() -> None:
    assert plain_sigma([Event(1.0, 3.0, 1)]) == pytest.approx(3.0, rel=1e-12)
    many = [Event(1.0, 3.0, 4), Event(1.0, 0.5, 2)]
    assert plain_sigma(many) == pytest.approx((4 / 9 + 2 / 0.25) ** -0.5, rel=1e-12)
    assert plain_sigma([*many, Event(0.999, 3.0, 1)]) is None
    assert plain_sigma([*many, Event(1.0, 3.0, 1, cap=5, records=9)]) is None


def test_readers_see_four_digits_of_epsilon_and_three_of_delta_rounded_up() -> None:
    assert round_up(1.23411) == 1.2342 and round_up(1.2341) == 1.2341 and round_up(2.0) == 2.0
    assert round_up(1.21, 1) == 1.3 and round_up(7.0001, 0) == 8
    for number in range(319_500, 320_000):
        least = math.nextafter(number / 1e4, math.inf)  # times 1e4, some of these round to the number itself
        assert round_up(least) == (number + 1) / 1e4
    for value in (1e-5, 1.2341e-6, 9.996e-9, 0.5, 1 / 3, 2 / 3e7):
        shown = float(show_delta(value))
        assert value <= shown <= value * 1.011
    assert show_delta(1.2341e-6) == "1.24e-06" and show_delta(1e-5) == "1e-05"


def test_a_budget_is_kept_only_with_room_for_other_processors() -> None:
    """Two processors may differ by a hundredth of that, as `test_acc_composition.py` finds."""
    assert 1e-9 < MARGIN < 1e-6
    assert within(8.0 * (1 - 2 * MARGIN), 8.0) and within(0.0, 1e-3)
    for spent in (8.0 * (1 - MARGIN / 2), 8.0, 8.0 * (1 + MARGIN / 2)):
        assert not within(spent, 8.0)
