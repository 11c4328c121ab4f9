"""Correlated noise: its matrix, what it releases of one record, and what a ledger charges for it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from murmuration.accounting.banded import BandedNoise, best_banded
from murmuration.accounting.certificate.pages import write
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.epsilon.accountant import delta_at, epsilon
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.epsilon.gaussian import gaussian_epsilon
from murmuration.accounting.errors import PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import BudgetSpent, LedgerError
from murmuration.accounting.ledger.facts import Charge, Head, StepId
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.lines import NAMED
from murmuration.accounting.noise import ExactGrid
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import CyclicPoisson, threshold_for
from tests.support import acc_world
from tests.support.acc_world import CONFIG, DATA, KEY, begin, certified, facts, rewritten, train

BANDS = 4
MATRIX = best_banded(BANDS, 40)
PLAN = replace(acc_world.PLAN, records=101, sampling=CyclicPoisson(2**32, BANDS), noise=MATRIX)
SIZES = [(2, 2), (2, 100), (3, 10), (8, 64), (16, 6000), (64, 640)]


def whole(matrix: BandedNoise, steps: int) -> np.ndarray:
    """The steps x steps matrix that turns all draws into all noise."""
    found = np.zeros((steps, steps))
    for step in range(1, steps + 1):
        for at, weight in matrix.weights(step):
            found[step - 1, at - 1] = weight
    return found


@pytest.mark.parametrize(("bands", "steps"), SIZES)
def test_one_record_moves_its_column_by_one_at_most_and_no_other_part_of_the_release(bands: int, steps: int) -> None:
    matrix = best_banded(bands, steps)
    steps = min(steps, 3 * bands + 1)  # the last block is cut
    released = np.linalg.inv(whole(matrix, steps))
    assert np.allclose(released, np.tril(released)) and np.allclose(np.tril(released, -bands), 0), "b-banded"
    norms = np.linalg.norm(released, axis=0)
    assert norms.max() <= matrix.sensitivity <= 1 and norms[:bands].min() > 1 - 1e-4, "no noise is wasted"
    for part in range(bands):  # a record of one part moves only columns of its own turns, which share no row
        columns = np.abs(released[:, part::bands]) > 1e-9
        assert (columns.sum(axis=1) <= 1).all()


@pytest.mark.parametrize("first", [2, 3, 4, 6])
def test_a_segment_that_begins_in_a_block_uses_its_own_draws_and_moves_no_further(first: int) -> None:
    """Leaving earlier draws out of B leaves the lower right part of B, whose inverse is that part of the inverse."""
    steps = range(first, 3 * BANDS + 1)
    noise = np.zeros((len(steps), len(steps)))
    for step in steps:
        weights = dict(MATRIX.weights(step, first))
        assert min(weights) >= first
        assert MATRIX.spread(step, first) == pytest.approx(math.sqrt(sum(w * w for w in weights.values())), rel=1e-14)
        for at, weight in weights.items():
            noise[step - first, at - first] = weight
    assert np.linalg.norm(np.linalg.inv(noise), axis=0).max() <= 1


def test_the_noise_of_each_step_of_a_first_segment_has_the_deviation_of_its_whole_row() -> None:
    spreads = [MATRIX.spread(step) for step in range(1, 2 * BANDS + 1)]
    assert spreads == pytest.approx(2 * np.linalg.norm(MATRIX.whole, axis=1).tolist(), rel=1e-14)
    assert MATRIX.typical_spread == pytest.approx(np.linalg.norm(MATRIX.whole) / math.sqrt(BANDS), rel=1e-14)


@pytest.mark.parametrize(("bands", "steps"), [(2, 7), (3, 10), (8, 64), (16, 100)])
def test_accumulated_noise_is_that_of_all_prefix_sums(bands: int, steps: int) -> None:
    matrix = best_banded(bands, steps)
    prefix = np.tril(np.ones((steps, steps))) @ whole(matrix, steps)
    assert matrix.accumulated(steps) == pytest.approx(math.sqrt(np.square(prefix).sum() / steps), rel=1e-9)
    assert matrix.accumulated(steps) < math.sqrt((steps + 1) / 2)
    independent = math.sqrt(np.square(np.tril(np.ones((steps, steps)))).sum() / steps)
    assert f"adding up to {matrix.accumulated(steps) / independent:.3f} of" in matrix.in_a_dry_run(1.0, steps)[0]


@pytest.mark.parametrize(("bands", "blocks"), [(2, 20), (3, 5), (5, 12)])
def test_no_other_matrix_of_this_form_adds_up_to_less(bands: int, blocks: int) -> None:
    from scipy.optimize import minimize

    steps, places = bands * blocks, np.tril_indices(bands)

    def added_up(entries: np.ndarray) -> float:
        released = np.zeros((bands, bands))
        released[places] = entries
        noise = np.kron(np.eye(blocks), np.linalg.inv(released / np.linalg.norm(released, axis=0)))
        return math.sqrt(np.square(np.cumsum(noise, axis=0)).sum() / steps)

    begin_at = np.eye(bands)[places] + 0.3
    least = min(minimize(added_up, begin_at, method=how, options={"maxiter": 4000}).fun for how in ("BFGS", "Powell"))
    assert best_banded(bands, steps).accumulated(steps) == pytest.approx(least, rel=1e-4)


@pytest.mark.parametrize(("bands", "steps"), [(4, 1000), (8, 1000)])
def test_overlapping_bands_add_up_to_little_less_than_blocks(bands: int, steps: int) -> None:
    """The best banded Toeplitz matrix, found by its coefficients, against the best block."""
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    impulse = np.eye(1, steps)[0]

    def added_up(coefficients: np.ndarray) -> float:
        column = np.append(1.0, coefficients)
        prefix = np.cumsum(lfilter([1.0], column / np.linalg.norm(column), impulse))
        with np.errstate(over="ignore", invalid="ignore"):
            found = np.cumsum(prefix**2).mean()
        return 0.5 * math.log(found) if np.isfinite(found) else 1e3

    roots = np.cumprod([(2 * j - 1) / (2 * j) for j in range(1, bands)])  # of the square root of 1 / (1 - x)
    least = math.exp(minimize(added_up, roots, method="L-BFGS-B").fun)
    ratio = best_banded(bands, steps).accumulated(steps) / least
    assert 1.0 < ratio < 1.06 and best_banded(bands, steps).accumulated(steps) < math.exp(added_up(roots))


def test_a_shorter_horizon_has_less_noise_per_step_and_more_that_adds_up() -> None:
    short, long = best_banded(8, 64), best_banded(8, 4000)
    assert short.typical_spread < long.typical_spread and short.accumulated(4000) > long.accumulated(4000)


def test_the_likelihood_ratio_of_a_block_is_that_of_one_sampled_step() -> None:
    """Monte Carlo of the whole block's output under adversarial gradients, for a record in each of its places."""
    bands, rate, sigma, at, count = 4, 0.2, 0.7, 1.0, 400_000
    matrix = best_banded(bands, 400)
    released, draw = np.linalg.inv(whole(matrix, bands)), np.random.default_rng(5)
    claimed = delta_at([Event(rate, sigma, 1)], at)
    for place in range(bands):
        moved = released[:, place]  # the record's gradient has the full norm
        output = sigma * draw.standard_normal((count, bands)) + (draw.random(count) < rate)[:, None] * moved
        inside = np.exp((output @ moved - moved @ moved / 2) / sigma**2)
        loss = np.log1p(rate * (inside - 1))
        excess = np.maximum(0.0, -np.expm1(at - loss))
        error = 4 * excess.std() / math.sqrt(count)
        assert claimed - error - 2e-3 * claimed < excess.mean() < claimed + error


@pytest.mark.parametrize(("n", "batch", "steps", "bands"), [(50_000, 500, 400, 8), (50_000, 3000, 130, 16)])
def test_epsilon_is_dp_accountings_for_one_sampled_step_per_turn(n: int, batch: int, steps: int, bands: int) -> None:
    rate, turns = threshold_for(n, batch, bands) / 2**32, math.ceil(steps / bands)
    assert rate == pytest.approx(bands * batch / n, rel=1e-6)
    sigma = calibrate_sigma(Event(rate, 1.0, turns), 4.0, 1e-6)
    plan = PrivacyPlan(
        n,
        CyclicPoisson(threshold_for(n, batch, bands), bands),
        1.0,
        sigma,
        steps,
        1e-6,
        4.0,
        noise=best_banded(bands, steps),
    )
    assert plan.divisor == pytest.approx(batch, rel=1e-6) and plan.participations == turns
    theirs = PLDAccountant().compose(
        dp_accounting.PoissonSampledDpEvent(bands * batch / n, dp_accounting.GaussianDpEvent(sigma)), turns
    )
    ours = epsilon([Event(plan.sampling_rate, plan.effective_noise_multiplier, plan.participations)], 1e-6)
    assert ours == pytest.approx(theirs.get_epsilon(1e-6), rel=2e-3) and 3.9 < ours <= 4.0


def test_where_every_turn_draws_all_its_records_epsilon_has_a_closed_form() -> None:
    assert PLAN.sampling_rate == 1 and PLAN.divisor == PLAN.records / BANDS
    planned = Event(PLAN.sampling_rate, PLAN.effective_noise_multiplier, PLAN.participations)
    assert epsilon([planned], PLAN.delta) == pytest.approx(gaussian_epsilon(20.0 / math.sqrt(10), PLAN.delta), rel=1e-9)


def test_a_draw_by_turns_says_how_many() -> None:
    rate = "q = 1 = 4294967296/2^32"
    assert PLAN.sampling.in_words(101, 40) == f"{rate} in 10 turns of 4 parts"
    assert acc_world.PLAN.sampling.in_words(100, 40) == rate


def test_plans_survive_json_and_plans_without_a_matrix_are_as_before() -> None:
    told = json.loads(json.dumps(PLAN.as_dict()))
    assert PrivacyPlan(**told) == PLAN and "noise" not in acc_world.PLAN.as_dict()
    assert MATRIX.digest == BandedNoise(**told["noise"]).digest != best_banded(BANDS, 41).digest
    with pytest.raises(PlanError, match="need as many records and steps"):
        replace(PLAN, steps=3)
    with pytest.raises(PlanError, match="does not go with noise of 1 bands"):
        replace(PLAN, noise=ExactGrid())


def test_a_record_is_charged_for_its_turns_in_all_segments(tmp_path: Path) -> None:
    journal = begin(tmp_path, PLAN)
    for steps, turns in ((1, 1), (4, 1), (5, 2), (8, 2), (10, 3)):
        train(journal, range(1 + journal.history.steps()[0], steps + 1), PLAN)
        assert [event.count for event in journal.history.charged()] == [turns]
    # Steps 7 to 10 again, under new keys: those of part 7 % 4 had turns at 3, 7 and 7; of part 2 at 2, 6, 10 and 10.
    journal.begin_segment(0, CONFIG, DATA, 6, "rolled back")
    train(journal, range(7, 11), PLAN, begun_after=6)
    assert journal.history.charged() == [Event(1.0, 20.0, 4)]
    assert journal.history.charged(fewest=True) == [Event(1.0, 20.0, 3)]
    assert History.read(tmp_path / "ledger.jsonl")[0].charged() == [Event(1.0, 20.0, 4)]


def test_where_a_program_numbers_the_records_a_new_segment_may_find_each_in_another_part(tmp_path: Path) -> None:
    """A block of four is left after two steps, and all go on under other numbers: a record of part 1 or 2 may then be
    one of part 3, so that it has a third turn in steps that would have two in all."""
    journal = begin(tmp_path, PLAN, records=NAMED)
    train(journal, range(1, 3), PLAN)
    journal.begin_segment(0, CONFIG, DATA, 2, "opened again")
    turns = []
    for step in range(3, 9):
        more = journal.history.charges_more(StepId(0, 1, step), Event(1.0, 20.0, 1))
        train(journal, range(step, step + 1), PLAN, begun_after=2)
        turns += [event.count for event in journal.history.charged()]
        assert more == (len(turns) in (1, 5))
    assert turns == [2, 2, 2, 2, 3, 3] and journal.history.charges_of_next(3) == 1
    assert History.read(tmp_path / "ledger.jsonl")[0].charged() == [Event(1.0, 20.0, 3)]


def test_the_budget_ends_a_run_at_the_first_turn_that_passes_it_and_not_before(tmp_path: Path) -> None:
    three = epsilon([Event(1.0, 20.0, 3)], PLAN.delta)
    plan = replace(PLAN, epsilon_budget=1.001 * three)
    journal = begin(tmp_path, plan)
    train(journal, range(1, 13), plan)
    with pytest.raises(BudgetSpent):
        journal.open_step(0, 13, facts(13, plan))
    assert journal.history.epsilon() <= plan.epsilon_budget


def test_a_step_with_draws_of_an_earlier_segment_is_never_opened(tmp_path: Path) -> None:
    journal = begin(tmp_path, PLAN)
    train(journal, range(1, 7), PLAN)
    journal.begin_segment(0, CONFIG, DATA, 6, "new keys")
    with pytest.raises(LedgerError):
        journal.open_step(0, 7, facts(7, PLAN))
    journal.open_step(0, 7, facts(7, PLAN, begun_after=6))


def test_a_lost_part_of_the_ledger_is_charged_for_the_part_that_was_drawn_from_most(tmp_path: Path) -> None:
    journal = begin(tmp_path, PLAN)
    train(journal, range(1, 7), PLAN)  # parts 1 and 2 had two turns, the others one
    lost = Head(journal.history.run_id, 99, "f" * 64, (Charge(0, 1.0, 20.0, 2),))  # of steps 7 and 8, which it hides
    journal.admit_lost((lost, []), "restored")
    assert [charge.count for charge in journal.history.lost] == [1], "one step for its one segment"
    journal.begin_segment(0, CONFIG, DATA, 6, "restored")
    train(journal, range(7, 9), PLAN, begun_after=6)
    assert sum(event.count for event in journal.history.charged()) >= 3, "part 3 had turns at 3, 7 and 7"


def test_verify_recomputes_it_from_the_ledger_and_finds_a_charge_at_the_rate_of_all_records(tmp_path: Path) -> None:
    plan = replace(PLAN, steps=12)
    journal = begin(tmp_path, plan)
    train(journal, range(1, 13), plan)
    journal.checkpointed(0, 12, "digest")
    journal.finish()
    certificate = certified(journal)
    assert verify(tmp_path).epsilon == pytest.approx(gaussian_epsilon(20.0 / math.sqrt(3), plan.delta), rel=1e-9)
    told = json.loads((tmp_path / "certificate.json").read_text())
    (phase,) = told["phases"]
    assert phase["banded"]["matrix"] == MATRIX.digest and phase["banded"]["bands"] == BANDS
    assert "take turns" in told["mechanism"] and any("block's earlier steps" in t for t in told["known_deviations"])
    assert all(each["epsilon"] is None and "several records" in each["reason"] for each in told["limits"]["groups"])
    assert told["limits"]["replacement"]["epsilon"] > told["claim"]["epsilon"]

    phase["events"] = [{**phase["events"][0], "rate": 0.25}]
    (tmp_path / "certificate.json").write_text(json.dumps(signed(told, KEY)))
    with pytest.raises(CertificateError):
        verify(tmp_path)
    write(certificate, tmp_path)

    def at_rate_of_all(fields: dict[str, Any]) -> None:
        if "facts" in fields:
            fields["facts"]["sampling"]["rule"]["threshold"] //= BANDS

    rewritten(tmp_path, at_rate_of_all)
    with pytest.raises((CertificateError, LedgerError)):
        verify(tmp_path)


def test_a_turn_that_adds_nothing_is_told_from_one_that_does(tmp_path: Path) -> None:
    journal = begin(tmp_path, PLAN)
    train(journal, range(1, 6), PLAN)
    event = Event(1.0, 20.0, 1)
    added = {step: journal.history.charges_more(StepId(0, 0, step), event) for step in (6, 8, 9)}
    assert added == {6: False, 8: False, 9: True}


def test_what_the_next_log_line_will_have_charged_is_known(tmp_path: Path) -> None:
    journal = begin(tmp_path, PLAN)
    for done in range(1, 9):
        train(journal, range(done, done + 1), PLAN)
        for more in (1, 3, 9):
            expected = math.ceil((done + more) / BANDS) - math.ceil(done / BANDS)
            assert journal.history.charges_of_next(more) == expected
