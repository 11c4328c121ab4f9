"""Calibration: accounted again it never passes the target, and one step of its grid less does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from murmuration.accounting.epsilon import calibrate
from murmuration.accounting.epsilon.accountant import MARGIN, affordable_steps, epsilon, quick_epsilon
from murmuration.accounting.epsilon.affordable import calibrate_batch, calibrate_steps
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event
from murmuration.accounting.sampling import RATE_DENOMINATOR, threshold_for

DEMO = (20_000, 1000, 50, 2.5e-5)


@pytest.mark.parametrize(
    ("rate", "steps", "target", "delta", "by"),
    [
        pytest.param(0.05, 50, 8.0, 2.5e-5, "pld", marks=pytest.mark.slow), 
        pytest.param(0.05, 50, 8.0, 2.5e-5, "rdp", marks=pytest.mark.rest),
        pytest.param(0.01, 100, 0.5, 1e-6, "pld", marks=pytest.mark.slow),
        (1.0, 1, 4.0, 1e-6, "pld"), (1.0, 7, 1.0, 1e-6, "rdp"), (0.002, 300, 3.0, 1e-7, "rdp"),
        (0.2, 3, 0.2, 1e-4, "pld"),
        pytest.param(0.5, 3, 0.03, 1e-4, "pld", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_sigma(rate, steps, target, delta, by) -> None:
    sigma = calibrate_sigma(Event(rate, 1.0, steps), target, delta, by)
    assert sigma == round(sigma, 5)
    assert epsilon([Event(rate, sigma, steps)], delta, by) <= target
    assert epsilon([Event(rate, round(sigma - 1e-5, 5), steps)], delta, by) > target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "batch", "steps", "share", "rdp", "pld"),
    [
        (233_000_000, 98_304, 6000, 0.5, 0.4799, 0.4565), (2_330_000, 98_304, 6000, 0.5, 2.4838, 2.3682),
        (233_804_767, 1_310_720, 5708, 1.0, 0.7296, 0.7071),
    ],
)  # fmt: skip
def test_exact_sigmas_of_the_papers(n, batch, steps, share, rdp, pld) -> None:
    assert abs(calibrate_sigma(Event(batch / n, 1.0, steps), 8.0, share / n, "rdp") - rdp) < 1e-4
    assert abs(calibrate_sigma(Event(batch / n, 1.0, steps), 8.0, share / n) - pld) < 2e-4


@pytest.mark.rest
@pytest.mark.parametrize("by", [pytest.param("pld", marks=pytest.mark.slow), "rdp"])
def test_steps(by) -> None:
    steps = calibrate_steps(Event(0.05, 0.8, 1), 6.0, 2.5e-5, by)
    assert epsilon([Event(0.05, 0.8, steps)], 2.5e-5, by) <= 6.0
    assert epsilon([Event(0.05, 0.8, steps + 1)], 2.5e-5, by) > 6.0


@pytest.mark.rest
@pytest.mark.parametrize("by", [pytest.param("pld", marks=pytest.mark.slow), "rdp"])
def test_batch(by) -> None:
    n, _, steps, delta = DEMO

    def spent(batch: int) -> float:
        return epsilon([Event(threshold_for(n, batch) / RATE_DENOMINATOR, 0.8, steps)], delta, by)

    batch = calibrate_batch(n, 0.8, steps, 6.0, delta, by)
    assert spent(batch) <= 6.0 < spent(batch + 1)


def test_everything_fits_where_there_is_noise_enough() -> None:
    assert calibrate_batch(50, 100.0, 2, 8.0, 1e-3) == 50


@pytest.mark.parametrize("target", [101.0, 1e6, 1e300])
def test_a_target_that_promises_nothing_is_refused_before_anything_is_searched(
    target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("epsilon", "quick_epsilon"):
        monkeypatch.setattr(calibrate, name, lambda *_: pytest.fail("searched"))
    for ask in (
        lambda: calibrate_sigma(Event(0.05, 1.0, 50), target, 1e-5),
        lambda: calibrate_steps(Event(0.05, 0.1, 1), target, 1e-5),
        lambda: calibrate_batch(1000, 0.3, 1000, target, 1e-5),
    ):  # fmt: skip
        with pytest.raises(AccountingError, match=r"promises nothing.*give at most 100"):
            ask()


@pytest.mark.rest
@pytest.mark.parametrize(
    ("rate", "steps", "target", "delta"),
    [(0.05, 50, 1e-6, 1e-5), (0.5, 10_000, 8.0, 1e-6), (0.05, 50, 8.0, 1e-30), (1e-4, 10**6, 8.0, 1e-9)],
)
def test_few_points_are_accounted_for_in_full_even_far_out(
    rate: float, steps: int, target: float, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick bound comes so close that the accountant itself is asked a few times, whatever is asked."""
    asked: list[float] = []

    def counted(events: list[Event], *others: Any) -> float:
        asked.append(events[0].sigma)
        return epsilon(events, *others)

    monkeypatch.setattr(calibrate, "epsilon", counted)
    sigma = calibrate_sigma.__wrapped__(Event(rate, 1.0, steps), target, delta)
    assert len(asked) <= 10
    spent, above = (epsilon([Event(rate, each, steps)], delta) for each in (sigma, round(sigma - 1e-5, 5)))
    assert spent <= target * (1 - MARGIN) < above


@pytest.mark.rest
@pytest.mark.parametrize(
    ("event", "close"),
    [(Event(0.05, 0.7, 50), True), (Event(0.01, 0.6, 2000), True), (Event(0.5, 300.0, 10**6), True),
     (Event(1e-6, 0.5, 100), False)],  # an epsilon below any that is asked for
)  # fmt: skip
def test_the_quick_bound_lies_above_the_accounted_epsilon_and_close(event: Event, close: bool) -> None:
    exact = epsilon([event], 1e-6)
    assert exact * (1 - 1e-9) <= quick_epsilon([event], 1e-6)
    assert not close or quick_epsilon([event], 1e-6) <= 1.3 * exact + 1e-3


@pytest.mark.parametrize("by", ["quick", "pld"])
def test_only_too_little_noise_explains_that_there_is_no_answer(by: calibrate.By) -> None:
    """An accountant that has none with a noise multiplier above 50 either says why, and not that noise is missing."""
    ladder = calibrate._SigmaLadder(Event(0.5, 1.0, 2), 8.0, 1e-38, digits=2)
    assert ladder.excess(1, by) == ladder.excess(4_900, by) == math.inf
    with pytest.raises(AccountingError, match="too small for PLD accounting"):
        ladder.excess(5_100, by)
    with pytest.raises(AccountingError, match="too small for PLD accounting"):
        calibrate_sigma(Event(0.5, 1.0, 2), 8.0, 1e-38)


@pytest.mark.rest
def test_where_delta_alone_keeps_any_epsilon_the_least_noise_that_can_be_accounted_is_enough() -> None:
    """A record that takes part less often than delta: epsilon is 0 with any noise, so its slope leads nowhere."""
    sigma = calibrate_sigma(Event(1e-6, 1.0, 1), 8.0, 1e-3, digits=3)
    assert 0 < sigma < 0.1 and epsilon([Event(1e-6, sigma, 1)], 1e-3) < 1e-9
    with pytest.raises(AccountingError, match="use more noise"):
        epsilon([Event(1e-6, sigma - 1e-3, 1)], 1e-3)


def test_affordable_steps_meet_the_budget_exactly() -> None:
    charged = [Event(0.05, 0.8, 10)]
    count = affordable_steps(charged, Event(0.05, 0.8, 0), 10_000, 5.0, 2.5e-5)
    assert epsilon([Event(0.05, 0.8, 10 + count)], 2.5e-5) <= 5.0 < epsilon([Event(0.05, 0.8, 11 + count)], 2.5e-5)
    assert affordable_steps(charged, Event(0.05, 0.8, 0), 3, 5.0, 2.5e-5) == 3
    assert affordable_steps(charged, Event(0.05, 0.8, 0), 3, 0.1, 2.5e-5) == 0
    assert affordable_steps(charged, Event(0.05, 0.8, 0), 0, 5.0, 2.5e-5) == 0
