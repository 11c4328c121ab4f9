"""The curve of what a test can find out: a bound, close to what the best test reaches, and far below one (ε, δ)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.special import ndtr, ndtri
from scipy.stats import norm

from murmuration.accounting.epsilon.accountant import deltas_at, epsilon
from murmuration.accounting.epsilon.gaussian import gaussian_delta
from murmuration.accounting.epsilon.trade_off import GRID, TradeOff, of_events, of_point
from murmuration.accounting.event import Event

DEMO, DELTA = [Event(0.05, 0.60742, 50)], 2.5e-5
VIP = 233_000_000
SPREAD_OUT = [Event(8192 / VIP, 0.39361, 72_000)]


def test_the_demo_proves_far_more_than_its_epsilon_does() -> None:
    curve, point = of_events(DEMO, DELTA), of_point(epsilon(DEMO, DELTA), DELTA)
    assert 0.668 < curve.best_guess() < 0.669 and 0.122 < curve.power(0.01) < 0.124
    assert point.best_guess() > 0.999 and point.power(0.01) > 0.999
    for alpha in GRID:
        assert alpha <= curve.power(alpha) <= point.power(alpha) + 1e-9


def test_the_best_test_of_simulated_runs_stays_below_the_curve_and_close_to_it() -> None:
    draw, count, (event,) = np.random.default_rng(3), 100_000, DEMO
    scores = []
    for there in (True, False):
        total = np.zeros(count)
        for _ in range(event.count):
            drawn = (draw.random(count) < event.rate) & there
            z = draw.standard_normal(count) + drawn / event.sigma
            total += np.log1p(event.rate * np.expm1(z / event.sigma - 0.5 / event.sigma**2))
        scores.append(total)
    used, unused = scores
    curve = of_events(DEMO, DELTA)
    for alpha in (0.01, 0.1, 0.5):
        # The threshold that as many of the unused pass; both shares have errors of sampling.
        reached = float((used > np.quantile(unused, 1 - alpha)).mean())
        noise = 5 * 2 * (curve.power(alpha) / alpha) * np.sqrt(alpha / count)
        assert reached - noise <= curve.power(alpha) <= reached + noise + 0.02
    guess = 0.5 * (float((used > 0).mean()) + float((unused <= 0).mean()))
    assert guess - 0.01 <= curve.best_guess() <= guess + 0.01


def test_deltas_agree_with_another_package_at_every_epsilon() -> None:
    (event,) = DEMO
    theirs = pld.from_gaussian_mechanism(
        event.sigma, sampling_prob=event.rate, value_discretization_interval=1e-4
    ).self_compose(event.count)  # fmt: skip
    asked = [0.0, 0.3, 1.0, 2.5, 4.0, 7.0]
    assert deltas_at(DEMO, asked, DELTA) == pytest.approx([theirs.get_delta_for_epsilon(e) for e in asked], rel=1e-3)


def test_lines_of_a_gaussian_bound_its_exact_curve_closely() -> None:
    """The same machine fed with a closed form, whose curve is known."""
    epsilons = tuple(float(e) for e in np.linspace(0, 6, 257))
    lines = TradeOff(epsilons, tuple(gaussian_delta(1.0, e) for e in epsilons))
    exact = TradeOff(epsilons, lines.deltas, sigma=1.0)
    for alpha in (1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9):
        truth = float(ndtr(ndtri(alpha) + 1))
        assert truth <= exact.power(alpha) <= truth + 1e-9
        assert truth <= lines.power(alpha) <= truth * (1 + 1e-3) + 1e-9
    assert lines.best_guess() == pytest.approx(ndtr(0.5), abs=1e-6) and lines.best_guess() >= ndtr(0.5)
    fit = lines.fit()
    assert 1.0 <= fit.mu <= 1.01 and fit.gap <= 0.003 and exact.fit().mu == 1.0 and exact.fit().gap == 0.0


@pytest.mark.parametrize("events", [DEMO, SPREAD_OUT, [Event(0.5, 1.0, 20)], [Event(0.8, 1.7, 12)]], ids=str)
def test_the_gaussian_fit_is_above_the_curve_everywhere_but_for_delta(events: list[Event]) -> None:
    delta = 1e-6
    curve = of_events(events, delta)
    fit = curve.fit()
    assert 0 < fit.mu < 30 and fit.delta <= delta * (1 + 1e-9)
    alphas = np.concatenate([np.logspace(-14, -1, 400), np.linspace(0.1, 1 - 1e-9, 400)])
    gaussian = norm.cdf(norm.ppf(alphas) + fit.mu)
    bound = np.array([curve.power(float(a)) for a in alphas])
    assert (gaussian + fit.delta >= bound - 1e-9).all()
    gaps = (gaussian - bound).max()
    assert gaps <= fit.gap + 1e-9, "the stated error of the fit is one"
    # And no smaller mu would do: at some corner the two nearly touch.
    closer = norm.cdf(norm.ppf(alphas) + fit.mu * 0.9)
    assert (closer + fit.delta < bound).any()


def test_a_single_point_gives_what_it_gives() -> None:
    for value, delta in ((0.5, 1e-5), (8.0, 1e-6), (400.0, 1e-6), (5000.0, 1e-9)):
        point = of_point(value, delta)
        assert 0.5 <= point.best_guess() <= 1 and 0 < point.power(0.01) <= 1
    assert of_point(np.log(3), 0.0).best_guess() == pytest.approx(0.75)
    assert of_point(np.log(2), 0.0).power(0.01) == pytest.approx(0.02)
    assert of_point(0.0, 1e-6).power(0.25) == pytest.approx(0.25, abs=2e-6)


def test_no_epsilon_leaves_the_curve_without_a_bound() -> None:
    """The tilted transforms of the absent neighbour lead nowhere where its losses end; delta still falls."""
    asked = [float(e) for e in np.linspace(0, 8, 40)]
    found = deltas_at(SPREAD_OUT, asked, 0.5 / VIP)
    assert found == sorted(found, reverse=True) and found[0] < 0.08 and found[-1] < 3e-9
    assert of_events([], 1e-6).power(0.25) == pytest.approx(0.25, abs=1e-9)


def test_a_distance_alone_has_a_gaussian_that_covers_it() -> None:
    """With one line the only corner is the one on the diagonal, where the bound meets its mirror."""
    fit = TradeOff((0.0,), (0.3,)).fit()
    assert 2 * ndtr(fit.mu / 2) - 1 == pytest.approx(0.3, abs=1e-6)
    assert TradeOff((0.0,), (0.3,)).best_guess() == pytest.approx(0.65)


@pytest.mark.parametrize("curve", [of_point(0.0, 0.0), of_events([], 1e-5)])
def test_where_nothing_was_released_the_gaussian_is_nothing(curve: TradeOff) -> None:
    fit = curve.fit()
    assert 0 <= fit.mu < 1e-9 and fit.delta == 0 and 0.5 <= curve.best_guess() < 0.5 + 1e-9


def test_the_table_goes_from_few_false_alarms_to_many() -> None:
    assert GRID[0] > 0 and GRID[-1] < 1 and all(one < other for one, other in pairwise(GRID))
