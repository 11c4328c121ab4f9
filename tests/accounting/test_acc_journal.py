"""The rules of the journal: what is charged is what was done, replay is exact or refused, nobody passes the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from acc_world import CONFIG, DATA, PLAN, begin, facts, reopen, train, whole_run

from accounting.accountant import Event, describe, epsilon
from accounting.certificate import compose, verify
from accounting.facts import MetricFact, combined_sigma
from accounting.ledger import LedgerError


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


@pytest.mark.parametrize("change", [{"std": 10.0}, {"sensitivity": 2.0}])
def test_a_commit_that_promises_less_is_charged_with_the_weaker_and_stops(tmp_path: Path, change: dict) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    journal.open_step(0, 3, facts(3))
    with pytest.raises(LedgerError, match="charges the weaker"):
        journal.commit_step(0, 3, facts(3, **change))
    expected = epsilon([Event(1.0, 20.0, 2), Event(1.0, 10.0, 1)], PLAN.delta)
    assert journal.history.epsilon() == pytest.approx(expected, rel=1e-12)
    journal.ledger.close()
    assert verify(tmp_path).epsilon == pytest.approx(expected, rel=1e-12)


def test_a_commit_that_promises_more_buys_nothing(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.open_step(0, 1, facts(1))
    with pytest.raises(LedgerError):
        journal.commit_step(0, 1, facts(1, std=1e9))
    assert journal.history.epsilon() == epsilon([Event(1.0, 20.0, 1)], PLAN.delta)


@pytest.mark.parametrize("change", [{"elements": 9}, {"std": 0.0}, {"divisor": 55.0}, {"threshold": 5}])
def test_a_commit_outside_any_accounting_makes_the_run_not_private(tmp_path: Path, change: dict) -> None:
    journal = begin(tmp_path)
    journal.open_step(0, 1, facts(1))
    with pytest.raises(LedgerError):
        journal.commit_step(0, 1, facts(1, **change))
    assert (journal.history.why_not_private() or "").startswith("NOT PRIVATE: step 1 of phase 0")
    document = compose(journal.history, journal.ledger.entries, {})
    assert not document["claim"]["private"] and document["claim"]["epsilon"] is None
    journal.ledger.close()
    with pytest.raises(LedgerError, match="no epsilon can be given: step 1"):
        verify(tmp_path)


@pytest.mark.parametrize("change", [{"threshold": 2**31}, {"sensitivity": 1.5}, {"std": 12.0}, {"std": 30.0}])
def test_what_acting_parts_do_is_charged_and_not_what_the_plan_says(tmp_path: Path, change: dict) -> None:
    journal = begin(tmp_path)
    for step in (1, 2):
        journal.open_step(0, step, facts(step, **change))
        journal.commit_step(0, step, facts(step, **change))
    done = facts(1, **change).event()
    assert journal.history.epsilon() == epsilon([replace(done, count=2)], PLAN.delta)
    assert journal.history.epsilon() != epsilon([Event(1.0, 20.0, 2)], PLAN.delta)


def test_another_divisor_or_record_count_is_refused(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    with pytest.raises(LedgerError, match="divisor"):
        journal.open_step(0, 1, facts(1, divisor=97.0))
    honest = facts(1)
    with pytest.raises(LedgerError, match="n = 99"):
        journal.open_step(0, 1, replace(honest, sampling=replace(honest.sampling, records=99)))
    assert not journal.history.opened


@pytest.mark.parametrize("change", [{"std": 0.0}, {"sensitivity": 0.0}, {"sensitivity": -1.0}, {"elements": 0}])
def test_a_step_without_a_mechanism_is_never_opened(tmp_path: Path, change: dict) -> None:
    journal = begin(tmp_path)
    with pytest.raises((LedgerError, ValueError)):
        journal.open_step(0, 1, facts(1, **change))
    assert not journal.history.opened and journal.ledger.length == 3


def test_a_frozen_plan_and_a_phase_that_changes_sides(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.declare_plan(0, "private", PLAN, describe("pld"))
    with pytest.raises(LedgerError, match="noise_multiplier changed"):
        journal.declare_plan(0, "private", replace(PLAN, noise_multiplier=19.0), describe("pld"))
    with pytest.raises(LedgerError, match="began as a private phase"):
        journal.declare_nonprivate(0, "private", True, DATA)
    with pytest.raises(LedgerError, match="a run claims one delta"):
        journal.declare_plan(1, "second", replace(PLAN, delta=1e-4), describe("pld"))
    journal.declare_nonprivate(1, "open", True, "other")
    with pytest.raises(LedgerError, match="began without noise"):
        journal.declare_plan(1, "open", PLAN, describe("pld"))


def test_one_word_that_data_are_not_public_is_enough(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.declare_nonprivate(1, "tail", True, "web")
    assert journal.history.why_not_private() is None
    length = journal.ledger.length
    journal.declare_nonprivate(1, "tail", True, "web")
    assert journal.ledger.length == length
    journal.declare_nonprivate(1, "tail", False, "web")
    journal.declare_nonprivate(1, "tail", True, "web")
    assert "not declared public" in (journal.history.why_not_private() or "")


def test_records_cannot_be_protected_and_public_at_once(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.declare_nonprivate(1, "tail", True, DATA)
    assert "records that another phase protects" in (journal.history.why_not_private() or "")


def test_records_that_become_those_of_a_public_phase_later_are_told_as_well(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.declare_nonprivate(1, "tail", True, "web")
    assert journal.history.why_not_private() is None
    journal.declare_nonprivate(1, "tail", True, DATA)
    assert "records that another phase protects" in (journal.history.why_not_private() or "")


def test_data_that_were_not_public_once_are_not_made_so_by_other_records(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.declare_nonprivate(1, "tail", False, "web")
    journal.declare_nonprivate(1, "tail", True, "other records")
    assert "not declared public" in (journal.history.why_not_private() or "")


def test_a_run_without_a_private_phase_makes_no_claim(tmp_path: Path) -> None:
    journal = reopen(tmp_path)
    journal.start_run("tiny", "check", False, {})
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
    journal = begin(tmp_path)
    both = replace(facts(1), metrics=(MetricFact("loss", 2.0, 80.0),))
    journal.open_step(0, 1, both)
    journal.commit_step(0, 1, both)
    expected = (1 / 20.0**2 + (2 / 80.0) ** 2) ** -0.5
    (event,) = journal.history.charged()
    assert event.count == 1 and event.sigma == pytest.approx(expected)
    assert both.from_dict(both.as_dict()) == both and "metrics" not in facts(1).as_dict()
    assert combined_sigma([(1.0, 3.0)]) == pytest.approx(3.0)
    with pytest.raises((LedgerError, ValueError)):
        journal.open_step(0, 2, replace(facts(2), metrics=(MetricFact("loss", 1.0, 0.0),)))
