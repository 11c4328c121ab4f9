"""Bounds of epsilon without a lattice, against closed forms, another contour integral and multiprecision."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr

from murmuration.accounting.epsilon import accountant, contour
from murmuration.accounting.epsilon.accountant import delta_at, deltas_at, epsilon, epsilon_below, interval_for
from murmuration.accounting.epsilon.composition import MOST_ERROR, NotConverged
from murmuration.accounting.epsilon.contour import Contour, _Line
from murmuration.accounting.epsilon.gaussian import gaussian_epsilon
from murmuration.accounting.epsilon.loss_lattice import Atoms, cells, dots
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event

TINY = (1.4e-5, 1.23, 244_941, 2.3e-9)
NODES, WEIGHTS = np.polynomial.legendre.leggauss(24)


class Truth:
    """delta(epsilon) of T steps by quadrature alone: K(z) = log E exp(z·loss) over the noise, and a trapezoid over z.
    Losses above `largest` are left out, so that it is below the truth by their chance at most."""

    def __init__(
        self, rate: float, sigma: float, steps: int, add: bool, tilt: float, spread: float, largest: float
    ) -> None:
        top = 12 + 1 / sigma
        if not add:
            top = min(top, sigma * math.log1p(math.expm1(largest) / rate) + 0.5 / sigma)
        edges = np.linspace(-12, top, int((12 + top) * max(1, 1 / sigma)) + 2)
        z = (edges[:-1, None] + np.diff(edges)[:, None] * (NODES + 1) / 2).ravel()
        mass = (np.diff(edges)[:, None] / 2 * WEIGHTS).ravel() * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        loss = np.log1p(rate * np.expm1(z / sigma - 0.5 / sigma**2))
        missing = float(ndtr(-12) + ndtr(-top))
        self.step = 2 * math.pi / (16 * spread)
        self.points, exponents = tilt + 1j * self.step * np.arange(4096), []
        for point in self.points:
            power = -point if add else 1 + point
            exponents.append(steps * np.log1p(np.sum(mass * np.expm1(power * loss)) - missing))
            if exponents[-1].real < exponents[0].real - 45:
                break
        self.points, self.exponents = self.points[: len(exponents)], np.array(exponents)

    def delta(self, value: float) -> float:
        terms = np.exp(self.exponents - self.points * value) / (self.points * (self.points + 1))
        terms[0] /= 2
        return float(np.sum(terms.real)) * self.step / math.pi


def true_delta(rate: float, sigma: float, steps: int, value: float, delta: float) -> float:
    """The larger one of both directions, on the contour through the saddle point of a cut distribution."""
    found = []
    for add, pair in enumerate(dots(rate, sigma)):
        parts = Contour.of([(pair, steps)], delta)
        tilt = parts._tilt_with_mean(value)
        spread, largest = parts.moments(tilt).spread, float(parts.lattices[0].losses.max())
        found.append(Truth(rate, sigma, steps, bool(add), tilt, spread, largest).delta(value))
    return max(found)


def test_at_a_tiny_rate_it_is_within_a_hundredth_of_the_truth() -> None:
    rate, sigma, steps, delta = TINY
    events = [Event(rate, sigma, steps)]
    value, below = epsilon(events, delta), epsilon_below(events, delta)
    assert below is not None and below <= value <= below * 1.001
    assert true_delta(*TINY[:3], value, delta) <= delta < true_delta(*TINY[:3], 0.99 * value, delta)
    assert true_delta(*TINY[:3], below, delta) >= delta * (1 - 1e-3)


def test_at_a_tiny_rate_multiprecision_agrees() -> None:
    """The same integral with 30 digits, and another quadrature of the noise: the trapezoidal rule on a fine grid."""
    rate, sigma, steps, delta = TINY
    value = epsilon([Event(rate, sigma, steps)], delta)
    with mpmath.workdps(30):
        q, s, h = mpmath.mpf(rate), mpmath.mpf(sigma), mpmath.mpf(1) / 8
        top = min(12.0, sigma * math.log1p(0.006 / rate))  # losses above have a chance of 1e-18 in each step
        grid = [h * k for k in range(-80, math.floor(top * 8))]
        ratios = [mpmath.expm1(x / s - 1 / (2 * s * s)) for x in grid]
        mass = [h * mpmath.exp(-x * x / 2) / mpmath.sqrt(2 * mpmath.pi) for x in grid]
        tilt, step = mpmath.mpf(687), 2 * mpmath.pi / (mpmath.mpf(14) / 150)
        total = mpmath.mpf(0)
        for k in range(40):
            z = mpmath.mpc(tilt, step * k)
            moment = mpmath.fsum(m * mpmath.power(1 + q * r, 1 + z) for m, r in zip(mass, ratios, strict=True))
            term = mpmath.exp(steps * mpmath.log(moment) - z * mpmath.mpf(value)) / (z * (z + 1))
            total += term.real * (0.5 if k == 0 else 1)
        exact = total * step / mpmath.pi
    assert 0.99 * delta <= exact <= delta


@pytest.mark.parametrize("seed", range(3))
def test_on_a_random_grid_no_bound_is_on_the_wrong_side(seed: int) -> None:
    chance = np.random.default_rng(seed)
    for _ in range(6):
        rate, sigma = 10 ** chance.uniform(-6.5, -3.5), chance.uniform(0.9, 4)
        steps, delta = int(10 ** chance.uniform(4, 6)), 10 ** chance.uniform(-10, -6)
        events = [Event(rate, sigma, steps)]
        value, below = epsilon(events, delta), epsilon_below(events, delta)
        assert below is not None and 0.99 * value <= below <= value, events
        assert true_delta(rate, sigma, steps, value, delta) <= delta * (1 + 1e-6), events
        assert true_delta(rate, sigma, steps, below, delta) >= delta * (1 - 2e-3), events


@pytest.mark.parametrize(("rate", "sigma"), [(1e-5, 0.7), (1e-3, 1.0), (0.3, 2.0), (1.0, 5.0)])
def test_pairs_on_no_lattice_bound_one_step_from_both_sides(rate: float, sigma: float) -> None:
    present, absent = dots(rate, sigma)
    narrow = cells(rate, sigma)
    q, s = mpmath.mpf(rate), mpmath.mpf(sigma)
    for place in (-1.0, 0.5, 3.0, 6.0):
        with mpmath.workdps(40):
            z = mpmath.mpf(place) + mpmath.mpf("0.3")
            value = mpmath.log1p(q * mpmath.expm1(z / s - 1 / (2 * s * s)))
            out, into = mpmath.ncdf(-z), (1 - q) * mpmath.ncdf(-z) + q * mpmath.ncdf(1 / s - z)
            with_against_without = into - mpmath.exp(value) * out
            without_against_with = (1 - out) - mpmath.exp(-value) * (1 - into)

        def stick(atoms: Atoms, at: float) -> float:
            return float(atoms.masses @ np.maximum(-np.expm1(at - atoms.losses), 0.0)) + atoms.infinite

        exact = float(with_against_without)
        assert exact * (1 - 1e-9) <= stick(present, float(value)) <= exact * 1.01 + 1e-30
        assert exact * 0.98 - 1e-30 <= stick(narrow, float(value)) <= exact * (1 + 1e-9)
        exact = float(without_against_with)
        assert exact * (1 - 1e-9) <= stick(absent, -float(value)) <= exact * 1.01 + 1e-30


@pytest.mark.parametrize(
    ("sigma", "steps", "delta"), [(1000.0, 40_000, 1e-6), (300.0, 10_000, 1e-10), (500.0, 200_000, 1e-3)]
)
def test_steps_of_all_records_add_up_as_in_closed_form(sigma: float, steps: int, delta: float) -> None:
    exact = gaussian_epsilon(sigma / math.sqrt(steps), delta)
    value = max(Contour.of([(pair, steps)], delta).epsilon(delta) for pair in dots(1.0, sigma))
    below = Contour.of([(cells(1.0, sigma), steps)], delta).epsilon_below(delta)
    assert exact * 0.999 < below <= exact <= value < exact * 1.001
    (found,) = Contour.of([(dots(1.0, sigma)[0], steps)], delta).deltas([exact])
    assert delta * (1 - 1e-9) <= found <= delta * 1.01


def line_of(rate: float, sigma: float, steps: int, delta: float) -> tuple[Contour, _Line, float]:
    parts = Contour.of([(dots(rate, sigma)[1], steps)], delta)
    value = parts.epsilon(delta)
    return parts, _Line(parts, parts._tilt_with_mean(value), delta, value), value


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "faint"), [(1.4e-5, 1.23, 244_941, 1e-24), (1e-4, 1.0, 50_000, 1e-24),
                                          (1e-4, 1.0, 50_000, 1e-13)]
)  # fmt: skip
def test_terms_round_within_their_bound(
    rate: float, sigma: float, steps: int, faint: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, line, value = line_of(rate, sigma, steps, 1e-8)
    monkeypatch.setattr(contour, "FAINT", faint)  # more is left out than rounding hides
    line = _Line(parts, line.tilt, 1e-8, value)
    missed = mpmath.mpf(0)
    with mpmath.workdps(40):
        masses = [mpmath.mpf(m) * mpmath.exp(line.tilt * mpmath.mpf(x)) for m, x in
                  zip(parts.lattices[0].masses.tolist(), parts.lattices[0].losses.tolist(), strict=True)]  # fmt: skip
        total, width = mpmath.fsum(masses), mpmath.mpf(line.width) / 3

        def uniform(z: mpmath.mpc) -> mpmath.mpc:
            return (mpmath.expm1(z * width) / (z * width)) ** 3

        for k in (0, 1, 2, 3, 5, 9, 17, 33):
            t = mpmath.mpf(float(line.places[k]))
            turned = mpmath.fsum(m * mpmath.expj(t * mpmath.mpf(x)) for m, x in
                                 zip(masses, parts.lattices[0].losses.tolist(), strict=True)) / total  # fmt: skip
            z = mpmath.mpc(line.tilt, t)
            share = mpmath.mpf(line.step) / mpmath.pi / (z * (z + 1)) * (0.5 if k == 0 else 1)
            exact = share * turned**steps * mpmath.expj(-t * line.moments.mean) * uniform(z) / uniform(z.real)
            missed += abs(exact - mpmath.mpc(complex(line.terms[k])))
    assert 0 < missed <= line.rounded


def test_what_lies_behind_the_last_term_is_within_its_bound() -> None:
    """The sum is taken much further than it need be; the bound is not far above what is then found."""
    _, line, _ = line_of(1e-4, 1.0, 50_000, 1e-8)
    count = 4
    further = line.places[-1]
    behind = float(np.sum(np.abs(line.terms[count:])))
    assert 0 < behind <= line._beyond(line.step * count) and further > line.step * count
    far = line.last * 1.5
    places = np.arange(far, 30 * far, line.step)  # behind these, a millionth of it is left
    decay = (2 * 3 / (line.width * places)) ** 3 * line.step / math.pi / places**2
    assert float(np.sum(decay)) <= line._beyond(far) * 1.01


def test_behind_each_look_the_terms_are_as_small_as_its_bound_until_the_next() -> None:
    """Of three losses, whose terms rise again and again."""
    _, line, _ = line_of(1e-4, 1.0, 50_000, 1e-8)
    line.parts, line.last = [(np.array([0.5, 0.3, 0.2]), np.array([-1.0, 0.7, 1.45]), 40, 1.0)], 1e4
    looks, decay = list[float](), line._decay
    line._decay = lambda place: looks.append(place) or decay(place)  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(NotConverged, match="too uneven"):
        line._beyond(1.0)
    for look, following in pairwise(looks[:300]):
        assert min(decay(float(t)) for t in np.linspace(look, following, 20)) >= 0.5 * decay(look) * (1 - 1e-9)


def test_a_delta_that_no_epsilon_near_the_sum_has_is_refused() -> None:
    parts, line, value = line_of(1e-4, 1.0, 50_000, 1e-8)
    assert line.epsilon(1e-8) <= value and parts.lost > 1e-13
    with pytest.raises(NotConverged, match=r"no epsilon near .* has delta = 1e-13"):
        line.epsilon(1e-13)


def test_the_largest_losses_are_charged_as_infinite() -> None:
    whole = dots(1e-3, 1.0)[0]
    cut = whole.cut(1e-9)
    assert len(cut.masses) < len(whole.masses) and cut.losses.max() < whole.losses.max()
    lost = float(whole.masses.sum() - cut.masses.sum())
    assert 0 < lost <= cut.infinite - whole.infinite <= 1.01e-9
    assert whole.cut(0.0).masses.sum() == whole.masses.sum()


def test_a_larger_error_of_the_masses_or_losses_gives_a_larger_epsilon_or_none() -> None:
    pair, steps, delta = dots(1e-4, 1.0)[1], 50_000, 1e-8
    value = Contour.of([(pair, steps)], delta).epsilon(delta)
    assert Contour.of([(replace(pair, slack=1e-8), steps)], delta).epsilon(delta) == pytest.approx(
        value + 5e-4, rel=1e-4
    )
    assert Contour.of([(replace(pair, error=1e-9), steps)], delta).epsilon(delta) > value
    with pytest.raises(AccountingError, match="rounding"):
        Contour.of([(replace(pair, error=MOST_ERROR / steps), steps)], delta).epsilon(delta)


def test_it_serves_only_where_a_lattice_is_too_coarse() -> None:
    """Recipes keep the numbers that they were calibrated to, bit for bit."""
    for rate, sigma, steps, delta in ((98_304 / 233e6, 0.45651, 6000, 0.5 / 233e6), (0.01, 1.0, 300, 1e-6)):
        events = [Event(rate, sigma, steps)]
        both = accountant._compositions(events, interval_for(events, delta))
        assert epsilon(events, delta) == accountant.larger_epsilon(both, delta)
    rate, sigma, steps, delta = TINY
    events = [Event(rate, sigma, steps)]
    both = accountant._compositions(events, interval_for(events, delta))
    assert epsilon(events, delta) < 0.65 * accountant.larger_epsilon(both, delta)


def test_the_whole_curve_is_as_close_and_kinds_of_steps_compose() -> None:
    rate, sigma, steps, delta = TINY
    events = [Event(rate, sigma, steps)]
    value = epsilon(events, delta)
    at, under = deltas_at(events, [value, 0.97 * value], delta)
    assert at <= delta * 1.01 and delta < under and delta_at(events, value) <= 1.2 * delta
    halves = [Event(rate, sigma, steps // 2), Event(rate * (1 + 1e-9), sigma, steps - steps // 2)]
    assert epsilon(halves, delta) == pytest.approx(value, rel=1e-4)


def test_steps_so_few_that_single_ones_matter_keep_a_bound() -> None:
    """A lattice's window that is too narrow for rare large losses says 0.66 here."""
    events = [Event(1e-6, 0.5, 100)]
    value, below = epsilon(events, 1e-9), epsilon_below(events, 1e-9)
    assert below is not None and below < value < 0.05


def test_a_refined_bound_is_never_below_0() -> None:
    present, _ = accountant._compositions([Event(0.01, 1.0, 1)], 1e-2)
    assert present.refined(1.0, 0.5) == 0.0


@pytest.mark.parametrize("spreads", [-4.0, -1.0, 0.0, 2.0])
def test_what_the_sum_counts_besides_delta_is_within_its_bound(spreads: float) -> None:
    """Far below the mean it is far more than 1; there a lower bound must subtract all of it."""
    sigma, steps = 300.0, 10_000
    parts = Contour.of([(cells(1.0, sigma), steps)], 1e-6)
    line = _Line(parts, 12.0, 1e6, None, 4.0)
    value = line.moments.mean + spreads * line.moments.spread
    whole = sigma / math.sqrt(steps)
    others = [
        math.exp(line.tilt * k * line.period) * _gaussian(whole, value + k * line.period - line.width / 2)
        for k in range(-8, 9) if k
    ]  # fmt: skip
    assert 0 < sum(others) <= line.aliases(value) * 1.01
    counted = line._inside(value, +1)
    assert counted - line.aliases(value) <= _gaussian(whole, value - line.width)
    if spreads < -2:
        assert line.aliases(value) > 1


def _gaussian(sigma: float, value: float) -> float:
    """delta at any epsilon, below zero as well."""
    return float(ndtr(0.5 / sigma - value * sigma) - math.exp(value) * ndtr(-0.5 / sigma - value * sigma))
