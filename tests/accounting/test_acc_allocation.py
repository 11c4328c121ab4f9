"""Epochs of random allocation: the bound on their epsilon against integrals, simulation and closed forms."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import norm

from murmuration.accounting.epsilon.accountant import delta_at, deltas_at, epsilon, epsilon_below, quick_epsilon
from murmuration.accounting.epsilon.affordable import calibrate_slots
from murmuration.accounting.epsilon.allocation import _connected, _Mean, _merged, allocated, allocated_below
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.epsilon.composition import Composition
from murmuration.accounting.epsilon.gaussian import gaussian_epsilon
from murmuration.accounting.epsilon.loss_lattice import LossLattice, gaussian_dots
from murmuration.accounting.event import Event
from murmuration.accounting.sampling import RATE_DENOMINATOR, slots_for


def epochs(slots: int, sigma: float, count: int = 1) -> Event:
    return Event(1 / slots, sigma, count, slots=slots)


def losses_of(slots: int, sigma: float, count: int, samples: int, present: bool) -> np.ndarray:
    """Exact privacy losses of simulated epochs, with the record or without it."""
    random = np.random.default_rng(7)
    total = np.zeros(samples)
    for _ in range(count):
        outputs = sigma * random.standard_normal((samples, slots))
        if present:
            outputs[np.arange(samples), random.integers(slots, size=samples)] += 1
        total += np.log(np.mean(np.exp((outputs - 0.5) / sigma**2), axis=1))
    return total if present else -total


@pytest.mark.parametrize("sigma", [0.6, 1.0, 3.0])
@pytest.mark.parametrize("value", [0.0, 0.5, 2.0])
def test_an_epoch_of_two_steps_is_as_its_integral_says(sigma: float, value: float) -> None:
    """For each output of the first step, the second one's part of delta is an option price in closed form."""

    def beyond(first: float, sign: int) -> float:
        """E[(sign·(mean of both ratios - bound))+] given the first step's output, in units of its noise."""
        missing = 2 * math.exp(sign * value) - math.exp(first / sigma - 0.5 / sigma**2)
        if missing <= 0:
            return 0.5 * (1 - missing) if sign > 0 else 0.0
        at = sigma * math.log(missing) + 0.5 / sigma
        return 0.5 * sign * (ndtr(sign * (1 / sigma - at)) - missing * ndtr(-sign * at))

    found = []
    for sign in (1, -1):
        whole, error = quad(
            lambda z, sign=sign: beyond(z, sign) * norm.pdf(z), -12, 14 + 2 / sigma, limit=400, epsabs=1e-13,
            points=[sigma * math.log(2 * math.exp(sign * value)) + 0.5 / sigma],
        )  # fmt: skip
        assert error < 1e-8
        found.append(whole * math.exp(value) if sign < 0 else whole)
    exact = max(found)
    bound = delta_at([epochs(2, sigma)], value)
    assert exact <= bound <= exact * 1.002 + 1e-9
    if exact > 1e-4 and value:
        below = epsilon_below([epochs(2, sigma)], exact)
        assert below is not None and below <= epsilon([epochs(2, sigma)], exact) + 1e-12
        assert epsilon([epochs(2, sigma)], exact) == pytest.approx(value, abs=3e-3)
    if found[0] > 1e-4 and value:
        assert allocated_only_present(2, sigma, found[0]) == pytest.approx(value, abs=3e-3)


def allocated_only_present(slots: int, sigma: float, delta: float) -> float:
    return Composition((allocated_below(slots, sigma, 1e-4),), (1,)).epsilon_below(delta)


@pytest.mark.parametrize(
    ("slots", "sigma", "count"), [(2, 0.7, 1), (3, 1.2, 2), (7, 0.8, 3), (20, 0.6, 1), (64, 1.0, 4)]
)
def test_simulated_losses_agree_and_a_claim_a_tenth_lower_does_not(slots: int, sigma: float, count: int) -> None:
    delta, samples = 2e-3, 100_000
    claimed = epsilon([epochs(slots, sigma, count)], delta)
    assert claimed > 0.05
    worst = []
    for present in (True, False):
        losses = losses_of(slots, sigma, count, samples, present)

        def at(value: float, losses: np.ndarray = losses) -> tuple[float, float]:
            gains = np.maximum(0.0, -np.expm1(np.minimum(0.0, value - losses)))
            return gains.mean(), gains.std() / math.sqrt(samples)

        mean, deviation = at(claimed)
        assert mean <= delta + 4 * deviation
        mean, deviation = at(0.9 * claimed)
        worst.append(mean > delta + 4 * deviation)
    assert any(worst), "the test has no power"


def halves(interval: float, same: bool) -> tuple[_Mean, _Mean]:
    """Two distributions of a ratio, of few points that reach far."""
    random = np.random.default_rng(5)
    found = []
    for first, points in ((-9, 17), (-4, 21)):
        masses = random.random(points)
        ratios = np.exp(interval * np.arange(first, first + points))
        found.append(_Mean(first, masses, masses * ratios))
    return found[0], found[0] if same else found[1]


@pytest.mark.parametrize(("same", "share"), [(True, 0.5), (False, 0.5), (False, 1 / 3), (False, 0.1)])
@pytest.mark.parametrize("finer", [1, 2])
@pytest.mark.parametrize("interval", [0.05, 0.4])
def test_one_halving_is_the_mean_of_all_pairs_placed_one_by_one(
    same: bool, share: float, finer: int, interval: float
) -> None:
    """From above it lies between the two points beside it, with the same mass and the same measure; from below it is
    part of an outcome about as far, which has both."""
    one, two = halves(interval, same)
    fine = interval / finer
    above = defaultdict[int, float](float)
    for (x, p), (y, q) in product(enumerate(one.masses, one.first), enumerate(two.masses, two.first)):
        ratio = share * math.exp(interval * x) + (1 - share) * math.exp(interval * y)
        point = math.floor(math.log(ratio) / fine + 1e-9)
        place = max(0.0, math.expm1(math.log(ratio) - point * fine) / math.expm1(fine))
        above[point] += p * q * (1 - place)
        above[point + 1] += p * q * place
    mass = one.masses.sum() * two.masses.sum()
    measure = share * one.measure.sum() * two.masses.sum() + (1 - share) * one.masses.sum() * two.measure.sum()
    found = _connected(one, two, share, interval, finer)
    expected = [above[found.first + place] for place in range(len(found.masses))]
    assert found.masses == pytest.approx(np.array(expected), rel=1e-9, abs=1e-9)
    merged = _merged(one, two, share, interval, finer)
    for each in (found, merged):
        assert each.masses.sum() == pytest.approx(mass, rel=1e-12)
        assert each.measure.sum() == pytest.approx(measure, rel=1e-12)
    kept = merged.masses > 0
    points = fine * np.arange(merged.first, merged.first + len(merged.masses))
    assert np.abs(np.log(merged.measure[kept] / merged.masses[kept]) - points[kept]).max() < fine


@pytest.mark.parametrize(("slots", "sigma", "count"), [(2, 1.0, 5), (3, 0.5, 1), (31, 0.8, 10), (179, 0.8, 2)])
def test_upper_and_lower_bounds_are_close(slots: int, sigma: float, count: int) -> None:
    events = [epochs(slots, sigma, count)]
    below, above = epsilon_below(events, 1e-6), epsilon(events, 1e-6)
    assert below is not None and below <= above <= below * 1.003 + 1e-3 * count**0.5
    assert above * (1 - 1e-9) <= quick_epsilon(events, 1e-6) <= above * 1.02


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_a_single_step_is_the_plain_gaussian(sigma: float) -> None:
    dots = gaussian_dots(sigma, 1e-3)
    one = LossLattice(1e-3, dots.first, dots.measure, infinite=dots.lost_p, error=dots.error, slack=dots.slack)
    for delta in (1e-5, 1e-9):
        exact = gaussian_epsilon(sigma, delta)
        assert exact <= Composition((one,), (1,)).epsilon(delta) <= exact * (1 + 1e-4)
        assert epsilon([epochs(1, sigma)], delta) == exact, "an epoch of one step is that step"


@pytest.mark.parametrize(
    ("slots", "sigma", "count", "delta"), [(5, 0.98, 10, 1e-6), (10, 0.82, 10, 1e-6), (40, 1.5, 20, 1e-8)]
)
def test_it_costs_less_than_poisson_sampling_and_more_than_nothing(
    slots: int, sigma: float, count: int, delta: float
) -> None:
    found = epsilon([epochs(slots, sigma, count)], delta)
    assert found < epsilon([Event(1 / slots, sigma, slots * count)], delta)
    assert epsilon([epochs(slots + 1, sigma, count)], delta) < found < epsilon([epochs(slots, sigma, count + 1)], delta)
    assert found < epsilon([Event(1.0, sigma, count)], delta), "less than if everybody knew the step"


def test_there_is_noise_for_which_poisson_sampling_would_be_cheaper_and_is_not_charged() -> None:
    """Little noise and delta not small: a Poisson sample may leave the record out altogether."""
    allocation, poisson = [epochs(2, 0.3)], [Event(0.5, 0.3, 2)]
    assert delta_at(allocation, 0.5) > 1.2 * delta_at(poisson, 0.5)


def test_dp_cap_at_a_given_sigma() -> None:
    """n = 233,804,767, T = 5708, so 32 epochs of 179 steps: 1.7 % less noise than Poisson's 0.70711."""
    n = 233_804_767
    assert epsilon([epochs(179, 0.69498, 32)], 1 / n) <= 8 < epsilon([epochs(179, 0.69490, 32)], 1 / n)


def test_calibrated_noise_is_the_least_that_fits() -> None:
    """Mehta et al. at a batch of 2^17: 10 epochs of 10 steps, where Poisson sampling needs 0.9."""
    sigma = calibrate_sigma(Event(0.1, 1.0, 10, slots=10), 10.0, 1e-6)
    assert 0.82 < sigma < 0.83
    assert epsilon([epochs(10, sigma, 10)], 1e-6) <= 10 < epsilon([epochs(10, sigma - 1e-5, 10)], 1e-6)


@pytest.mark.parametrize("target", [0.92, 1.7, 1.72, 2.7, 5.0])
def test_the_fewest_steps_of_an_epoch_are_those_that_keep_the_budget_and_can_be_made(target: float) -> None:
    """With epochs of 2 or 4 of 5 steps, a record would take part 2.5 or 1.25 times."""
    spent = {slots: epsilon([epochs(slots, 2.0, -(-5 // slots))], 1e-5) for slots in (1, 3, 5)}
    found = calibrate_slots(1000, 2.0, 5, target, 1e-5)
    assert found == next(slots for slots, value in spent.items() if value <= target)
    assert found == slots_for(1000, 1000 / found, 5)


def test_epochs_compose_with_poisson_samples() -> None:
    poisson, allocation = Event(0.01, 0.8, 500), epochs(25, 0.9, 4)
    alone = [epsilon([each], 1e-6) for each in (poisson, allocation)]
    together = epsilon([poisson, allocation], 1e-6)
    assert max(alone) < together < sum(alone)
    curve = deltas_at([poisson, allocation], [0.5, 1.0, together], 1e-6)
    assert curve == sorted(curve, reverse=True) and curve[-1] <= 1.001e-6


def test_the_unequal_chances_of_the_lanes_are_paid_for() -> None:
    """Lane x belongs to step floor(x·t / 2^32), so the steps' chances are not all equal."""
    for slots in (2, 3, 179, 100_003):
        walls = [-(-each * 2**32 // slots) for each in range(slots + 1)]
        chances = np.diff(walls) / RATE_DENOMINATOR
        worst = np.abs(np.log(chances * slots)).max()
        if slots < 1000:
            assert allocated(slots, 1.0, 2e-2)[0].slack >= worst
        assert -math.log1p(-slots / RATE_DENOMINATOR) >= worst
