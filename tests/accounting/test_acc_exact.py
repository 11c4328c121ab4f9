"""Exact noise in the books: what its grid costs, what a ledger must say of it, and that a Gaussian stands for it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.special import ndtr

from murmuration.accounting.certificate.attached import CertificateError
from murmuration.accounting.certificate.pages import html_page
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.statement import DEVIATIONS, EXACT_MECHANISM, MECHANISM
from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.epsilon.accountant import delta_at, epsilon
from murmuration.accounting.epsilon.calibrate import calibrate_sigma, enlarged
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.metrics import PlannedMetric
from murmuration.accounting.noise import GRID_GROWTH, ExactGrid, fits_grid
from tests.support.acc_world import (
    GRID,
    KEY,
    PLAN,
    Change,
    begin,
    certified,
    document_of,
    facts,
    on,
    rewritten,
    whole_run,
)

EXACT_PLAN = replace(PLAN, noise=ExactGrid(), steps=3)
OF_A_LOSS = replace(EXACT_PLAN, metrics=(PlannedMetric("loss", 2.0, 40.0),))


def exact_run(folder: Path) -> Journal:
    return whole_run(folder, plan=EXACT_PLAN)


OF_THE_TRAINER = {"known_deviations": ["of the trainer"]}


# The ledger and what is said of it.


def test_a_run_of_exact_noise_is_charged_for_its_grid_and_verified(tmp_path: Path) -> None:
    document = certified(exact_run(tmp_path), OF_THE_TRAINER)
    verdict = verify(tmp_path)
    charged = Event(1.0, 20.0 / (1 + 1e-6), 3)
    assert verdict.epsilon == document["claim"]["epsilon"] == epsilon([charged], EXACT_PLAN.delta)
    assert verdict.epsilon > epsilon([Event(1.0, 20.0, 3)], EXACT_PLAN.delta)
    (phase,) = document["phases"]
    assert phase["plan"]["noise"] == {"kind": "exact", "growth": 1e-6}
    assert [(event["sigma"], event["count"]) for event in phase["events"]] == [(charged.sigma, 3)]
    assert document["mechanism"] == EXACT_MECHANISM != MECHANISM
    assert History.read(tmp_path / "ledger.jsonl")[0].charged() == [charged]


def test_floating_point_is_a_deviation_unless_all_noise_was_exact(tmp_path: Path) -> None:
    exact, plain = (certified(made, OF_THE_TRAINER) for made in _both(tmp_path))
    assert DEVIATIONS[0] not in exact["known_deviations"] and DEVIATIONS[1] in exact["known_deviations"]
    assert set(DEVIATIONS) <= set(plain["known_deviations"]) and plain["mechanism"] == MECHANISM
    assert "known deviations are listed below" in html_page(exact)
    assert "floating point and further deviations are listed below" in html_page(plain)
    assert not any("floating-point" in text for text in exact["known_deviations"])


def _both(folder: Path) -> list[Journal]:
    return [exact_run(folder / "exact"), whole_run(folder / "plain")]


def test_steps_of_a_lost_part_may_have_had_any_noise(tmp_path: Path) -> None:
    journal = exact_run(tmp_path)
    journal.history.lost = list(journal.history.charges())
    document = document_of(journal)
    assert DEVIATIONS[0] in document["known_deviations"] and document["mechanism"] == MECHANISM
    journal.ledger.close()


def test_ledgers_without_a_grid_are_written_as_they_were() -> None:
    assert "grid" not in json.dumps(facts(1).as_dict()) and "grid" not in json.dumps(PLAN.as_dict())
    assert facts(1, EXACT_PLAN).as_dict()["noise"]["grid"] == GRID


# What is refused; test_acc_journal.py has steps that are not as their plan says.


def test_metrics_are_charged_with_the_gradient_and_the_grid(tmp_path: Path) -> None:
    journal = begin(tmp_path, OF_A_LOSS)
    journal.open_step(0, 1, facts(1, OF_A_LOSS))
    together = (20.0**-2 + 20.0**-2) ** -0.5 / (1 + 1e-6)
    assert journal.history.charged() == [Event(1.0, OF_A_LOSS.effective_noise_multiplier, 1)]
    assert OF_A_LOSS.effective_noise_multiplier == pytest.approx(together, rel=1e-14)
    journal.ledger.close()


def test_another_grid_than_announced_puts_a_step_outside_any_accounting() -> None:
    honest, finer = facts(1, OF_A_LOSS), facts(1, OF_A_LOSS, grid=GRID / 2)
    assert honest.fault_of(honest) is None
    for other in (replace(honest, noise=finer.noise), replace(honest, metrics=finer.metrics)):
        assert "another grid" in (honest.fault_of(other) or "")


FORGED: dict[str, Change] = {
    "the plan charges nothing": on("plan", {"plan": lambda plan: {k: v for k, v in plan.items() if k != "noise"}}),
    "the plan charges less": on("plan", {"plan.noise.growth": 1e-8}),
    "the plan charges more than there is": on("plan", {"plan.noise.growth": 0.5}),
    "another grid at the commit": on("commit", {"facts.noise.grid": 2.0**-10}),
}


@pytest.mark.parametrize("what", FORGED)
def test_verify_refuses_a_forged_ledger(tmp_path: Path, what: str) -> None:
    exact_run(tmp_path).ledger.close()
    assert verify(tmp_path).epsilon > 0
    rewritten(tmp_path, FORGED[what])
    with pytest.raises((LedgerError, CertificateError)):
        verify(tmp_path)


def test_a_certificate_that_calls_other_noise_exact_is_refused(tmp_path: Path) -> None:
    exact, plain = (certified(made, OF_THE_TRAINER) for made in _both(tmp_path))
    for change in (
        {"known_deviations": exact["known_deviations"]},
        {"mechanism": exact["mechanism"]},
        {"phases": [{**plain["phases"][0], "plan": exact["phases"][0]["plan"]}]},
    ):
        (tmp_path / "plain" / "certificate.json").write_text(json.dumps(signed(plain | change, KEY)))
        with pytest.raises(CertificateError):
            verify(tmp_path / "plain")


def test_calibration_pays_for_the_grid() -> None:
    sigma = calibrate_sigma(Event(0.01, 1.0, 100), 2.0, 1e-5)
    more = enlarged(sigma, GRID_GROWTH)
    assert sigma == enlarged(sigma, 0.0) and sigma <= more / (1 + GRID_GROWTH) and more < sigma * (1 + 1e-6) + 1.1e-5
    assert epsilon([Event(0.01, more / (1 + GRID_GROWTH), 100)], 1e-5) <= 2.0
    assert EXACT_PLAN.noise.in_a_dry_run(5.0, 3) == ["noise         exact; charged as 0.999999·sigma for its grid"]


# A Gaussian stands for it: sums over whole numbers against what the accountants say.


def rounded_masses(deviation: float, centre: int, reach: int) -> np.ndarray:
    """P([centre + Y] = k), |k| ≤ reach, each from the tail that loses no digits."""
    upper = (np.arange(-reach, reach + 1) - centre + 0.5) / deviation
    lower = (np.arange(-reach, reach + 1) - centre - 0.5) / deviation
    return np.where(lower > 0, ndtr(-lower) - ndtr(-upper), ndtr(upper) - ndtr(lower))


# Deviation in steps of the grid, and by how many steps a record moves the rounded sum in one or two elements.
CASES = [(0.3, (1,)), (0.7, (1,)), (1.0, (3,)), (2.0, (5,)), (6.0, (4,)), (40.0, (37,)), (1.5, (1, 2)), (8.0, (3, 7))]
RATES = [0.01, 0.3, 1.0]
IN_CORE = CASES[2], CASES[5], CASES[6]


def pair(deviation: float, shift: tuple[int, ...], rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Masses of a step without the record, and of one in which it may take part."""
    reach = math.ceil(12 * deviation) + max(shift) + 3
    without, present = np.ones(1), np.ones(1)
    for each in shift:
        without = np.multiply.outer(without, rounded_masses(deviation, 0, reach)).ravel()
        present = np.multiply.outer(present, rounded_masses(deviation, each, reach)).ravel()
    return without, (1 - rate) * without + rate * present


@pytest.mark.rest
@pytest.mark.parametrize(
    ("deviation", "shift", "rate"),
    [
        pytest.param(*case, rate, marks=() if case in IN_CORE and rate == 0.3 else pytest.mark.rest)
        for case, rate in product(CASES, RATES)
    ],
)
def test_no_delta_of_the_rounded_noise_exceeds_the_gaussians(
    deviation: float, shift: tuple[int, ...], rate: float
) -> None:
    without, mixed = pair(deviation, shift, rate)
    sigma = deviation / math.sqrt(sum(each**2 for each in shift))
    for asked in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0):
        promised = delta_at([Event(rate, sigma, 1)], asked)
        for one, other in ((mixed, without), (without, mixed)):
            assert np.maximum(one - math.exp(asked) * other, 0).sum() <= promised + 1e-13


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("deviation", "shift"), CASES)
def test_no_renyi_divergence_of_it_exceeds_dp_accountings(
    deviation: float, shift: tuple[int, ...], rate: float
) -> None:
    without, mixed = pair(deviation, shift, rate)
    sigma = deviation / math.sqrt(sum(each**2 for each in shift))
    orders = [2, 3, 8, 32]
    accountant = RdpAccountant(orders)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)))
    both = (without > 1e-280) & (mixed > 1e-280)
    for order, promised in zip(orders, accountant._rdp, strict=True):
        for one, other in ((mixed, without), (without, mixed)):
            logs = order * np.log(one[both]) + (1 - order) * np.log(other[both])
            assert np.logaddexp.reduce(logs) / (order - 1) <= promised * (1 + 1e-9) + 1e-12


def test_the_comparison_would_see_a_sigma_that_is_too_large() -> None:
    """On a fine grid the two are nearly the same: three percent more noise than there is are seen."""
    without, mixed = pair(40.0, (37,), 1.0)
    promised = delta_at([Event(1.0, 1.03 * 40 / 37, 1)], 1.0)
    assert np.maximum(mixed - math.e * without, 0).sum() > promised


def test_a_grid_fits_or_does_not() -> None:
    assert fits_grid(2.0**-10, 4, 2.0**-9) and not fits_grid(2.0**-10, 5, 2.0**-9)
    assert not any(fits_grid(grid, 1, 1.0) for grid in (0.0, -1.0, 0.3, math.inf, math.nan))
