"""White-box pairs, and the best of all bounds: coverage, what is assumed, and the correction for choosing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import ttest_ind

from murmuration.accounting.epsilon.accountant import Event, epsilon
from murmuration.accounting.epsilon.audit_bound import correct_guesses, numbers_of_guesses
from murmuration.accounting.epsilon.audit_evidence import (
    ACCUSED,
    Claim,
    Count,
    Evidence,
    Scored,
    collect,
    least_correct,
    refuting_share,
)
from murmuration.accounting.epsilon.audit_pairs import Pairs, pairs_of

DELTA = 1e-5


def claim_of(*events: Event, delta: float = DELTA) -> Claim:
    return Claim(events, epsilon(events, delta), delta)


def gaussian_run(draw: np.random.Generator, canaries: int, steps: int, sigma: float) -> Evidence:
    included = draw.random(canaries) < 0.5
    values = included + sigma * draw.standard_normal((steps, canaries))
    return collect(values.sum(axis=0), included, pairs_of(values, np.tile(included, (steps, 1))))


@pytest.mark.parametrize("mu", [0.0, 0.5, 4.0])
def test_pairs_cover_mu_exactly_even_where_they_are_few(mu: float) -> None:
    """The limits of the noncentral t are exact, so the share above the true μ is the level itself. Fixed seed."""
    draw, level, audits = np.random.default_rng(round(10 * mu)), 0.1, 2000
    above = 0
    for _ in range(audits):
        took_part = np.arange(14) < 5
        found = pairs_of(3.0 + 2.0 * (mu * took_part + draw.standard_normal(14)), took_part)
        assert found is not None
        above += found.p_value(mu) <= level
    assert abs(above / audits - level) < 4 * math.sqrt(level * (1 - level) / audits)
    some = Pairs(5, 9, 4.0)
    assert some.p_value(some.mu_bound(level)) == pytest.approx(level, rel=1e-6)


@pytest.mark.parametrize(("there", "absent"), [(2, 2), (2, 5), (9, 3), (40, 60)])
def test_without_any_difference_pairs_are_students_test_of_scipy(there: int, absent: int) -> None:
    values = np.random.default_rng(there).standard_normal(there + absent) + 0.7 * (np.arange(there + absent) < there)
    found = pairs_of(values, np.arange(there + absent) < there)
    assert found is not None
    expected = ttest_ind(values[:there], values[there:], alternative="greater")
    assert (found.statistic, found.freedom) == (pytest.approx(expected.statistic, rel=1e-12), expected.df)
    assert found.p_value(0.0) == pytest.approx(expected.pvalue, rel=1e-9)


def test_power_of_pairs_is_the_share_of_simulated_ones() -> None:
    draw, took_part, audits = np.random.default_rng(2), np.arange(200) < 90, 2000
    seen = 0
    for _ in range(audits):
        found = pairs_of(1.5 * took_part + draw.standard_normal(200), took_part)
        assert found is not None
        seen += found.p_value(1.0) <= 0.01
    said = Pairs(90, 110, 0.0).power(1.0, 1.5, 0.01)
    assert 0.2 < said < 0.95 and abs(seen / audits - said) < 4 * math.sqrt(said * (1 - said) / audits)


def test_pairs_say_nothing_where_there_is_nothing_to_compare() -> None:
    some = np.arange(6) < 1
    assert pairs_of(np.arange(6.0), some) is None and pairs_of(np.arange(6.0), ~some) is None
    assert pairs_of(np.zeros(6), np.arange(6) < 3) is None, "no noise was seen at all"
    assert Pairs(100, 100, -3.0).mu_bound(0.05) == 0.0
    assert Pairs(100, 100, 1e6).mu_bound(0.05) > 900


def test_guesses_that_are_no_better_than_coins_prove_nothing_and_no_less() -> None:
    found = Evidence(100, 50, (Count(20, 10),), Pairs(100, 100, -0.5)).bound(claim_of(Event(1.0, 2.0, 1)))
    assert [each.epsilon for each in found.tried] == [0.0] * 4 and found.epsilon == 0


@pytest.mark.parametrize("sigma", [0.4, 2.0, 8.0])
def test_an_honest_run_is_bounded_by_its_epsilon_nearly_tightly_and_never_accused(sigma: float) -> None:
    draw = np.random.default_rng(round(10 * sigma))
    claim = claim_of(Event(1.0, sigma, 4))
    for _ in range(10):
        evidence = gaussian_run(draw, 2000, 4, sigma)
        assert evidence.looks == 5
        bound = evidence.bound(claim, 1 - 1e-4)
        assert 0 <= bound.proven.epsilon <= bound.epsilon and not bound.proven.assumes
        assert bound.epsilon <= claim.epsilon, "all but one in ten thousand; the seeds are fixed"
        assert evidence.p_value(claim) >= ACCUSED
        if sigma < 1:
            assert bound.best.method == "white-box Gaussian pairs" and bound.epsilon > 0.9 * claim.epsilon


def test_every_kind_of_bound_is_at_most_the_truth_in_its_share_of_runs_together() -> None:
    """The bounds hold together: how often any of them exceeds the truth, which a choice among them can at most do."""
    draw, audits = np.random.default_rng(8), 60
    claim = claim_of(Event(1.0, 1.0, 1))
    above = sum(gaussian_run(draw, 300, 1, 1.0).bound(claim).epsilon > claim.epsilon for _ in range(audits))
    assert above <= 0.05 * audits + 3 * math.sqrt(0.05 * 0.95 * audits)


def test_bounds_on_gaussian_scores_come_in_the_expected_order() -> None:
    claim = claim_of(Event(1.0, 1.0, 1))
    best: dict[str, float] = {}
    for bound in gaussian_run(np.random.default_rng(4), 4000, 1, 1.0).bound(claim).tried:
        best[bound.method] = max(bound.epsilon, best.get(bound.method, 0.0))
    print(f"claim {claim.epsilon:.3f}: {best}")
    assert best["one-run (ε, δ)"] < best["one-run f-DP, Gaussian"] < best["white-box Gaussian pairs"] < claim.epsilon
    assert best["one-run f-DP"] > 0


def test_a_weaker_noise_is_refuted_by_guesses_and_by_pairs() -> None:
    claim = claim_of(Event(1.0, 4.0, 4))
    weak = gaussian_run(np.random.default_rng(6), 2000, 4, 0.8)
    assert weak.p_value(claim) < ACCUSED
    assert Evidence(weak.canaries, weak.included, weak.counts).p_value(claim) < ACCUSED, "by the guesses alone"
    bound = weak.bound(claim)
    assert bound.epsilon > claim.epsilon and bound.tried[-1].assumes and bound.tried[-2].assumes


def test_for_sampled_steps_the_family_is_that_of_the_plan() -> None:
    """q = 1/2 in one step: an included canary took part in half of the runs, which no size of noise can hide."""
    draw, sigma, m = np.random.default_rng(7), 0.3, 2000
    claim = claim_of(Event(0.5, sigma, 1))
    included = draw.random(m) < 0.5
    took_part = included & (draw.random(m) < 0.5)
    values = (took_part + sigma * draw.standard_normal(m))[None]
    bound = collect(values[0], included, pairs_of(values, took_part[None])).bound(claim)
    family, pairs = bound.tried[-2:]
    assert 0 < family.epsilon <= claim.epsilon and 0.8 * claim.epsilon < pairs.epsilon <= claim.epsilon
    assert not claim.claimed_curve.sigma and claim.epsilon_at(1.0) <= claim.epsilon < claim.epsilon_at(0.9)


def test_the_best_of_several_numbers_of_guesses_still_covers() -> None:
    """Randomised response with a score that looks confident at random: every number of guesses is a fresh chance."""
    draw = np.random.default_rng(5)
    m, eps, audits = 300, 1.0, 3000
    # Its exact curve is that of (ε, 0); the events give nothing stronger here, so the point's bound decides.
    claim = Claim((Event(1.0, 1e-3, 1),), eps, 1e-12)
    choices = numbers_of_guesses(m)
    needed = [least_correct(m, r, claim, 0.05 / len(choices)) for r in choices]
    alone = [least_correct(m, r, claim, 0.05) for r in choices]
    refuted = careless = 0
    for _ in range(audits):
        included = draw.random(m) < 0.5
        answers = included ^ (draw.random(m) > 1 / (1 + math.exp(-eps)))
        order = np.argsort((2.0 * answers - 1) * draw.random(m))
        found = [correct_guesses(order, included, r) for r in choices]
        refuted += any(v >= n for v, n in zip(found, needed, strict=True))
        careless += any(v >= n for v, n in zip(found, alone, strict=True))
    assert refuted / audits <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / audits)
    assert careless / audits > 0.05, "the correction is needed"


def test_the_audits_size_has_power_and_raises_no_false_alarm() -> None:
    """2000 canaries, claim 2 at 1e-5, full batches: the defaults of launch/audit.py."""
    low, high = 0.5, 20.0  # the std of a score at exactly that claim
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon([Event(1.0, middle, 1)], DELTA) > 2.0 else (low, middle)
    claim = claim_of(Event(1.0, high, 1))

    def scored(std: float) -> Scored:
        return lambda included, draw: included + std * draw.standard_normal(len(included))

    assert refuting_share(2000, scored(0.3 * high), claim, level=0.05 / 5, audits=1000) >= 0.999
    assert refuting_share(2000, scored(0.2 * high), claim, level=ACCUSED / 5, audits=1000) >= 0.999
    assert Pairs(1000, 1000, 0.0).power(1 / high, 1 / (0.3 * high), ACCUSED / 5) > 1 - 1e-9, "where guesses do not"
    assert refuting_share(2000, scored(high), claim, level=ACCUSED / 5, audits=3000) == 0
    assert least_correct(2000, 2, claim, ACCUSED) == 3, "two guesses can be right by luck"


def test_as_many_guesses_as_are_asked_for_are_counted() -> None:
    assert collect(np.arange(10.0), np.ones(10, bool)).counts[-1] == Count(4, 2)
