"""Groups of records and replaced records, against closed forms, another package, simulation and brute force."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import brentq
from scipy.stats import norm

from murmuration.accounting.epsilon import other_pairs
from murmuration.accounting.epsilon.accountant import epsilon, gaussian_epsilon
from murmuration.accounting.epsilon.composition import Composition
from murmuration.accounting.epsilon.loss_lattice import LossLattice, upper
from murmuration.accounting.epsilon.neighbours import group_epsilon, replacement_epsilon
from murmuration.accounting.epsilon.other_pairs import Group, Replacement, cells, dominating
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event

ONE_STEP = [Event(1.0, 0.6529, 1)]
DPCAP = Event(24077779 / 2**32, 0.70711, 5708)


def test_full_batches_are_a_gaussian_that_moves_further() -> None:
    assert epsilon(ONE_STEP, 1e-6) == pytest.approx(8.0005, abs=1e-4)
    assert group_epsilon(ONE_STEP, 1e-6, 2) == pytest.approx(18.651, abs=1e-3)  # and not 16
    assert group_epsilon(ONE_STEP, 1e-6, 10) == pytest.approx(189.2, abs=0.05)  # and not 80
    for sigma, steps in ((0.6529, 1), (5.0, 7)):
        events, alone = [Event(1.0, sigma, steps)], sigma / math.sqrt(steps)
        assert replacement_epsilon(events, 1e-6) == pytest.approx(gaussian_epsilon(alone / 2, 1e-6))
        assert group_epsilon(events, 1e-6, 3) == pytest.approx(gaussian_epsilon(alone / 3, 1e-6))


@pytest.mark.parametrize(("pair", "moved"), [(Group(1.0, 2.0, 3), 3), (Replacement(1.0, 2.0), 2)])
def test_the_lattices_of_full_batches_give_the_closed_form_too(pair, moved) -> None:
    for lattice in dominating(pair, 2e-4):
        value = Composition((lattice,), (5,)).epsilon(1e-6)
        exact = gaussian_epsilon(2.0 / math.sqrt(5) / moved, 1e-6)
        assert exact <= value <= exact + 1e-3


@pytest.mark.parametrize(
    ("event", "delta"), [(DPCAP, 1 / 233_800_000), (Event(0.05, 0.60742, 50), 2.5e-5), (Event(0.9, 3.0, 4), 1e-6)]
)
def test_a_group_of_one_is_the_usual_pair(event: Event, delta: float) -> None:
    usual, single = upper(event.rate, event.sigma, 1e-4), dominating(Group(event.rate, event.sigma, 1), 1e-4)
    for one, other in zip(usual, single, strict=True):
        assert one.first == other.first and len(one.masses) == len(other.masses)
        assert np.abs(one.masses - other.masses).max() < 1e-11
        here, there = (Composition((x,), (event.count,)).epsilon(delta) for x in (one, other))
        assert here == pytest.approx(there, abs=1e-8)
    assert group_epsilon([event], delta, 1) == epsilon([event], delta)


def test_shipped_recipes_are_not_k_times_their_epsilon() -> None:
    """Against the numbers that an independent reviewer found with dp_accounting's mixtures."""
    large, delta = [DPCAP], 1 / 233_800_000
    assert group_epsilon(large, delta, 2) == pytest.approx(16.715, abs=0.01)
    assert group_epsilon(large, delta, 3) == pytest.approx(26.21, abs=0.02)
    assert replacement_epsilon(large, delta) == pytest.approx(10.37, abs=0.01)
    assert group_epsilon(large, delta, 2) > 2 * epsilon(large, delta)


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta", "size"),
    [(0.3, 1.5, 6, 1e-5, 2), (0.05, 0.8, 20, 1e-5, 3), (0.8184538, 1.70266, 12, 7.8e-7, 2), (0.01, 1.0, 50, 1e-6, 5)],
)
def test_groups_agree_with_another_package(rate, sigma, steps, delta, size) -> None:
    shares = [math.comb(size, j) * rate**j * (1 - rate) ** (size - j) for j in range(size + 1)]
    theirs = pld.from_mixture_gaussian_mechanism(
        sigma, list(range(size + 1)), shares, value_discretization_interval=2e-3
    ).self_compose(steps)
    ours = group_epsilon([Event(rate, sigma, steps)], delta, size)
    assert ours == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=2e-3)


def simulated(pair: Group | Replacement, steps: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Composed losses as they come from drawing and noising: log dP/dQ under P, and log dQ/dP under Q."""
    draw, shift = np.random.default_rng(seed), 1 / pair.sigma
    totals = np.zeros((2, count))
    for _ in range(steps):
        if isinstance(pair, Group):
            moved = draw.binomial(pair.size, pair.rate, count) * shift, np.zeros(count)
            weights = [math.comb(pair.size, j) * pair.rate**j * (1 - pair.rate) ** (pair.size - j)
                       for j in range(pair.size + 1)]  # fmt: skip
        else:
            moved = (draw.random(count) < pair.rate) * shift, (draw.random(count) < pair.rate) * -shift
            weights = [1 - pair.rate, pair.rate]
        for side, each in enumerate(moved):
            z = each + draw.standard_normal(count)
            p = sum(w * norm.pdf(z - j * shift) for j, w in enumerate(weights))
            q = norm.pdf(z) if isinstance(pair, Group) else sum(
                w * norm.pdf(z + j * shift) for j, w in enumerate(weights)
            )  # fmt: skip
            totals[side] += np.log(p / q) * (1 - 2 * side)
    return totals[0], totals[1]


@pytest.mark.parametrize(
    "pair", [Group(0.2, 1.0, 3), Group(0.5, 2.0, 10), Replacement(0.2, 1.0), Replacement(0.7, 2.0)]
)
def test_no_simulated_attack_passes_the_bound_and_the_best_one_nearly_reaches_it(pair) -> None:
    steps, count, value = 6, 400_000, 1.5
    lattices = dominating(pair, 4e-4)
    for losses, lattice in zip(simulated(pair, steps, count, seed=7), lattices, strict=True):
        gained = np.maximum(0.0, -np.expm1(value - losses))
        found, noise = gained.mean(), gained.std() / math.sqrt(count)
        (bound,) = Composition((lattice,), (steps,)).deltas([value])
        assert found - 5 * noise <= bound <= found + 5 * noise + 1e-4


def exact_delta(pair: Group | Replacement, side: int, value: float) -> float:
    """Delta of one step. The losses grow with the output, so both measures are needed beyond one place only."""
    shift, shares = 1 / pair.sigma, [1 - pair.rate, pair.rate]
    if isinstance(pair, Group):
        shares = [math.comb(pair.size, j) * pair.rate**j * (1 - pair.rate) ** (pair.size - j)
                  for j in range(pair.size + 1)]  # fmt: skip
    moves = [(j * shift, 0.0 if isinstance(pair, Group) else -j * shift) for j in range(len(shares))]

    def mix(measure: int, of: Callable[[float], float]) -> float:
        return sum(share * of(move[measure]) for share, move in zip(shares, moves, strict=True))

    def loss(z: float) -> float:
        return math.log(mix(0, lambda m: norm.pdf(z - m)) / mix(1, lambda m: norm.pdf(z - m)))

    wanted, top = -value if side else value, 8 + moves[-1][0]
    if not loss(-8) < wanted < loss(top):
        return max(0.0, 1 - math.exp(value))
    z = brentq(lambda z: loss(z) - wanted, -8, top, xtol=1e-13)
    tail = norm.cdf if side else norm.sf
    beyond = [mix(measure, lambda m: tail(z - m)) for measure in (0, 1)]
    return beyond[side] - math.exp(value) * beyond[1 - side]


def bound(lattice: LossLattice, value: float) -> float:
    above = lattice.losses > value
    return float(lattice.masses[above] @ -np.expm1(value - lattice.losses[above])) + lattice.infinite


ONE_STEP_PAIRS = [Group(0.1, 0.8, 2), Group(0.9, 1.5, 4), Replacement(0.1, 0.8), Replacement(1e-4, 0.5)]


@pytest.mark.parametrize("pair", ONE_STEP_PAIRS, ids=str)
@pytest.mark.parametrize("value", [-0.3, 0.0, 0.4, 2.0])
def test_one_step_is_bounded_closely_from_above_in_both_directions(pair, value: float) -> None:
    for side, lattice in enumerate(dominating(pair, 1e-4)):
        exact = exact_delta(pair, side, value)
        assert exact * (1 - 1e-10) - 1e-14 <= bound(lattice, value) <= exact + 1e-7 + 1e-4 * exact


@pytest.mark.parametrize("pair", ONE_STEP_PAIRS, ids=str)
@pytest.mark.parametrize("interval", [1e-3, 0.03, 0.7])
def test_what_lies_beyond_the_reach_only_adds(pair, interval: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followed for two standard deviations alone, so that the tails are masses that can be seen."""
    monkeypatch.setattr(other_pairs, "REACH", 2.0)
    for side, lattice in enumerate(dominating.__wrapped__(pair, interval)):
        # Both measures are whole: nothing was lost on the way.
        assert lattice.masses.sum() + lattice.infinite == pytest.approx(1.0, abs=1e-3 if interval < 0.1 else 1.0)
        assert lattice.masses.sum() + lattice.infinite >= 1 - 1e-9
        for value in (-1.0, -0.3, -0.01, 0.0, 0.01, 0.4, 2.0):
            assert exact_delta(pair, side, value) * (1 - 1e-10) - 1e-14 <= bound(lattice, value)


def test_walls_that_were_not_found_are_no_lattice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_pairs, "NEWTON", 1)
    with pytest.raises(AccountingError, match="losses are too steep; use more noise"):
        dominating.__wrapped__(Group(0.1, 0.8, 2), 1e-3)


def hockey_stick_in_the_plane(p: list, q: list, alpha: float) -> float:
    """∫ (P - αQ)₊ of two mixtures of unit Gaussians in two dimensions, on a grid."""
    axis = np.arange(-9.0, 9.0, 0.04)
    x, y = np.meshgrid(axis, axis)

    def density(parts: list) -> np.ndarray:
        return sum(w * np.exp(-0.5 * ((x - a) ** 2 + (y - b) ** 2)) for w, (a, b) in parts) / (2 * math.pi)

    return float(np.maximum(0.0, density(p) - alpha * density(q)).sum()) * 0.04**2


@pytest.mark.parametrize("seed", range(6))
def test_no_gradients_in_the_plane_are_worse_than_those_on_the_line(seed: int) -> None:
    draw, sigma, rate = np.random.default_rng(seed), 0.7, 0.3

    def gradient() -> tuple[float, float]:
        angle, length = draw.uniform(0, 2 * math.pi), 1 if draw.random() < 0.5 else math.sqrt(draw.random())
        return length / sigma * math.cos(angle), length / sigma * math.sin(angle)

    def replaced(x: tuple, y: tuple) -> tuple[list, list]:
        return [(1 - rate, (0, 0)), (rate, x)], [(1 - rate, (0, 0)), (rate, y)]

    def grouped(x: tuple, y: tuple) -> tuple[list, list]:
        both = (x[0] + y[0], x[1] + y[1])
        parts = [((1 - rate) ** 2, (0, 0)), (rate * (1 - rate), x), (rate * (1 - rate), y), (rate**2, both)]
        return parts, [(1.0, (0, 0))]

    some = gradient(), gradient()
    line, end = (1 / sigma, 0.0), (-1 / sigma, 0.0)
    for found, worst in ((replaced(*some), replaced(line, end)), (grouped(*some), grouped(line, line))):
        for alpha in (0.5, 1.0, 1.7, 4.0):
            for turn in (1, -1):
                here, there = (hockey_stick_in_the_plane(*pair[::turn], alpha) for pair in (found, worst))
                assert here <= there + 1e-9


def test_masses_that_leave_the_range_of_doubles_are_kept_or_charged() -> None:
    """Ten records at little noise have losses in the hundreds, and densities whose exponentials under- or overflow."""
    pair = Group(3.5e-5, 0.3, 10)
    for lattice in dominating(pair, 4e-3):
        assert np.isfinite(lattice.masses).all() and (lattice.masses >= 0).all()
        assert lattice.masses.sum() + lattice.infinite == pytest.approx(1.0, abs=1e-9)
    assert len(pair.log_shares) < 10 and dominating(pair, 4e-3)[0].infinite >= other_pairs.UNSEEN
    assert group_epsilon([Event(3.5e-5, 0.3, 100)], 1e-9, 10) > group_epsilon([Event(3.5e-5, 0.3, 100)], 1e-9, 2)


def test_more_records_cost_more_and_phases_add_up() -> None:
    events = [Event(0.05, 1.0, 30), Event(1.0, 30.0, 5)]
    found = [group_epsilon(events, 1e-5, k) for k in (1, 2, 5, 40)]
    assert found == sorted(found) and found[0] < found[1]
    assert found[0] < replacement_epsilon(events, 1e-5) <= found[1] + 1e-6
    assert replacement_epsilon(events[:1], 1e-5) < replacement_epsilon(events, 1e-5)


@pytest.mark.parametrize("pair", [Group(0.5, 2.0, 10), Group(0.2, 1.0, 3), Replacement(0.2, 1.0)])
def test_the_cells_of_a_lattice_are_known_before_it_is_made(pair: Group | Replacement) -> None:
    """A lattice with too many is made coarser, for which they have to be counted right."""
    found = len(dominating(pair, 2e-3)[0].masses)
    assert cells(pair, 2e-3) == pytest.approx(found * (pair.most if isinstance(pair, Group) else 1), rel=0.01)
