"""What an audit makes of the numbers it saw: turns, scores and checks of draws, each by a slow loop; what it says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from murmuration.accounting.banded import best_banded
from murmuration.accounting.epsilon.audit_evidence import AuditBound, Bound
from murmuration.accounting.epsilon.trade_off import of_events
from murmuration.accounting.event import Event
from murmuration.accounting.noise import IndependentNoise
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import CyclicPoisson, Poisson, RandomAllocation
from murmuration.data.draw.samplers import AllocationSampler
from murmuration.train.audit.audit import scores
from murmuration.train.audit.checks import Check, check_allocation, check_noise
from murmuration.train.audit.result import AuditReport
from murmuration.train.audit.turns import Group, SeenSegment, Turn, noise_in, pairs_in, turns_of
from tests.support.acc_world import PLAN

BANDS, GAIN, EARLIER = 4, 2.5, 10


def plan_of(bands: int = 1, slots: int = 1, steps: int = 12) -> PrivacyPlan:
    noise = IndependentNoise() if bands == 1 else best_banded(bands, 40)
    sampling = Poisson(2**31) if bands == 1 else CyclicPoisson(2**31, bands)
    sampling = sampling if slots == 1 else RandomAllocation(slots)
    return PrivacyPlan(6000, sampling, 1.0, 1.0, steps, 1e-5, 1.0, noise=noise)


def blocks(first: int, last: int, canaries: int, draw: np.random.Generator) -> tuple[SeenSegment, np.ndarray]:
    """A segment of correlated noise, made step by step, and the draws in it."""
    matrix, numbers = best_banded(BANDS, 40), EARLIER + np.arange(canaries)
    draws = {step: draw.standard_normal(canaries) for step in range(first, last + 1)}
    values, part = [], []
    for step in range(first, last + 1):
        mine = (numbers % BANDS == step % BANDS) & (draw.random(canaries) < 0.5)
        noise = sum(weight * draws[at] for at, weight in matrix.weights(step, first))
        values.append(noise + GAIN * mine)
        part.append(mine)
    return SeenSegment(first, np.array(values), np.array(part)), np.array(list(draws.values()))


@pytest.mark.parametrize("first", [1, 3, 4])
def test_a_turn_is_seen_as_a_step_of_independent_noise(first: int) -> None:
    """Whatever a canary added in its turn is there whole, and what is left is the noise of one draw; also where a
    segment begins within a block."""
    canaries = 20_000
    segment, draws = blocks(first, 12, canaries, np.random.default_rng(7))
    plan, numbers = plan_of(BANDS), EARLIER + np.arange(canaries)
    groups = turns_of([segment], plan, numbers)
    assert sorted(np.concatenate([group.which for group in groups]).tolist()) == list(range(canaries))
    for group in groups:
        place = (numbers[group.which[0]] - 1) % BANDS
        steps = [step for step in range(first, 13) if (step - 1) % BANDS == place]
        assert len(group.turns) == len(steps)
        for step, turn in zip(steps, group.turns, strict=True):
            assert np.array_equal(turn.took_part, segment.took_part[step - first, group.which])
            left = (turn.values - GAIN * turn.took_part)[0]
            error = (2 * left.size) ** -0.5
            assert abs(left.mean()) < 5 * 2**0.5 * error and abs(left.std() - 1) < 5 * error + 1e-3
        left = np.array([(turn.values - GAIN * turn.took_part)[0] for turn in group.turns])
        assert np.abs(np.corrcoef(left) - np.eye(len(left))).max() < 5.5 * left.shape[1] ** -0.5
    assert np.allclose(noise_in([segment], plan, GAIN), draws)
    other = noise_in([SeenSegment(first + 1, segment.values, segment.took_part)], plan, GAIN)
    assert not np.allclose(other, draws, atol=0.1), "the place in the block matters"


def test_an_epoch_that_a_segment_has_in_part_may_have_had_the_canary_in_the_other_part() -> None:
    plan = plan_of(slots=4)
    whole, part = (
        SeenSegment(1, np.ones((8, 3)), np.eye(8, 3) > 0),
        SeenSegment(7, np.ones((2, 3)), np.zeros((2, 3)) > 0),
    )
    (group,) = turns_of([whole, part], plan, np.arange(3))
    assert [turn.values.shape for turn in group.turns] == [(4, 3), (4, 3), (2, 3)]
    assert [turn.took_part.tolist() for turn in group.turns] == [[True] * 3, [False] * 3, [False] * 3]
    assert group.turns[0].chances.tolist() == [0.25] * 4 and np.array_equal(group.turns[0].patterns, np.eye(4))
    assert group.turns[2].chances.tolist() == [0.25, 0.25, 0.5]
    assert group.turns[2].patterns.tolist() == [[1, 0], [0, 1], [0, 0]]
    found = pairs_in([Group(group.which, tuple(group.turns[i] for i in (0, 2)))])
    assert found is None, "of the whole epoch alone, in which all took part"


def loop_score(values: np.ndarray, turns: list[Turn], gain: float, covariance: np.ndarray) -> float:
    """log of the mean of likelihood ratios, pattern by pattern, by SciPy's densities."""
    places, total = [()], 0.0
    for turn in turns:
        places = [(*place, each) for place in places for each in range(len(turn.chances))]
    without = multivariate_normal(np.zeros(len(values)), covariance).pdf(values)  # pyright: ignore[reportArgumentType]
    for place in places:
        moved = np.concatenate([turn.patterns[each] for turn, each in zip(turns, place, strict=True)])
        chance = prod(turn.chances[each] for turn, each in zip(turns, place, strict=True))
        density = multivariate_normal(gain * moved, covariance).pdf(values)  # pyright: ignore[reportArgumentType]
        total += chance * density / without
    return float(np.log(total))


def test_a_score_is_the_log_of_the_mean_likelihood_ratio() -> None:
    draw, noise, gain = np.random.default_rng(3), 0.7, 0.9
    half = np.array([[0.0], [1.0]]), np.array([0.75, 0.25])
    epoch = np.eye(3), np.full(3, 1 / 3)
    turns = [
        Turn(draw.normal(size=(len(patterns[0]), 5)), np.zeros(5, bool), patterns, chances)
        for patterns, chances in (half, epoch, half)
    ]
    together = scores([Group(np.arange(5), tuple(turns))], 6, gain, noise)
    for canary in range(5):
        values = np.concatenate([turn.values[:, canary] for turn in turns])
        assert together[canary] == pytest.approx(loop_score(values, turns, gain, noise**2 * np.eye(5)))
    assert together[5] == 0, "a canary without turns shows nothing"
    many = scores([Group(np.arange(5), tuple(turns) * 5)], 5, gain, noise)  # too many patterns: each turn by itself
    assert np.allclose(many, 5 * together[:5])


def test_the_noise_of_a_score_is_measured() -> None:
    """Two turns with the same draw: among many canaries their difference is known to have no noise."""
    canaries, gain, draw = 4000, 0.5, np.random.default_rng(5)
    included, patterns, chances = draw.random(canaries) < 0.5, np.array([[0.0], [1.0]]), np.array([0.5, 0.5])
    part = (draw.random((2, canaries)) < 0.5) & included
    values = draw.standard_normal(canaries) + gain * part
    turns = tuple(Turn(values[i : i + 1], part[i], patterns, chances) for i in (0, 1))
    found = scores([Group(np.arange(canaries), turns)], canaries, gain, 1.0)
    once = part[0] != part[1]
    assert found[once].min() > found[~once].max() + 1
    assert included[np.argsort(found)[-once.sum() :]].all()
    own = turns[1].values[:, draw.permutation(canaries)]  # as if its draw were another one
    shuffled = (turns[0], Turn(own, part[1], patterns, chances))
    apart = scores([Group(np.arange(canaries), shuffled)], canaries, gain, 1.0)
    assert apart[once].min() < apart[~once].max()


@pytest.mark.parametrize(("slots", "sigma"), [(2, 1.0), (5, 0.6)])
def test_the_best_guess_about_an_epoch_is_as_good_as_its_claim_allows_and_no_better(slots: int, sigma: float) -> None:
    """The share of right guesses, with even odds and the score's sign for an answer, against the accountant's limit."""
    trials, draw = 400_000, np.random.default_rng(11)
    included = draw.random(trials) < 0.5
    group = Group(
        np.arange(trials), (Turn(np.zeros((slots, trials)), included, np.eye(slots), np.full(slots, 1 / slots)),)
    )
    found = scores([group.simulated(included, 1.0, sigma, draw)], trials, 1.0, sigma)
    right = float(np.mean((found > 0) == included))
    limit = of_events([Event(1 / slots, sigma, 1, slots=slots)], 1e-10).best_guess()
    assert limit - 0.01 < right < limit + 5 * 0.5 / trials**0.5
    twice = group.simulated(included, 2.0, sigma, draw)  # as if the record took part with twice its gradient
    assert np.mean((scores([twice], trials, 1.0, sigma) > 0) == included) > limit + 0.05


# Who is drawn.

RECORDS, SLOTS, EPOCHS = 3000, 7, 4  # with an even number, sums of two steps would show as much as differences


def allocated(number: int, epochs: int = EPOCHS) -> list[np.ndarray]:
    sampler = AllocationSampler(number.to_bytes(32, "big"), bytes(32), RECORDS, SLOTS)
    return [sampler.draw(step).ids for step in range(1, epochs * SLOTS + 1)]


def test_our_allocation_passes_and_p_values_are_honest() -> None:
    found = [check_allocation(allocated(number), RECORDS, SLOTS) for number in range(150)]
    assert all(each.passed for each in found) and set(found[0].p_values) > {"sizes"}
    for name in found[0].p_values:
        low = np.mean([each.p_values[name] < 0.1 for each in found])
        assert 0.02 < low < 0.2, (name, low)


def _twice(draws: list[np.ndarray]) -> None:
    draws[3] = np.sort(np.append(draws[3], draws[1][0]))


def _never(draws: list[np.ndarray]) -> None:
    draws[2] = draws[2][1:]


def _exchanged(draws: list[np.ndarray]) -> None:
    """As many records in all, but one of them takes the place of another."""
    draws[2] = np.sort(np.append(draws[2][1:], draws[3][0]))


def _one_order(draws: list[np.ndarray]) -> None:
    draws[SLOTS:] = draws[:SLOTS] * (EPOCHS - 1)


def _shifted(draws: list[np.ndarray]) -> None:
    """The next step in each epoch."""
    for epoch in range(1, EPOCHS):
        draws[epoch * SLOTS : (epoch + 1) * SLOTS] = [draws[(step - epoch) % SLOTS] for step in range(SLOTS)]


def _first_steps_preferred(draws: list[np.ndarray]) -> None:
    for epoch in range(EPOCHS):
        first, last = epoch * SLOTS, (epoch + 1) * SLOTS - 1
        draws[first], draws[last] = np.sort(np.append(draws[first], draws[last][:150])), draws[last][150:]


FAULTS = [_twice, _never, _exchanged, _one_order, _shifted, _first_steps_preferred]


@pytest.mark.parametrize("fault", FAULTS)
def test_another_allocation_is_told_from_it(fault: Callable[[list[np.ndarray]], None]) -> None:
    draws = allocated(1)
    fault(draws)
    assert not check_allocation(draws, RECORDS, SLOTS).passed


# Draws of noise.


def test_independent_draws_pass_and_p_values_are_no_less_than_they_should_be() -> None:
    draw = np.random.default_rng(2)
    found = np.array([check_noise(draw.standard_normal((6, 40))).p_value for _ in range(400)])
    assert 0.04 < np.mean(found < 0.1) < 0.14
    assert check_noise(draw.standard_normal((1, 40))).passed and check_noise(draw.standard_normal((9, 2))).passed


def test_a_draw_that_a_second_segment_has_from_the_first_is_found() -> None:
    draw, canaries = np.random.default_rng(4), 2000
    plan = plan_of(BANDS)
    (first, draws), (second, own) = (blocks(begin, 12, canaries, draw) for begin in (1, 7))
    assert check_noise(noise_in([first, second], plan, GAIN)).passed
    again = SeenSegment(7, first.values[6:], first.took_part[6:])
    assert not check_noise(noise_in([first, again], plan, GAIN)).passed, "the same noise"
    # The steps before it in its block leave draws in its noise, under the keys of the first segment.
    matrix, late = best_banded(BANDS, 40), second.values.copy()
    for place, step in enumerate(range(7, 9)):
        late[place] += sum(weight * draws[at - 1] for at, weight in matrix.weights(step) if at < 7)
    carried = SeenSegment(7, late, second.took_part)
    assert not check_noise(noise_in([first, carried], plan, GAIN)).passed, "draws of the block that it begins in"
    assert len(own) == 6


def test_one_draw_for_two_steps_of_a_segment_is_found() -> None:
    draws = np.random.default_rng(6).standard_normal((5, 500))
    assert check_noise(draws).passed
    for one, two in pairwise(range(5)):
        shared = draws.copy()
        shared[two] = 0.9 * shared[two] + 0.4 * shared[one]
        assert not check_noise(shared).passed


def report(p_value: float) -> AuditReport:
    tried = (Bound("one-run (ε, δ)", 2.99996, guesses=100, correct=99), Bound("pairs", 3.99996, "it is Gaussian"))
    bound = AuditBound(200, 100, 1e-5, 0.95, 3, tried)
    fine = Check({"all": 0.5})
    return AuditReport(
        "private", "gradient", 2.00001, bound, p_value, PLAN, "DeepSpeed", 2, None, 20.0, fine, fine, fine,
        {0.3: 1.0, 0.9: 0.1},
    )  # fmt: skip


def test_bounds_are_rounded_away_from_a_refutation_and_name_their_confidence() -> None:
    (told,) = report(1e-9).refuted
    assert told == "epsilon is at least 3.999 with 95% confidence, and 2.0001 is claimed (p = 1e-09 for the claim)"
    text = report(0.5).as_text()
    assert "ε ≤ 2.0001 at δ = 1e-05" in text and "ε ≥ 2.999 (" in text and "ε ≥ 3.999 (" in text
    assert "of 200 such audits, simulated, 100.0% detect noise of 0.3·σ, 10.0%" in text
    assert "each accuses an honest run at most once in a million" in text
