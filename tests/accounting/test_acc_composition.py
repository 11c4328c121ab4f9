"""The accountant's bounds against multiprecision, 80-bit and closed-form answers, and on other processors."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import mpmath
import numpy as np
import pytest
import scipy.fft
from dp_accounting.pld import privacy_loss_distribution as pld

from murmuration.accounting.epsilon.accountant import delta_at, deltas_at, epsilon, epsilon_below
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.epsilon.composition import (
    NEAR,
    PER_LEVEL,
    SPREADS,
    Composition,
    NotConverged,
    _shares,
    _Window,
    tilted,
)
from murmuration.accounting.epsilon.contour import Contour
from murmuration.accounting.epsilon.loss_lattice import UNIT, LossLattice, dots, lower, upper
from murmuration.accounting.epsilon.other_pairs import Group, dominating
from murmuration.accounting.event import Event

VIP = 233_000_000
# rate, sigma, steps, delta, and the epsilon that an 80-bit and a tilted transform, both written by others, found on
# dp_accounting's discretisation; its own transform gave 7.99845, 8.000067 and 3.4120 on one processor.
ACCURATE = [
    (8192 / VIP, 0.39358, 72_000, 0.5 / VIP, 8.001506),
    (98_304 / VIP, 0.45651, 6000, 0.5 / VIP, 7.999868),
    (1e-4, 0.6, 1_000_000, 1e-9, 3.4156),
]


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta", "accurate"), ACCURATE)
def test_configurations_that_drown_in_the_rounding_of_a_plain_transform(rate, sigma, steps, delta, accurate) -> None:
    value = epsilon([Event(rate, sigma, steps)], delta)
    assert accurate - 2e-6 <= value <= accurate + 2e-4


def at_40_digits(rate: float, sigma: float, low: float, high: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """What connecting the dots gives to the lower and the upper point, under Q, from exact distribution functions."""
    with mpmath.workdps(60):
        q, s, a, b = (mpmath.mpf(x) for x in (rate, sigma, low, high))

        def place(loss: mpmath.mpf) -> mpmath.mpf:
            grown = (mpmath.exp(loss) - (1 - q)) / q
            return mpmath.mpf(-40) if grown <= 0 else s * mpmath.log(grown) + 1 / (2 * s)

        x, y = place(a), place(b)
        under_q = mpmath.ncdf(y) - mpmath.ncdf(x)
        under_p = (1 - q) * under_q + q * (mpmath.ncdf(y - 1 / s) - mpmath.ncdf(x - 1 / s))
        above = (under_p - mpmath.exp(a) * under_q) / (mpmath.exp(b) - mpmath.exp(a))
        return under_q - above, above


@pytest.mark.parametrize(
    ("rate", "sigma"),
    [(8192 / VIP, 0.39358), (0.05, 0.60742), (0.82, 1.7), (0.5, 40.0), (1 - 1e-12, 0.4), (1e-7, 0.25)],
)
def test_masses_of_one_step_have_a_small_relative_error(rate: float, sigma: float) -> None:
    """Also in the far tail, where a difference of distribution functions in double precision has no digit left."""
    lattice, absent = upper(rate, sigma, 1e-4)
    count = len(lattice.masses)
    for index in sorted({1, 2, 3, *np.linspace(4, int(count * 0.9), 7).astype(int)}):
        below, here, above = ((lattice.first + index + k) * 1e-4 for k in (-1, 0, 1))
        _, from_below = at_40_digits(rate, sigma, below, here)
        from_above, _ = at_40_digits(rate, sigma, here, above)
        under_q = from_below + from_above
        if under_q < mpmath.mpf("1e-33"):
            continue  # next to what lies beyond the reach
        # A point may also be misplaced by the slack, which moves mass between neighbours by slack / interval.
        tolerance = 1e-12 + 4 * lattice.slack / 1e-4
        assert abs(lattice.masses[index] / (under_q * mpmath.exp(mpmath.mpf(here))) - 1) < tolerance
        assert abs(absent.masses[count - 1 - index] / under_q - 1) < tolerance


@pytest.mark.parametrize(("rate", "sigma"), [(0.05, 0.1), (1e-3, 1.0), (0.5, 30.0), (1.0, 0.2)])
def test_rounding_is_charged_for_the_largest_numbers_of_a_step(rate: float, sigma: float) -> None:
    """A loss is a difference of numbers up to `largest`, the log of a density is up to the square of the last output:
    each has at least half a unit of rounding in a few operations. Pairs of several records have their own."""
    top = 1 / sigma + 13
    largest = top / sigma + 0.5 / sigma**2
    for lattice in (*upper(rate, sigma, 1e-2), lower(rate, sigma, 1e-2), *dominating(Group(rate, sigma, 1), 1e-2)):
        assert 8 * UNIT * (1 + largest) <= lattice.slack < 1e-12 * (1 + largest)
        assert 8 * UNIT * (2 + top**2 + largest) <= lattice.error < 1e-12 * (1 + top**2 + largest)


def by_80_bits(lattice: LossLattice, steps: int, value: float) -> float:
    """delta(value) by a plain transform in 80-bit arithmetic, over a window that holds the whole composition."""
    points = 2**21
    masses = np.zeros(points, dtype=np.longdouble)
    np.add.at(masses, (lattice.first + np.arange(len(lattice.masses))) % points, lattice.masses.astype(np.longdouble))
    spectrum, power, left = scipy.fft.rfft(masses), None, steps
    while left:
        if left & 1:
            power = spectrum if power is None else power * spectrum
        spectrum, left = spectrum * spectrum, left >> 1
    composed = scipy.fft.irfft(power, points)
    losses = np.longdouble(lattice.interval) * (np.arange(points) - points // 2)
    composed = np.roll(composed, points // 2)
    above = losses > value
    return float((composed[above] * -np.expm1(value - losses[above])).sum())


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="no 80-bit arithmetic on this machine")
@pytest.mark.parametrize(("rate", "sigma", "steps", "delta", "accurate"), ACCURATE[:2])
def test_the_bound_lies_just_above_an_80_bit_composition(rate, sigma, steps, delta, accurate) -> None:
    lattice, _ = upper(rate, sigma, 1e-4)
    value = Composition((lattice,), (steps,)).epsilon(delta)
    assert 1 - 1e-3 <= by_80_bits(lattice, steps, value) / delta <= 1 + 1e-5
    assert delta < by_80_bits(lattice, steps, value - 1e-4)


def by_multiprecision(lattice: LossLattice, steps: int, value: float) -> mpmath.mpf:
    """delta(value) at 50 digits: a discrete Fourier transform written out, no tilt, no window smaller than the sum."""
    points = 4096

    def transform(values: list, sign: int) -> list:
        if len(values) == 1:
            return values
        even, odd = transform(values[::2], sign), transform(values[1::2], sign)
        half = len(even)
        turned = [mpmath.expjpi(sign * mpmath.mpf(k) / half) * odd[k] for k in range(half)]
        return [e + t for e, t in zip(even, turned, strict=True)] + [e - t for e, t in zip(even, turned, strict=True)]

    with mpmath.workdps(50):
        masses = [mpmath.mpc(0)] * points
        for index, mass in enumerate(lattice.masses):
            masses[(lattice.first + index) % points] += mpmath.mpf(float(mass))
        composed = transform([coefficient**steps for coefficient in transform(masses, -1)], 1)
        total = mpmath.mpf(0)
        for index in range(points // 2):
            gap = mpmath.mpf(index) * lattice.interval - value
            if gap > 0:
                total -= composed[index].real / points * mpmath.expm1(-gap)
        return total


@pytest.mark.parametrize(("steps", "delta"), [(1_000_000, 1e-9), (1_000_000, 1e-12), (3000, 1e-12), (7, 1e-5)])
def test_the_bound_lies_just_above_a_multiprecision_composition(steps: int, delta: float) -> None:
    """Rare losses of many sizes on few points: multiprecision is slow, and it is the composition that is tested."""
    sizes = np.arange(-40, 61)
    jumps = np.exp(-np.abs(sizes - 2) / 6.0)
    jumps *= min(20 / steps, 0.5) / jumps.sum()
    jumps[40] += 1 - jumps.sum()
    lattice = LossLattice(2e-2, -40, jumps)
    parts = Composition((lattice,), (steps,))
    value = parts.epsilon(delta)
    assert 0.5 < value < 20
    exact = by_multiprecision(lattice, steps, value)
    assert (1 - 1.1e-3) * delta <= exact <= delta
    below = parts.epsilon_below(delta)
    assert value - 1e-3 < below <= value and delta <= by_multiprecision(lattice, steps, below)


@pytest.mark.parametrize("skew", [0.0, 0.01])
def test_steps_that_hardly_move_their_masses_have_a_close_bound(skew: float) -> None:
    """A hundredth of the mass beside the fullest point, a million times; and a rare large loss, which sets the tilt."""
    steps, delta, jumps = 1_000_000, 1e-12, np.zeros(1341)
    jumps[[39, 41, 43]] = 0.005 * (1 - skew / 10), 0.005, 1e-4
    jumps[-1] = 0.9 * delta / steps
    jumps[40] = 1 - jumps.sum()
    lattice = LossLattice(1e-3, -40, jumps)
    parts = Composition((lattice,), (steps,))
    tilt = parts._tilt_for(delta)
    plain, wide = _Window(parts, tilt, SPREADS).epsilon(delta)
    value, errors = _Window(parts, tilt, SPREADS, NEAR).epsilon(delta)
    assert value < plain and 100 * errors < wide
    assert (1 - 1e-5) * delta <= by_multiprecision(lattice, steps, value) <= delta


@pytest.mark.parametrize(("rate", "sigma", "steps", "interval"), [(0.05, 0.8, 20, 1e-3), (1e-4, 0.6, 10_000, 1e-3)])
def test_a_transform_as_wrong_as_its_bound_allows_moves_the_masses_by_no_more_than_theirs(
    rate: float, sigma: float, steps: int, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its error lies in the coefficients that are left after so many steps. The bound is not far above that."""
    parts = Composition((upper(rate, sigma, interval)[0],), (steps,))
    tilt, plain = parts._tilt_for(1e-6), np.fft.rfft
    right = _Window(parts, tilt, SPREADS)
    product = np.abs(plain(right.masses))
    wrong = product > 0.1 * product.max()

    def worst(folded: np.ndarray) -> np.ndarray:
        allowed = PER_LEVEL * math.log2(len(folded)) * float(np.linalg.norm(folded)) * math.sqrt(len(folded))
        found = plain(folded)
        found[wrong] += 0.9 * allowed / math.sqrt(2 * wrong.sum())  # twice: the other half mirrors this one
        return found

    monkeypatch.setattr(np.fft, "rfft", worst)
    moved = float(np.linalg.norm(_Window(parts, tilt, SPREADS).masses - right.masses))
    assert 0 < moved <= right.error < 30 * moved


@pytest.mark.parametrize("points", [1400, 2000, 5000])
@pytest.mark.parametrize("slope", [-3.0, 0.0, 3.0])
def test_the_mass_outside_a_window_is_bounded_and_not_by_far_more(points: int, slope: float) -> None:
    """The least window has 4,096 points, of the 3 * `points` that three steps reach."""
    masses = np.exp(slope * np.arange(points) / points)
    lattice = LossLattice(1e-3, -points // 2, masses / masses.sum())
    window = _Window(Composition((lattice,), (3,)), 0.5, 0.1)
    assert window.points == 4096
    weights, _ = tilted(lattice.log_masses, lattice.losses, 0.5)
    exact = np.convolve(np.convolve(weights, weights), weights)
    losses = 1e-3 * (3 * lattice.first + np.arange(len(exact)))
    for side, beyond in ((1, losses > window.losses[-1] + 1e-6), (-1, losses < window.losses[0] - 1e-6)):
        there, bound = float(exact[beyond].sum()), window._log_tail(side)
        assert there <= math.exp(bound) <= max(there, 1e-12) ** 0.1
    assert exact[(losses > window.losses[-1]) | (losses < window.losses[0])].sum() <= window.outside()


def test_an_epsilon_pays_for_all_that_errors_may_have_moved() -> None:
    delta, parts = 1e-6, Composition((upper(0.05, 0.8, 1e-4)[0],), (20,))
    window = _Window(parts, parts._tilt_for(delta), SPREADS)
    value, before = window.epsilon(delta)
    moved, beyond = window._moved(*_shares(window.losses, value)), window.losses > value
    taken = window.factors[beyond] * (1 - np.exp(value - window.losses[beyond]))
    assert moved == pytest.approx(window.error * np.linalg.norm(taken), rel=1e-9, abs=0), "Cauchy and Schwarz"
    window.error *= 5e-4 * delta / moved
    larger, errors = window.epsilon(delta)
    assert window.delta(larger) <= delta < window.delta(value) and larger > value
    assert errors == pytest.approx(before + 5e-4 * delta, rel=1e-2)


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(1e-6, 1.0, 3), (1e-4, 0.6, 1_000_000)])
def test_size_and_angle_of_a_power_round_within_their_bound(rate: float, sigma: float, steps: int) -> None:
    """Powers of the coefficients that are left, against those of the same ones in 40 digits."""
    lattice = upper(rate, sigma, 1e-4)[0]
    parts = Composition((lattice,), (steps,))
    window = _Window(parts, parts._tilt_for(1e-10), SPREADS)
    powers, bound = window._spectrum()
    weights, _ = tilted(lattice.log_masses, lattice.losses, window.tilt)
    fullest = int(np.argmax(weights))
    weights[fullest] = 0.0
    folded = np.bincount((np.arange(len(weights)) - fullest) % window.points, weights, window.points)
    apart = np.fft.rfft(folded) - float(weights.sum())
    missed = mpmath.mpf(0)
    with mpmath.workdps(40):
        for k in sorted({0, 1, 2, 3, *np.linspace(4, len(apart) - 1, 60).astype(int)}):
            turn = mpmath.expjpi(mpmath.mpf(-2 * int(k) * steps * (lattice.first + fullest)) / window.points)
            missed += abs((1 + mpmath.mpc(complex(apart[k]))) ** steps * turn - mpmath.mpc(complex(powers[k]))) ** 2
    assert 0 < mpmath.sqrt(missed * 2 / window.points) <= bound


def test_coefficients_written_out_are_within_their_bound_at_every_frequency() -> None:
    chance = np.random.default_rng(5)
    weights = chance.random(9) * 10.0 ** chance.integers(-9, 0, 9)
    kept = weights.tolist()
    window = _Window(Composition((LossLattice(1e-3, -4, np.full(9, 1 / 9)),), (3,)), 1.0, SPREADS, near=6)
    found, sizes = window._beside(weights, 3)
    assert weights.tolist() == [0, 0, 0, kept[3], 0, 0, 0, 0, 0]
    with mpmath.workdps(40):
        for k in (0, 1, 2, 3, 77, 1023, 1024, window.points // 3, window.points // 2 - 1, window.points // 2):
            turns = [mpmath.mpf(-2 * k * (j - 3)) / window.points for j in range(9)]
            exact = mpmath.fsum(kept[j] * (mpmath.expjpi(turns[j]) - 1) for j in range(9) if j != 3)
            assert abs(mpmath.mpc(complex(found[k])) - exact) <= 64 * UNIT * sizes[k]
            assert sizes[k] <= 4 * sum(kept)


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [(1e-5, 0.7, 100_000, 1e-9), (1e-6, 0.7, 1_000_000, 1e-9), (1e-5, 1.0, 1_000_000, 1e-9),
     (1e-6, 0.6, 100_000_000, 1e-12), (1e-5, 0.6, 30_000, 1e-8)],
)  # fmt: skip
def test_tiny_rates_are_answered_between_the_lower_bound_and_rdp(rate, sigma, steps, delta) -> None:
    """Not closely: the lattice is coarse for steps that lose so little. Thinned, it would hide where to look."""
    events = [Event(rate, sigma, steps)]
    above, below = epsilon(events, delta), epsilon_below(events, delta)
    assert below is not None and below < above < 0.4 * epsilon(events, delta, "rdp")


def one_step_delta(rate: float, sigma: float, value: float) -> float:
    """In closed form, from the place where the likelihood ratio is exp(value)."""
    with mpmath.workdps(40):
        place = sigma * mpmath.log((mpmath.exp(value) - (1 - rate)) / rate) + mpmath.mpf(1) / (2 * sigma)
        out = mpmath.ncdf(-place)
        into = (1 - rate) * out + rate * mpmath.ncdf(1 / mpmath.mpf(sigma) - place)
        return float(into - mpmath.exp(value) * out)


@pytest.mark.parametrize(
    ("rate", "sigma", "delta"), [(0.2, 0.8, 1e-3), (0.01, 0.5, 1e-12), (1e-5, 0.35, 1e-9), (0.9, 30.0, 1e-6)]
)
def test_one_step_lies_between_both_bounds(rate: float, sigma: float, delta: float) -> None:
    above, below = epsilon([Event(rate, sigma, 1)], delta), epsilon_below([Event(rate, sigma, 1)], delta)
    assert below is not None and above - 1e-4 <= below <= above
    assert one_step_delta(rate, sigma, above) <= delta <= one_step_delta(rate, sigma, below)
    assert one_step_delta(rate, sigma, above) <= delta_at([Event(rate, sigma, 1)], above) <= delta * (1 + 1e-3)


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), [(0.01, 1.0, 300, 1e-6), (0.3, 5.0, 40, 1e-5)])
def test_where_rounding_does_not_matter_it_is_dp_accountings_answer(rate, sigma, steps, delta) -> None:
    theirs = pld.from_gaussian_mechanism(sigma, sampling_prob=rate, value_discretization_interval=1e-4)
    assert epsilon([Event(rate, sigma, steps)], delta) == pytest.approx(
        theirs.self_compose(steps).get_epsilon_for_delta(delta), abs=2e-5
    )


def test_both_neighbours_are_looked_at() -> None:
    """At small epsilon the record's absence may tell more: the larger delta counts."""
    events = [Event(0.9, 0.5, 1)]
    present, absent = (Composition((lattice,), (1,)) for lattice in upper(0.9, 0.5, 1e-4))
    both = [present.deltas([0.5])[0], absent.deltas([0.5])[0]]
    assert delta_at(events, 0.5) == pytest.approx(max(both), rel=1e-6)
    theirs = pld.from_gaussian_mechanism(0.5, sampling_prob=0.9, value_discretization_interval=1e-4)
    assert max(both) == pytest.approx(theirs.get_delta_for_epsilon(0.5), rel=1e-6)


def test_a_lattice_with_an_error_gives_a_larger_epsilon_or_none() -> None:
    exact, _ = upper(0.01, 1.0, 1e-4)
    value = Composition((exact,), (100,)).epsilon(1e-6)
    rough = LossLattice(1e-4, exact.first, exact.masses, error=1e-7, slack=1e-6)
    assert value + 1e-4 < Composition((rough,), (100,)).epsilon(1e-6) < value + 2e-4
    with pytest.raises(NotConverged):
        Composition((LossLattice(1e-4, exact.first, exact.masses, error=1e-4),), (100,)).epsilon(1e-6)


@pytest.mark.parametrize("what", ["infinite", "absolute"])
def test_what_a_step_loses_for_certain_is_added_as_often_as_the_step_is_made(what: str) -> None:
    lattice, atoms, delta, asked = upper(0.05, 0.8, 1e-3)[0], dots(0.05, 0.8)[0], 5e-3, [0.0, 2.0]
    for kind, one in ((Composition, lattice), (Contour, atoms)):
        better, worse = (kind((each,), (20,)) for each in (one, replace(one, **{what: 1e-7})))
        before, after = better.deltas(asked), worse.deltas(asked)
        assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx([20e-7] * 2, rel=1e-6)
        assert better.deltas([worse.epsilon(delta)])[0] <= delta - 0.8 * 20e-7


def test_an_answer_that_does_not_keep_its_target_is_refused() -> None:
    window = _Window(Composition((upper(0.05, 0.8, 1e-3)[0],), (20,)), 5.0, SPREADS)
    with pytest.raises(NotConverged, match="spread too far"):
        window._solve(-1e-9)


def test_deltas_that_are_asked_for_together_are_as_close_as_each_alone() -> None:
    """However far apart they lie: a window about one of them says little of a far one."""
    events, asked = [Event(0.05, 0.8, 20)], [9.0, 0.0, 5.0, 2.0, 2.1]
    assert deltas_at(events, asked, 1e-6) == pytest.approx([delta_at(events, value) for value in asked], rel=1e-4)


@pytest.mark.parametrize("outside", [0.0, 1e-4, 1e-3])
def test_a_lower_bound_pays_for_all_that_may_lie_outside_its_window(
    outside: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such mass was counted inside it. At worst all of it belongs just above the answer, where tilting it back makes
    the most of it."""
    monkeypatch.setattr(_Window, "outside", lambda _: outside)
    lattice, delta = lower(0.3, 3.0, 1e-4), 1e-3
    one = Composition((lattice,), (1,))
    value, tilt = one.epsilon_below(delta), one._tilt_for(delta)
    counted = outside * math.exp(one.moments(tilt).log_scale - tilt * value)
    above = lattice.losses > value
    there = float(lattice.masses[above] @ -np.expm1(value - lattice.losses[above]))
    assert delta + counted <= there <= (delta + 3 * counted) * (1 + 1e-6), "and hardly more"
    assert 0 < value < 1 and (not outside or counted > 1e-6)


def test_lower_bounds_are_made_of_what_the_step_dominates() -> None:
    """Its curve lies nowhere above the step's own."""
    lattice = lower(0.05, 0.8, 1e-4)
    for value in (0.0, 0.001, 0.01, 0.5, 2.0, 6.0):
        above = lattice.losses > value
        found = float(lattice.masses[above] @ -np.expm1(value - lattice.losses[above]))
        exact = one_step_delta(0.05, 0.8, value)
        assert found <= exact * (1 + 1e-10) and found >= exact * (1 - 1e-3)


# Each as the environment of a process. What a machine does not have it ignores.
PROCESSORS = {
    "avx2": {"NPY_DISABLE_CPU_FEATURES": "X86_V4", "OPENBLAS_CORETYPE": "Haswell"},
    "sse": {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4", "OPENBLAS_CORETYPE": "Nehalem"},
}
ASKED = """
import json
from murmuration.accounting.epsilon.accountant import Event, epsilon
print(json.dumps([epsilon([Event(*e)], d) for *e, d in json.loads(input())]))
"""


def on_processor(name: str, program: str, given: str) -> str:
    """Where the features have other names (older numpy), none are disabled there; the variants then differ by BLAS."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], input=given, capture_output=True, text=True, check=True,
        env={**os.environ, **PROCESSORS[name], "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("name", PROCESSORS)
def test_other_processors_agree_within_the_stated_tolerance(name: str) -> None:
    asked = [row[:4] for row in ACCURATE[:2]] + [(0.05, 0.60742, 50, 2.5e-5)]
    here = [epsilon([Event(*e)], d) for *e, d in asked]
    assert json.loads(on_processor(name, ASKED, json.dumps(asked))) == pytest.approx(here, abs=1e-10)


def test_calibrated_noise_keeps_its_budget_with_room_for_other_processors() -> None:
    sigma = calibrate_sigma(Event(0.05, 1.0, 20), 3.0, 1e-5)
    assert epsilon([Event(0.05, sigma, 20)], 1e-5) <= 3.0 * (1 - 1e-8)


@pytest.mark.parametrize(("rate", "sigma"), [(1.370628e-4, 10.0), (1.6e-4, 30.0), (0.05, 0.8), (0.5, 2.0)])
def test_both_lattices_dominate_the_step_wherever_their_first_point_lies(rate: float, sigma: float) -> None:
    """Both neighbours are told apart equally well at epsilon = 0, which is the distance in total variation."""
    exact = one_step_delta(rate, sigma, 0.0)
    for lattice in upper(rate, sigma, 1e-4):
        above = lattice.losses > 0
        assert float(lattice.masses[above] @ -np.expm1(-lattice.losses[above])) >= exact * (1 - 1e-10)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"),
    [(1e-5, 1e4, 1, 1e-6), (1e-7, 1e3, 10, 1e-6), (4.85e-5, 41.1, 1, 3.5e-4), (0.00637, 82.5, 1, 1.8e-6),
     (1e-7, 0.3, 10, 1e-6), (1.0, 1e-3, 1, 1e-9)],
)  # fmt: skip
def test_the_smallest_and_the_largest_epsilons_have_both_bounds(rate, sigma, steps, delta) -> None:
    above, below = epsilon([Event(rate, sigma, steps)], delta), epsilon_below([Event(rate, sigma, steps)], delta)
    assert below is not None and 0 <= below <= above <= below + 1e-5 + 1e-8 * above


def test_below_the_window_delta_is_one() -> None:
    assert Composition((upper(0.5, 1.0, 1e-4)[0],), (3,)).deltas([-1e6]) == [1.0]
