"""The audit's lower bound: against enumeration, against mechanisms whose epsilon is known, and its coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom

from murmuration.accounting.epsilon.audit_bound import epsilon_bound, p_value

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
