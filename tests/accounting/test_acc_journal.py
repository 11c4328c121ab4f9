"""The rules of the journal: what is charged is what was done, replay is exact or refused, nobody passes the budget."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.banded import best_banded
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.epsilon.accountant import describe, epsilon
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import BudgetSpent, LedgerError
from murmuration.accounting.ledger.copied_run import recognise
from murmuration.accounting.ledger.facts import MetricFact, StepFacts, combined_sigma
from murmuration.accounting.metrics import PlannedMetric
from murmuration.accounting.noise import EXACT as EXACT_NOISE
from murmuration.accounting.noise import ExactGrid
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import AnySampling, CyclicPoisson, Poisson, RandomAllocation
from murmuration.accounting.strict_json import read
from tests.support.acc_world import (
    CONFIG,
    DATA,
    GRID,
    PLAN,
    SIGNER,
    begin,
    document_of,
    facts,
    reopen,
    rewritten,
    train,
    whole_run,
)

MEASURED = replace(PLAN, metrics=(PlannedMetric("loss", 2.0, 80.0),))


EXACT = replace(PLAN, noise=ExactGrid())
BANDED = replace(PLAN, records=101, sampling=CyclicPoisson(2**32, 4), noise=best_banded(4, 40))
ALLOCATED = replace(PLAN, records=101, sampling=RandomAllocation(4), noise_multiplier=2.0, steps=12, epsilon_budget=8.0)


def test_a_step_is_opened_before_it_is_committed(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    with pytest.raises(LedgerError, match="before it is opened"):
        journal.commit_step(0, 1, facts(1))
    journal.open_step(0, 1, facts(1))
    with pytest.raises(LedgerError, match="cannot begin while step 1 is open"):
        journal.open_step(0, 2, facts(2))
    journal.commit_step(0, 1, facts(1))
    for step in (0, 41):
        with pytest.raises(LedgerError, match="outside the steps"):
            journal.open_step(0, step, facts(step))
    assert [e.kind for e in journal.ledger.entries] == ["run", "plan", "segment", "open", "commit"]


def test_an_opened_step_is_charged_even_if_it_never_ended(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.open_step(0, 1, facts(1))
    assert journal.history.epsilon() == epsilon([Event(1.0, 20.0, 1)], PLAN.delta) > 0


def test_an_identical_replay_writes_nothing_and_a_different_one_is_refused(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 4))
    journal.ledger.close()
    again = reopen(tmp_path)
    length = again.ledger.length
    train(again, range(1, 4))
    assert again.ledger.length == length
    with pytest.raises(LedgerError, match="replayed differently"):
        again.open_step(0, 2, facts(2, keyed="other draw"))
    with pytest.raises(LedgerError, match="replayed differently"):
        again.commit_step(0, 2, facts(2, std=19.0))
    assert again.ledger.length == length


@pytest.mark.parametrize(
    ("change", "sigma"), [({"std": 10.0}, 10.0), ({"sensitivity": 2.0}, 10.0), ({"std": 1e9}, 20.0)]
)
def test_a_commit_that_differs_is_charged_with_the_weaker_and_stops(
    tmp_path: Path, change: dict[str, float], sigma: float
) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    journal.open_step(0, 3, facts(3))
    with pytest.raises(LedgerError, match="charges the weaker"):
        journal.commit_step(0, 3, facts(3, **change))
    expected = epsilon([Event(1.0, 20.0, 2), Event(1.0, sigma, 1)], PLAN.delta)
    assert journal.history.epsilon() == pytest.approx(expected, rel=1e-12)
    journal.ledger.close()
    assert verify(tmp_path).epsilon == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("change", [{"elements": 9}, {"std": 0.0}, {"divisor": 55.0}, {"threshold": 5}])
def test_a_commit_outside_any_accounting_makes_the_run_not_private(tmp_path: Path, change: dict) -> None:
    journal = begin(tmp_path)
    journal.open_step(0, 1, facts(1))
    with pytest.raises(LedgerError):
        journal.commit_step(0, 1, facts(1, **change))
    assert (journal.history.why_not_private() or "").startswith("NOT PRIVATE: step 1 of phase 0")
    document = document_of(journal)
    assert not document["claim"]["private"] and document["claim"]["epsilon"] is None
    journal.ledger.close()
    with pytest.raises(LedgerError, match="no epsilon can be given: step 1"):
        verify(tmp_path)


def drawn(rule: AnySampling) -> Callable[[StepFacts], StepFacts]:
    return lambda f: replace(f, sampling=replace(f.sampling, rule=rule))


def noised(**changes: Any) -> Callable[[StepFacts], StepFacts]:
    return lambda f: replace(f, noise=replace(f.noise, **changes))


def clipped(**changes: Any) -> Callable[[StepFacts], StepFacts]:
    return lambda f: replace(f, clipping=replace(f.clipping, **changes))


def correlated(**changes: Any) -> Callable[[StepFacts], StepFacts]:
    return lambda f: noised(correlation=f.noise.correlation and replace(f.noise.correlation, **changes))(f)


def released(*metric: Any) -> Callable[[StepFacts], StepFacts]:
    return lambda f: replace(f, metrics=(MetricFact(*metric),) if metric else ())


OF_LOSS = replace(MEASURED, noise=ExactGrid())
NOISE, GRID_CHARGED = "states the deviation of the noise", "charges no more"
BY_TURNS, BY_EPOCHS = "but its plan says .* of one of 4 parts", "but its plan says random allocation to epochs of 4"

CONTRADICTIONS: dict[str, tuple[PrivacyPlan, Callable[[StepFacts], StepFacts], str]] = {
    "rate": (PLAN, drawn(Poisson(1)), "with K = 1, but"),
    "n": (PLAN, lambda f: replace(f, sampling=replace(f.sampling, records=99)), "states n = 99"),
    "divisor": (PLAN, noised(divisor=97.0), "states the divisor = 97"),
    "noise": (PLAN, noised(std=1e9), f"{NOISE} = 1000"),
    "no noise": (PLAN, noised(std=0.0), NOISE),
    "less noise": (PLAN, noised(std=19.0), NOISE),
    "sensitivity": (PLAN, clipped(sensitivity=1e-9), "states the sensitivity 1e-09"),
    "no bound": (PLAN, clipped(sensitivity=-1.0), "states the sensitivity"),
    "rule": (PLAN, clipped(rule="none"), "clips by the rule 'none'"),
    "generator": (PLAN, noised(generator="rand()"), "draws noise from 'rand"),
    "elements": (PLAN, noised(elements=0), "noise for no element"),
    "a metric more": (PLAN, released("loss", 2.0, 80.0), "differ from its plan"),
    "a metric less": (MEASURED, released(), "differ from its plan"),
    "a metric's noise": (MEASURED, released("loss", 2.0, 1e9), "differ from its plan"),
    "a metric's bound": (MEASURED, released("loss", 1e-9, 80.0), "differ from its plan"),
    "continuous noise": (EXACT, noised(generator="aes-256-ctr"), "says that the noise is exact"),
    "exact noise without a charge": (PLAN, noised(generator=EXACT_NOISE, grid=GRID), "charges nothing for that"),
    "a grid without exact noise": (PLAN, noised(grid=GRID), "charges nothing for that"),
    "no grid": (EXACT, noised(grid=0.0), GRID_CHARGED),
    "a grid too coarse": (EXACT, noised(grid=2 * GRID), GRID_CHARGED),
    "too many elements": (EXACT, noised(elements=100), GRID_CHARGED),
    "a grid that is no power of two": (EXACT, noised(grid=3e-7), GRID_CHARGED),
    "a metric without a grid": (OF_LOSS, released("loss", 2.0, 80.0), "rounds 1 numbers"),
    "a metric's grid too coarse": (OF_LOSS, released("loss", 2.0, 80.0, 2.0**-18), "rounds 1 numbers"),
    "bands: all records drawn from": (BANDED, drawn(Poisson(2**32)), BY_TURNS),
    "bands: other parts": (BANDED, drawn(CyclicPoisson(2**32, 5)), BY_TURNS),
    "bands: the rate of all records": (BANDED, drawn(CyclicPoisson(2**30, 4)), BY_TURNS),
    "bands: independent noise": (BANDED, noised(correlation=None), "noise of another matrix than"),
    "bands: another matrix": (BANDED, correlated(matrix="a"), "noise of another matrix than"),
    "bands: less noise": (BANDED, correlated(added=1.0), "noise of another matrix than"),
    "epochs: a Poisson sample": (ALLOCATED, drawn(Poisson(2**30)), BY_EPOCHS),
    "epochs: others": (ALLOCATED, drawn(RandomAllocation(5)), BY_EPOCHS),
    "epochs: turns": (ALLOCATED, drawn(CyclicPoisson(2**30, 4)), BY_EPOCHS),
    "epochs: less noise": (ALLOCATED, noised(std=1.0), NOISE),
    "epochs: another divisor": (ALLOCATED, noised(divisor=100.0), "states the divisor = 100"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_step_that_contradicts_its_plan_is_neither_opened_nor_believed(tmp_path: Path, name: str) -> None:
    """Refused by the journal; a forged ledger that is consistent in itself is refused by every reader."""
    plan, change, sentence = CONTRADICTIONS[name]
    journal = begin(tmp_path, plan)
    train(journal, range(1, 3), plan)
    with pytest.raises(LedgerError, match=sentence):
        journal.open_step(0, 3, change(facts(3, plan)))
    assert journal.history.steps()[0] == 2
    journal.ledger.close()
    assert verify(tmp_path).opened == 2

    def forge(fields: dict[str, Any]) -> None:
        if fields["kind"] in ("open", "commit"):
            fields["facts"] = change(facts(fields["step"], plan)).as_dict()

    rewritten(tmp_path, forge)
    with pytest.raises(LedgerError, match=f"line 4: .*{sentence}"):
        verify(tmp_path)
    with pytest.raises(LedgerError, match="line 4"):
        reopen(tmp_path)


@pytest.mark.parametrize("change", [{"elements": 9}, {"rule": "automatic"}])
def test_within_a_segment_the_clipping_rule_and_the_trained_weights_stay_the_same(tmp_path: Path, change: dict) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    other = facts(3, elements=change.get("elements", 10))
    other = replace(other, clipping=replace(other.clipping, rule=change.get("rule", "flat")))
    with pytest.raises(LedgerError, match="which one config cannot do"):
        journal.open_step(0, 3, other)
    journal.begin_segment(0, "config-2", DATA, 2, "declared")
    journal.open_step(0, 3, other)


@pytest.mark.parametrize("from_step", [-1, 41])
def test_a_segment_begins_within_its_plan(tmp_path: Path, from_step: int) -> None:
    journal = begin(tmp_path)
    with pytest.raises(LedgerError, match="which its plan has not"):
        journal.begin_segment(0, CONFIG, DATA, from_step, "rolled back")


def test_a_plan_that_promises_something_else_is_not_read(tmp_path: Path) -> None:
    journal = reopen(tmp_path)
    journal.start_run("tiny", "check", False, {}, "hmac-sha256", SIGNER)
    for plan in (replace(PLAN, unit="one person"), replace(PLAN, adjacency="add or remove")):
        with pytest.raises(LedgerError, match="the plan promises something for"):
            journal.declare_plan(0, "private", plan, describe("pld"))
    with pytest.raises(LedgerError, match="malformed 'plan'"):
        tiny = replace(PLAN, noise_multiplier=1e-300, metrics=(PlannedMetric("loss", 1e300, 1e-300),))
        journal.declare_plan(0, "private", tiny, describe("pld"))


def test_a_frozen_plan_and_a_phase_that_changes_sides(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.declare_plan(0, "private", PLAN, describe("pld"))
    with pytest.raises(LedgerError, match=rf"noise_multiplier \({PLAN.noise_multiplier:g}, now 19\) changed"):
        journal.declare_plan(0, "private", replace(PLAN, noise_multiplier=19.0), describe("pld"))
    with pytest.raises(LedgerError, match="began as a private phase"):
        journal.declare_nonprivate(0, "private", True, DATA)
    with pytest.raises(LedgerError, match="a run claims one delta"):
        journal.declare_plan(1, "second", replace(PLAN, delta=1e-4), describe("pld"))
    journal.declare_nonprivate(1, "open", True, "other")
    with pytest.raises(LedgerError, match="began without noise"):
        journal.declare_plan(1, "open", PLAN, describe("pld"))


def test_a_phase_without_a_segment_has_no_steps(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.declare_plan(1, "second", PLAN, describe("pld"))
    with pytest.raises(LedgerError, match="phase 1 has no segment"):
        journal.open_step(1, 1, facts(1))


NOT_DECLARED, PROTECTED = "not declared public", "records that another phase protects"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([(True, "web"), (True, "web")], None), ([(True, "web"), (False, "web"), (True, "web")], NOT_DECLARED),
        ([(False, "web"), (True, "other records")], NOT_DECLARED), ([(True, DATA)], PROTECTED),
        ([(True, "web"), (True, DATA)], PROTECTED),
    ],
)  # fmt: skip
def test_one_word_that_data_are_not_public_or_protected_elsewhere_is_enough(
    tmp_path: Path, words: list[tuple[bool, str]], fault: str | None
) -> None:
    journal = begin(tmp_path)
    for public, digest in words:
        journal.declare_nonprivate(1, "tail", public, digest)
    said = journal.history.why_not_private()
    assert said is None if fault is None else fault in (said or "")
    told = list(dict.fromkeys(words))
    assert fault is not None or journal.ledger.length == 3 + len(told), "said once"


def test_a_run_without_a_private_phase_makes_no_claim(tmp_path: Path) -> None:
    journal = reopen(tmp_path)
    journal.start_run("tiny", "check", False, {}, "hmac-sha256", SIGNER)
    journal.declare_nonprivate(0, "warm", True, "web")
    assert journal.history.why_not_private() == "NOT PRIVATE: no phase of this run was private"


def test_nothing_follows_a_finish(tmp_path: Path) -> None:
    journal = whole_run(tmp_path)
    plan = replace(PLAN, steps=3)
    for act in (
        lambda: journal.begin_segment(0, CONFIG, DATA, 0, "again"),
        lambda: journal.open_step(0, 3 - 1, facts(9, plan)),
        lambda: journal.declare_nonprivate(1, "more", True, "web"),
    ):
        with pytest.raises(LedgerError):
            act()
    journal.finish()
    journal.checkpointed(0, 3, "digest")
    assert [e.kind for e in journal.ledger.entries].count("finish") == 1


def test_two_phases_share_a_budget_and_rollback_across_them_changes_keys(tmp_path: Path) -> None:
    """Phase 1 was published, the run went back to phase 0: the old keys of phase 1 must not return."""
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    journal.checkpointed(0, 2, "a")
    journal.declare_plan(1, "second", PLAN, describe("pld"))
    old = journal.begin_segment(1, CONFIG, DATA, 0, "first")
    train(journal, range(1, 4), phase=1)
    journal.checkpointed(1, 3, "b")
    assert "after phase 0" in (journal.new_segment_reason(0, 2, CONFIG) or "")
    journal.begin_segment(0, CONFIG, DATA, 1, "rolled back")
    train(journal, range(2, 4))
    journal.checkpointed(0, 3, "c")
    assert journal.new_segment_reason(1, 0, CONFIG) is not None
    fresh = journal.begin_segment(1, CONFIG, DATA, 0, "again")
    assert fresh.key_name != old.key_name
    train(journal, range(1, 3), phase=1)
    assert journal.history.charged() == [Event(1.0, 20.0, 9)]
    with pytest.raises(LedgerError, match="outside the current segment"):
        journal.open_step(0, 4, facts(4))


@pytest.mark.parametrize("between", ["nothing", "public phase"])
def test_resuming_keeps_the_segment_only_at_the_last_checkpoint(tmp_path: Path, between: str) -> None:
    journal = begin(tmp_path)
    assert journal.new_segment_reason(0, 0, CONFIG) is None
    train(journal, range(1, 6))
    journal.checkpointed(0, 3, "a")
    assert journal.new_segment_reason(0, 3, CONFIG) is None, "commits behind the checkpoint are replayed"
    assert journal.new_segment_reason(0, 5, CONFIG) is None, "killed between the checkpoint and its line"
    assert "rolled back" in (journal.new_segment_reason(0, 2, CONFIG) or "")
    assert journal.new_segment_reason(0, 4, CONFIG) is not None
    assert journal.new_segment_reason(0, 7, CONFIG) is not None
    assert journal.new_segment_reason(0, 2, "config-2") == "the config changed", "a rollback hides no change"
    if between == "public phase":
        journal.declare_nonprivate(1, "open", True, "web")
        journal.checkpointed(1, 1, "b")
        assert journal.new_segment_reason(0, 3, CONFIG) is not None


def test_the_keys_of_a_segment_do_not_return_from_elsewhere(tmp_path: Path) -> None:
    """Each reason alone, where no other one would give the same answer."""
    journal = begin(tmp_path)
    train(journal, range(1, 4))
    journal.checkpointed(0, 2, "two")
    assert journal.new_segment_reason(0, 2, CONFIG) is None
    journal.checkpointed(1, 2, "of a public phase")
    assert journal.new_segment_reason(0, 2, CONFIG) == "phase 1 was trained after phase 0"
    journal.begin_segment(0, CONFIG, DATA, 2, "rolled back")
    assert journal.new_segment_reason(0, 2, CONFIG) is None
    assert "but the segment began after step 2" in (journal.new_segment_reason(0, 1, CONFIG) or "")
    journal.checkpointed(0, 2, "two")
    journal.declare_plan(2, "second", PLAN, describe("pld"))
    journal.begin_segment(2, CONFIG, DATA, 0, "first")
    assert journal.new_segment_reason(0, 2, CONFIG) == "another phase was trained after phase 0"


def test_a_stop_in_mid_step_and_a_kill_before_its_checkpoints_line_cost_nothing(tmp_path: Path) -> None:
    """SIGTERM drops step 6 and saves step 5; SIGKILL comes before the ledger says so: the usual preemption."""
    journal = begin(tmp_path)
    train(journal, range(1, 6))
    journal.checkpointed(0, 3, "a")
    journal.open_step(0, 6, facts(6))
    assert journal.new_segment_reason(0, 5, CONFIG) is None
    assert journal.new_segment_reason(0, 4, CONFIG) is not None, "that is no checkpoint of the newest committed step"
    assert journal.new_segment_reason(0, 6, CONFIG) is not None, "step 6 was never committed"


def test_noised_metrics_of_a_draw_are_one_event_with_its_gradient(tmp_path: Path) -> None:
    journal = begin(tmp_path, MEASURED)
    both = replace(facts(1), metrics=(MetricFact("loss", 2.0, 80.0),))
    journal.open_step(0, 1, both)
    journal.commit_step(0, 1, both)
    expected = (1 / 20.0**2 + (2 / 80.0) ** 2) ** -0.5
    (event,) = journal.history.charged()
    assert event.count == 1 and event.sigma == pytest.approx(expected)
    assert read(StepFacts, both.as_dict()) == both and "metrics" not in facts(1).as_dict()
    assert combined_sigma([(1.0, 3.0)]) == pytest.approx(3.0)
    with pytest.raises((LedgerError, ValueError)):
        journal.open_step(0, 2, replace(facts(2), metrics=(MetricFact("loss", 1.0, 0.0),)))


# What a run may still spend, alone and over its phases, and that nobody spends what is another's.


def test_the_budget_is_never_passed(tmp_path: Path) -> None:
    plan = replace(PLAN, epsilon_budget=0.4)
    journal = begin(tmp_path, plan)
    with pytest.raises(BudgetSpent, match=r"would pass epsilon = 0\.4; the run"):
        train(journal, range(1, 41), plan)
    opened = journal.history.steps()[0]
    assert 1 < opened < 40
    assert journal.history.epsilon() <= 0.4 < epsilon([Event(1.0, 20.0, opened + 1)], plan.delta)
    # Weaker noise than planned makes fewer steps affordable; a new segment and a restart give none back.
    journal.begin_segment(0, CONFIG, DATA, 0, "rolled back")
    with pytest.raises(BudgetSpent):
        journal.open_step(0, 1, facts(1))
    journal.ledger.close()
    again = reopen(tmp_path)
    with pytest.raises(BudgetSpent):
        again.open_step(0, 1, facts(1))


def test_one_weaker_step_among_honest_ones_shrinks_what_is_affordable(tmp_path: Path) -> None:
    """What was found affordable before it holds no longer, for the same honest steps either."""
    plan = replace(PLAN, epsilon_budget=0.4)
    journal = begin(tmp_path, plan)
    train(journal, range(1, 2), plan)
    journal.open_step(0, 2, facts(2))
    with pytest.raises(LedgerError, match="had announced"):
        journal.commit_step(0, 2, facts(2, std=8.0))
    with pytest.raises(BudgetSpent):
        train(journal, range(3, 41), plan)
    assert journal.history.steps()[0] > 2 and journal.history.epsilon() <= 0.4


def test_a_phase_that_was_left_early_claims_its_budget_before_the_run_is_finished(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 4))
    assert journal.history.why_budget_is_claimed() is None
    journal.declare_nonprivate(1, "tail", True, "web")
    assert journal.history.why_budget_is_claimed() == "phase private ended after 3 of 40 planned steps"


def test_what_an_earlier_phase_left_of_its_budget_is_not_a_later_ones_to_spend(tmp_path: Path) -> None:
    plan = replace(PLAN, epsilon_budget=0.4, steps=100)
    journal = begin(tmp_path, plan)
    journal.declare_plan(1, "second", plan, describe("pld"))
    train(journal, range(1, 2), plan)  # and no further: it ended at a plateau
    journal.begin_segment(1, CONFIG, DATA, 0, "first")
    step = 0
    with pytest.raises(BudgetSpent, match=r"would pass epsilon = 0\.4 for this phase, or 0\.8 for all so far; the run"):
        while step < plan.steps:
            step += 1
            train(journal, range(step, step + 1), plan, phase=1)
    alone = epsilon(journal.history.charged(1), plan.delta)
    assert step > 2 and alone <= 0.4 < epsilon([Event(1.0, 20.0, step)], plan.delta)


def test_a_phase_does_not_spend_what_a_later_one_was_given(tmp_path: Path) -> None:
    plan = replace(PLAN, epsilon_budget=0.3)
    journal = begin(tmp_path, plan)
    journal.declare_plan(1, "second", plan, describe("pld"))
    with pytest.raises(BudgetSpent):
        train(journal, range(1, 41), plan)
    assert journal.history.epsilon() <= 0.3


def test_back_in_an_earlier_phase_the_budgets_of_both_hold(tmp_path: Path) -> None:
    plan = replace(PLAN, epsilon_budget=0.3)
    journal = begin(tmp_path, plan)
    train(journal, range(1, 6), plan)
    journal.declare_plan(1, "second", plan, describe("pld"))
    journal.begin_segment(1, CONFIG, DATA, 0, "first")
    with pytest.raises(BudgetSpent):
        train(journal, range(1, 41), plan, phase=1)
    assert journal.history.epsilon() > 0.3, "more than the first phase has"
    journal.begin_segment(0, CONFIG, DATA, 5, "rolled back")
    train(journal, range(6, 7), plan)


def test_a_ledger_beyond_its_budget_does_not_verify(tmp_path: Path) -> None:
    plan = replace(PLAN, epsilon_budget=0.5)
    journal = begin(tmp_path, plan)
    journal.open_step(0, 1, facts(1))
    with pytest.raises(LedgerError):
        journal.commit_step(0, 1, facts(1, std=1.0))
    journal.ledger.close()
    with pytest.raises(CertificateError, match="above the budget"):
        verify(tmp_path)


# A copied run directory is recognised, and draws its noise with other keys than the original.


def test_a_copy_is_recognised_and_gets_new_keys(tmp_path: Path) -> None:
    original = tmp_path / "original"
    (original / "secret").mkdir(parents=True)
    journal = reopen(original)
    assert recognise(journal, original / "secret") is None
    journal.ledger.close()
    journal = begin(original)
    train(journal, range(1, 4))
    journal.checkpointed(0, 3, "a")
    journal.ledger.close()

    moved = original.rename(tmp_path / "moved")
    journal = reopen(moved)
    assert recognise(journal, moved / "secret") is None, "a renamed folder is no copy"
    assert journal.new_segment_reason(0, 3, CONFIG) is None
    journal.ledger.close()

    shutil.copytree(moved, tmp_path / "copy")
    journal = reopen(tmp_path / "copy")
    assert "copy" in (recognise(journal, tmp_path / "copy" / "secret") or "")
    assert "copied" in (journal.new_segment_reason(0, 3, CONFIG) or "")
    journal.ledger.close()
    journal = reopen(tmp_path / "copy")  # killed before the new segment: still noticed
    assert recognise(journal, tmp_path / "copy" / "secret") is None
    assert "copied" in (journal.new_segment_reason(0, 3, CONFIG) or "")
    journal.begin_segment(0, CONFIG, DATA, 3, "copied")
    assert journal.new_segment_reason(0, 3, CONFIG) is None
    for damage in (b"", b"{}"):
        (moved / "secret" / "identity.json").write_bytes(damage)
        again = reopen(moved)
        assert recognise(again, moved / "secret")
        again.ledger.close()


@pytest.mark.parametrize("since", ["a copy", "another segment", "another step"])
def test_an_unnamed_checkpoint_of_before_is_no_place_to_go_on_from(tmp_path: Path, since: str) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    written_at = journal.ledger.length
    journal.admit_checkpoint(0, 2, "unnamed", written_at)  # a kill came before its line
    if since == "a copy":
        journal.note_copied("another folder")
    elif since == "another step":
        train(journal, range(3, 4))
    else:
        journal.begin_segment(0, CONFIG, DATA, 0, "rolled back")
        train(journal, range(1, 3))
    with pytest.raises(LedgerError, match="does not know this checkpoint of step 2"):
        journal.admit_checkpoint(0, 2, "unnamed", written_at)


def test_two_copies_that_begin_the_same_segment_never_have_the_same_keys(tmp_path: Path) -> None:
    begin(tmp_path).ledger.close()
    shutil.copytree(tmp_path, tmp_path / "copy")
    ways = [reopen(folder).begin_segment(0, CONFIG, DATA, 0, "again") for folder in (tmp_path, tmp_path / "copy")]
    assert ways[0].number == ways[1].number and ways[0].key_name != ways[1].key_name
