"""What it costs to publish the best of several runs, against the theorem's own formula."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from murmuration.accounting.epsilon import tuning
from murmuration.accounting.epsilon.accountant import describe, epsilon
from murmuration.accounting.epsilon.gaussian import gaussian_delta, gaussian_epsilon
from murmuration.accounting.epsilon.tuning import Declared, Tuning, parameter, selected_epsilon
from murmuration.accounting.event import Event
from tests.accounting.test_acc_cli import answer, here
from tests.support.acc_world import CONFIG, DATA, PLAN, begin, document_of, train

SIGMA, STEPS, DELTA = 8.0, 4, 1e-6


def by_the_theorem(mean: float, shape: float) -> float:
    """Papernot and Steinke (2022), theorems 2 and 6, for a Gaussian, whose RDP is order / 2 sigma^2."""
    orders = np.exp(np.linspace(math.log(1.01), math.log(2000), 1500))
    rdp = orders * STEPS / (2 * SIGMA**2)
    if math.isinf(shape):  # a Poisson number of runs: one run is (log(1 + 1 / (order - 1)), delta)-private
        least = np.log1p(1 / (orders - 1))
        tuned = rdp + mean * np.array([_delta(orders, rdp, each) for each in least]) + math.log(mean) / (orders - 1)
    else:  # gamma: the parameter of the truncated negative binomial law whose mean is `mean`
        gamma = 1 / mean if shape == 1 else _logarithmic(mean)
        other = np.min((1 + shape) * ((1 - 1 / orders) * rdp + math.log(1 / gamma) / orders))
        tuned = rdp + other + math.log(mean) / (orders - 1)
    # By Canonne, Kamath and Steinke.
    return float(np.min(tuned + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1)))


def _logarithmic(mean: float) -> float:
    """(1 / gamma - 1) / log(1 / gamma) falls in gamma."""
    low, high = 1e-12, 1 - 1e-12
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (1 / middle - 1) / math.log(1 / middle) > mean else (low, middle)
    return high


def _delta(orders: np.ndarray, rdp: np.ndarray, epsilon: float) -> float:
    """By the same conversion as below, solved for delta."""
    return math.exp(min(0.0, np.min((orders - 1) * (rdp - epsilon + np.log1p(-1 / orders)) - np.log(orders))))


@pytest.mark.parametrize(("mean", "shape"), [(3.0, 1.0), (20.0, 1.0), (20.0, 0.0), (20.0, math.inf)])
def test_a_drawn_number_of_runs_costs_what_the_theorem_says(mean: float, shape: float) -> None:
    found = Tuning(mean, shape).epsilon([Event(1.0, SIGMA, STEPS)], DELTA)
    by_deltas = selected_epsilon([Event(1.0, SIGMA, STEPS)], DELTA, mean, shape)
    assert found == pytest.approx(min(by_the_theorem(mean, shape), by_deltas), rel=0.01)
    assert found > epsilon([Event(1.0, SIGMA, STEPS)], DELTA)


ORDERS = {
    "larger": lambda y: y, "smaller": lambda y: -y, "far": lambda y: abs(y - 0.5), "near": lambda y: -abs(y),
    "worst: those that the other has more often, then the rarest": lambda y: np.where(y > 2.5, 99, -y),
}  # fmt: skip


def exact_delta(sigma: float, mean: float, shape: float, order: str, claimed: float) -> float:
    """Delta if the first in the order of K draws from N(0, sigma^2) is published, against N(1, sigma^2), on a grid."""
    y = np.linspace(-9 * sigma, 1 + 9 * sigma, 400_001)
    ranked = np.argsort(ORDERS[order](y), kind="stable")
    chances = np.stack([norm.pdf(y, place, sigma) for place in (0.0, 1.0)])[:, ranked]
    chances /= chances.sum(axis=1, keepdims=True)
    below = np.cumsum(chances, axis=1)
    last = np.concatenate([np.zeros((2, 1)), below[:, :-1]], axis=1)

    def generating(x: np.ndarray) -> np.ndarray:
        if math.isinf(shape):
            return np.exp(mean * (x - 1))
        g = parameter(mean, shape)
        if shape == 0:
            return np.log1p(-(1 - g) * x) / math.log(g)
        return ((1 - (1 - g) * x) ** -shape - 1) / (g**-shape - 1)

    best = generating(np.minimum(below, 1.0)) - generating(np.minimum(last, 1.0))
    return max(float(np.maximum(p - math.exp(claimed) * q, 0).sum()) for p, q in (best, best[::-1]))


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize(("mean", "shape"), [(10.0, 1.0), (10.0, 0.0), (4.0, 2.5), (3.0, math.inf)])
def test_no_order_of_outcomes_has_more_than_the_bound_by_deltas(mean: float, shape: float, order: str) -> None:
    sigma, delta = 2.0, 1e-4
    claimed = selected_epsilon([Event(1.0, sigma, 1)], delta, mean, shape)
    assert 0 < exact_delta(sigma, mean, shape, order, claimed) <= delta


def test_the_bound_by_deltas_is_near_what_the_worst_order_needs() -> None:
    """Without a fifth of what is added to one run, some order has more than delta: the tests above have power."""
    sigma, delta, mean = 2.0, 1e-4, 10.0
    one, claimed = epsilon([Event(1.0, sigma, 1)], delta), selected_epsilon([Event(1.0, sigma, 1)], delta, mean, 1.0)
    assert max(exact_delta(sigma, mean, 1.0, order, one + (claimed - one) * 0.8) for order in ORDERS) > delta


@pytest.mark.parametrize("room", [tuning.ROOM, 0.1])
@pytest.mark.parametrize(("mean", "shape"), [(10.0, 1.0), (30.0, 0.0), (4.0, 2.5), (1.5, 0.5), (3.0, math.inf)])
def test_the_bound_by_deltas_is_the_documents_formula_for_one_gaussian(
    mean: float, shape: float, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And keeps room for the rounding of g, and of what is compared with delta."""
    monkeypatch.setattr(tuning, "ROOM", room)
    sigma = SIGMA / math.sqrt(STEPS)
    if math.isinf(shape):
        added = mean * gaussian_delta(sigma, 0.0)
    else:
        g, kept = parameter(mean, shape) * (1 - room), 1 - room
        added = (shape + 1) * brentq(lambda x: gaussian_delta(sigma, x) - kept * math.expm1(x) * g / (1 - g), 0, 50)
    found = selected_epsilon([Event(1.0, SIGMA, STEPS)], DELTA, mean, shape)
    exact = gaussian_epsilon(sigma, DELTA / mean) + added
    assert exact * (1 - 1e-10) <= found <= exact * (1 + 1e-7)


@pytest.mark.parametrize(("mean", "shape"), [(1.5, 1.0), (10.0, 1.0), (100.0, 0.0), (3.0, 2.5)])
def test_the_parameter_has_the_mean(mean: float, shape: float) -> None:
    g, k = parameter(mean, shape), np.arange(1, 200_001, dtype=float)
    log_chances = k * math.log1p(-g) + np.cumsum(np.log((k - 1 + shape + (k == 1) * (shape == 0)) / k))
    chances = np.exp(log_chances - log_chances.max())
    assert (chances * k).sum() / chances.sum() == pytest.approx(mean, rel=1e-6)


def test_the_smaller_of_both_bounds_is_charged() -> None:
    events = [Event(0.01, 1.0, 200)]
    assert Tuning(10).epsilon(events, 1e-6) == selected_epsilon(events, 1e-6, 10, 1.0)
    many = Tuning(1000.0, math.inf)
    assert many.epsilon(events, 1e-6) < selected_epsilon(events, 1e-6, 1000.0, math.inf)
    assert Tuning(1).epsilon(events, 1e-6) == epsilon(events, 1e-6)


def test_a_fixed_list_costs_all_of_its_runs_whatever_their_steps_were() -> None:
    events = [Event(0.01, 2.0, 5), Event(0.02, 1.5, 7)]
    assert Tuning(3, fixed=True).epsilon(events, 1e-6) == epsilon(events * 3, 1e-6)


@pytest.mark.parametrize("tuning", [Tuning(4, math.inf), Tuning(3, 1.0, True), Tuning(2.5, 0.0)])
def test_written_and_read_again(tuning: Tuning) -> None:
    written = tuning.as_dict()
    assert Tuning.from_dict(written) == tuning
    assert written["shape"] == ("poisson" if math.isinf(tuning.shape) else tuning.shape)
    declared = Declared("rates", tuning)
    assert Declared.from_dict(declared.as_dict()) == declared
    assert Declared.from_dict(Declared("rates by hand").as_dict()) == Declared("rates by hand")


@pytest.mark.parametrize(
    ("words", "tuning"),
    [
        ("10", Tuning(10)),
        ("10,0", Tuning(10, 0.0)),
        ("10,poisson", Tuning(10, math.inf)),
        ("3,fixed", Tuning(3, fixed=True)),
    ],
)
def test_the_command_prices_the_best_of_some_runs(words: str, tuning: Tuning) -> None:
    found = answer(f"epsilon --n 1000 --batch 1000 --steps 4 --sigma 8 --delta 1e-6 --best-of {words}")
    assert found["epsilon_best_of"] == tuning.epsilon([Event(1.0, SIGMA, STEPS)], DELTA)


@pytest.mark.parametrize("words", ["ten", "10,wide", "0.5", "2.5,fixed"])
def test_the_command_refuses_runs_that_mean_nothing(words: str) -> None:
    done = here(f"epsilon --n 1000 --batch 1000 --steps 4 --sigma 8 --best-of {words}")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("tuning", [Tuning(10), Tuning(10, fixed=True)])
def test_runs_that_may_have_used_their_whole_budget_in_a_new_segment_are_charged_as_if_they_had(
    tmp_path: Path, tuning: Tuning
) -> None:
    """Four steps were planned and made, of the many that the budget has room for."""
    plan = replace(PLAN, steps=4, epsilon_budget=4.0, delta=1e-5)
    journal = begin(tmp_path, plan)
    journal.declare_tuning(Declared("the best of several", tuning))
    train(journal, range(1, 4), plan)
    journal.begin_segment(0, f"{CONFIG}, changed", DATA, 2, "after a look at the weights")
    train(journal, range(3, 5), plan)
    journal.finish()
    claimed = document_of(journal)["claim"]["epsilon_claimed"]
    steps = 1
    while epsilon([Event(1.0, 20.0, steps + 1)], 1e-5) <= 4.0:
        steps += 1
    of_all = tuning.epsilon([Event(1.0, 20.0, steps)], 1e-5)
    assert of_all <= claimed < 1.02 * of_all and claimed > 1.4 * 4.0


def test_a_run_that_ended_early_is_charged_for_what_was_planned(tmp_path: Path) -> None:
    journal = begin(tmp_path, replace(PLAN, epsilon_budget=1.5))
    journal.declare_tuning(Declared("the best of several", Tuning(10)))
    train(journal, range(1, 4))
    journal.finish()
    claimed = document_of(journal)["claim"]["epsilon_claimed"]
    assert claimed == pytest.approx(Tuning(10).epsilon([Event(1.0, 20.0, PLAN.steps)], PLAN.delta), abs=1e-4)


def test_nothing_is_claimed_for_the_best_of_several_with_a_plan_made_after_private_steps(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.declare_tuning(Declared("the best of several", Tuning(3, fixed=True)))
    train(journal, range(1, PLAN.steps + 1))
    assert journal.history.why_not_private() is None
    journal.declare_plan(1, "another", PLAN, describe("pld"))
    said = journal.history.why_not_private()
    assert said is not None and "another was declared after private steps" in said
    assert document_of(journal)["claim"]["private"] is False


@pytest.mark.parametrize(("mean", "shape"), [(1e12, 1.0), (2.0, 1e-6), (2.0, 1e4), (2.0, 0.0)])
def test_the_last_numbers_of_runs_that_have_a_bound_by_deltas_have_one(mean: float, shape: float) -> None:
    events = [Event(1.0, SIGMA, STEPS)]
    assert epsilon(events, DELTA / mean) < selected_epsilon(events, DELTA, mean, shape) < 1e3
