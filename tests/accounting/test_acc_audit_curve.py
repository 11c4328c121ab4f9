"""The tail of right guesses under a trade-off curve: against linear programs, and mechanisms whose curve is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import ndtr
from scipy.stats import binom

from murmuration.accounting.epsilon.accountant import Event
from murmuration.accounting.epsilon.audit_bound import correct_guesses, epsilon_bound
from murmuration.accounting.epsilon.audit_curve import curve_p_value, is_refuted
from murmuration.accounting.epsilon.gaussian import gaussian_epsilon
from murmuration.accounting.epsilon.trade_off import TradeOff, of_events, of_point


def gaussian(mu: float) -> TradeOff:
    return TradeOff((0.0,), (0.0,), 1 / mu)


def largest_tail(canaries: int, guesses: int, correct: int, curve: TradeOff) -> float:
    """Over all distributions of the number of right guesses that satisfy every line of the module's inequality."""
    number = np.arange(guesses + 1)
    rows, limits = [], []
    for i in range(1, guesses + 1):
        right = np.where(number >= i, number, 0) / canaries
        wrong = np.where(number >= i - 1, guesses - number, 0) / canaries
        for epsilon, delta in zip(curve.epsilons, curve.deltas, strict=True):
            rows += [right - math.exp(epsilon) * wrong, math.exp(epsilon) * right - wrong]
            limits += [delta, math.exp(epsilon) - 1 + delta]
    found = linprog(-(number >= correct).astype(float), A_ub=rows, b_ub=limits, A_eq=[np.ones(guesses + 1)], b_eq=[1.0])
    assert found.status == 0
    return -float(found.fun)


@pytest.mark.parametrize(
    ("canaries", "guesses", "curve"),
    [
        (9, 9, of_point(1.0, 0.0)),
        (30, 12, of_point(0.5, 1e-2)),
        (12, 12, TradeOff((0.0, 0.4, 1.0, 2.0), (0.35, 0.2, 0.06, 0.004))),
        (40, 10, TradeOff((0.0, 1.0, 3.0), (0.5, 0.2, 0.001))),
    ],
)
def test_the_recursion_solves_the_linear_program(canaries: int, guesses: int, curve: TradeOff) -> None:
    for correct in range(guesses + 1):
        expected = largest_tail(canaries, guesses, correct, curve)
        assert curve_p_value(canaries, guesses, correct, curve) == pytest.approx(expected, rel=1e-5), correct


@pytest.mark.parametrize("eps", [0.25, 1.0, 3.0])
def test_randomised_response_never_beats_it_and_comes_close(eps: float) -> None:
    m, right = 200, 1 / (1 + math.exp(-eps))
    for correct in range(round(m * right), m + 1):
        exact = float(binom.sf(correct - 1, m, right))
        found = curve_p_value(m, m, correct, of_point(eps, 0.0))
        assert exact * (1 - 1e-6) <= found
        if 1e-12 < exact < 0.05:
            assert found < 20 * exact, "the tail is put into one number; that costs a small factor"


@pytest.mark.parametrize("delta", [1e-4, 1e-2])
@pytest.mark.parametrize("eps", [0.0, 1.0])
def test_no_mechanism_of_that_epsilon_and_delta_beats_it(eps: float, delta: float) -> None:
    m, right = 40, 1 / (1 + math.exp(-eps))
    each = delta + (1 - delta) * right
    for v in range(m + 1):
        found = curve_p_value(m, m, v, of_point(eps, delta)) * (1 + 1e-6)
        assert delta + (1 - delta) * float(binom.sf(v - 1, m, right)) <= found, "all coins at once, rarely"
        assert float(binom.sf(v - 1, m, each)) <= found, "each coin, rarely"


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
def test_gaussian_canaries_never_beat_it(mu: float) -> None:
    """The likelihood ratio's guesses about all of them: right ones are binomial."""
    m, right = 300, float(ndtr(mu / 2))
    found = [curve_p_value(m, m, v, gaussian(mu)) for v in range(m + 1)]
    assert found == sorted(found, reverse=True)
    assert all(binom.sf(v - 1, m, right) <= p * (1 + 1e-6) for v, p in enumerate(found))


@pytest.mark.parametrize("shares", [(0.1,), (0.4,)])
def test_with_abstentions_it_covers_gaussian_canaries(shares: tuple[float, ...]) -> None:
    """Fixed seed; at a true level of 5 %, 3 standard errors above it would be left once in a thousand seeds."""
    draw = np.random.default_rng(3)
    m, mu, audits = 400, 1.0, 2000
    guesses = round(shares[0] * m)
    refuting = [is_refuted(m, guesses, v, gaussian(mu), 0.05) for v in range(guesses + 1)]
    wrongly = 0
    for _ in range(audits):
        included = draw.random(m) < 0.5
        order = np.argsort(mu * included + draw.standard_normal(m))
        wrongly += refuting[correct_guesses(order, included, guesses)]
    assert wrongly / audits <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / audits)


def test_on_gaussian_canaries_it_is_tighter_than_the_bound_from_one_epsilon_and_delta() -> None:
    m, guesses, delta = 2000, 200, 1e-5
    for mu in (1.0, 2.0):
        # The expected number of right guesses by the largest scores: both tails of the mixture, a tenth of all.
        draw = np.random.default_rng(1)
        included = draw.random(m) < 0.5
        correct = correct_guesses(np.argsort(mu * included + draw.standard_normal(m)), included, guesses)
        steinke = epsilon_bound(m, guesses, correct, delta)
        refuted = [at for at in np.linspace(0.05, 4, 80) if is_refuted(m, guesses, correct, gaussian(at), 0.05)]
        found = gaussian_epsilon(1 / max(refuted), delta)
        assert 1.4 * steinke < found < gaussian_epsilon(1 / mu, delta), (mu, steinke, found)


@pytest.mark.parametrize(
    "curve", [gaussian(1.3), of_point(1.0, 1e-3), of_events([Event(0.3, 0.9, 3)], 1e-6)], ids=["q=1", "point", "pld"]
)
def test_false_alarms_are_the_inverse_of_power_from_below(curve: TradeOff) -> None:
    for alpha in np.geomspace(1e-9, 0.9, 40):
        back = curve.false_alarms(curve.power(alpha))
        assert back <= alpha * (1 + 1e-6) + 1e-11
        assert curve.false_alarms(curve.power(alpha) * 0.99) <= back
    assert curve.false_alarms(0.0) == 0.0 and curve.false_alarms(1.0) == pytest.approx(1.0, abs=2e-3)


def test_a_right_guess_more_says_more_and_no_right_guess_says_nothing() -> None:
    assert curve_p_value(100, 20, 0, gaussian(1.0)) == 1.0
    assert curve_p_value(2000, 800, 800, gaussian(0.1)) == 1e-15
    assert is_refuted(2000, 800, 800, gaussian(0.1), 1e-12) and not is_refuted(2000, 800, 430, gaussian(0.5), 0.05)
