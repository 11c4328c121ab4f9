"""The audit's lower bound: against enumeration, against mechanisms whose epsilon is known, and its coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.special import ndtr
from scipy.stats import binom, ttest_ind

from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.epsilon.audit_bound import correct_guesses, epsilon_bound, numbers_of_guesses, p_value
from murmuration.accounting.epsilon.audit_curve import curve_p_value, is_refuted
from murmuration.accounting.epsilon.audit_evidence import (
    ACCUSED,
    AuditBound,
    Bound,
    Claim,
    Count,
    Evidence,
    Scored,
    collect,
    least_correct,
    refuting_share,
)
from murmuration.accounting.epsilon.audit_pairs import Pairs, pairs_of
from murmuration.accounting.epsilon.gaussian import gaussian_epsilon
from murmuration.accounting.epsilon.trade_off import TradeOff, of_events, of_point
from murmuration.accounting.event import Event

ACCURACY = {eps: math.exp(eps) / (1 + math.exp(eps)) for eps in (0.0, 0.5, 1.0, 2.0, 4.0)}


@pytest.mark.parametrize("eps", ACCURACY)
def test_without_delta_it_is_the_tail_of_randomised_response_enumerated(eps: float) -> None:
    m, right = 7, ACCURACY[eps]
    for v in range(m + 1):
        tail = sum(
            math.prod(right if hit else 1 - right for hit in hits)
            for hits in itertools.product((0, 1), repeat=m)
            if sum(hits) >= v
        )
        assert p_value(m, m, v, eps, 0.0) == pytest.approx(min(1, tail), abs=1e-12)


def test_the_delta_term_is_the_papers_spelled_out() -> None:
    for m, r, v, eps, delta in [(50, 20, 18, 1.0, 1e-3), (1000, 100, 95, 2.0, 1e-5), (9, 9, 9, 0.0, 1e-2)]:
        right = 1 / (1 + math.exp(-eps))
        mass = [math.comb(r, k) * right**k * (1 - right) ** (r - k) for k in range(r + 1)]
        alpha = max(sum(mass[v - i : v]) * 2 / i for i in range(1, v + 1))
        assert p_value(m, r, v, eps, delta) == pytest.approx(sum(mass[v:]) + alpha * m * delta, rel=1e-9)


@pytest.mark.parametrize("delta", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("eps", [0.0, 1.0, 2.0])
def test_no_mechanism_of_that_epsilon_and_delta_beats_the_p_value(eps: float, delta: float) -> None:
    """The worst that delta can do: tell one coin, each coin, or all coins at once, on top of randomised response."""
    m = r = 40
    right = 1 / (1 + math.exp(-eps))
    each = delta + (1 - delta) * right
    for v in range(r + 1):
        honest = float(binom.sf(v - 1, r, right))
        p = p_value(m, r, v, eps, delta) + 1e-12
        assert delta + (1 - delta) * honest <= p  # all coins at once, with probability delta
        assert binom.sf(v - 1, r, each) <= p  # each coin, with probability delta


def test_more_right_guesses_refute_more_and_delta_confidence_and_canaries_cost() -> None:
    bounds = [epsilon_bound(1000, 200, v, 1e-5) for v in range(0, 201, 4)]
    assert bounds == sorted(bounds) and bounds[0] == 0 and bounds[-1] > 3.5
    v = 190
    assert epsilon_bound(1000, 200, v, 0.0) > epsilon_bound(1000, 200, v, 1e-6) > epsilon_bound(1000, 200, v, 1e-4)
    assert epsilon_bound(1000, 200, v, 1e-5, 0.9) > epsilon_bound(1000, 200, v, 1e-5, 0.99)
    assert epsilon_bound(1000, 200, v, 1e-4) > epsilon_bound(4000, 200, v, 1e-4)
    assert epsilon_bound(1000, 200, 200, 0.4) == 0, "a delta that explains everything refutes nothing"
    assert p_value(1000, 200, 200, 1.0, 0.4) == 1.0, "and no bound on a probability is more than 1"


def test_where_it_refutes_the_p_value_grows_with_epsilon() -> None:
    """Bisection needs that: no larger epsilon is refuted where a smaller one is not."""
    for m, r, delta in [(40, 20, 1e-3), (2000, 100, 1e-5), (2000, 800, 1e-5), (2000, 400, 1e-4)]:
        for v in range(r // 2, r + 1, max(1, r // 40)):
            refuted = [p_value(m, r, v, eps, delta) <= 0.05 for eps in np.linspace(0, 8, 161)]
            assert refuted == sorted(refuted, reverse=True), (m, r, v, delta)


def test_the_bound_is_where_the_p_value_crosses() -> None:
    for v in (60, 80, 95, 100):
        bound = epsilon_bound(500, 100, v, 1e-5)
        assert p_value(500, 100, v, bound, 1e-5) <= 0.05 or bound == 0
        assert p_value(500, 100, v, bound + 1e-6, 1e-5) > 0.05


@pytest.mark.parametrize("eps", [0.25, 1.0, 2.0])
def test_it_covers_randomised_response_at_its_exact_epsilon_and_is_nearly_tight(eps: float) -> None:
    draw = np.random.default_rng(round(100 * eps))
    m, audits = 500, 4000
    correct = draw.binomial(m, 1 / (1 + math.exp(-eps)), size=audits)
    bounds = {v: epsilon_bound(m, m, int(v), 0.0) for v in np.unique(correct)}
    above = np.mean([bounds[v] > eps for v in correct])
    assert 0.03 < above < 0.05 + 3 * math.sqrt(0.05 * 0.95 / audits)


# The tail of right guesses under a trade-off curve: against linear programs, and mechanisms whose curve is known.


def gaussian(mu: float) -> TradeOff:
    return TradeOff((0.0,), (0.0,), 1 / mu)


def largest_tail(canaries: int, guesses: int, correct: int, curve: TradeOff) -> float:
    """Over all distributions of the number of right guesses that satisfy every line of the module's inequality."""
    number = np.arange(guesses + 1)
    rows, limits = [], []
    for i in range(1, guesses + 1):
        right = np.where(number >= i, number, 0) / canaries
        wrong = np.where(number >= i - 1, guesses - number, 0) / canaries
        for at, delta in zip(curve.epsilons, curve.deltas, strict=True):
            rows += [right - math.exp(at) * wrong, math.exp(at) * right - wrong]
            limits += [delta, math.exp(at) - 1 + delta]
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


# White-box pairs, and the best of all bounds: coverage, what is assumed, and the correction for choosing.


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
    family, pairs = bound.tried[-2:]
    assert min(family.epsilon, pairs.epsilon) > claim.epsilon and family.assumes and pairs.assumes


def test_of_equal_bounds_the_one_that_assumes_nothing_is_the_best() -> None:
    tried = Bound("by all", 1.0, "noise"), Bound("by none", 1.0), Bound("by all again", 1.0, "noise")
    assert AuditBound(100, 50, DELTA, 0.95, 1, tried).best.method == "by none"


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
