"""What a run may still spend, alone and over its phases, and that nobody spends what is another's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from murmuration.accounting.certificate.certificate import CertificateError, verify
from murmuration.accounting.epsilon.accountant import Event, describe, epsilon
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.journal import BudgetSpent
from tests.support.acc_world import CONFIG, DATA, PLAN, begin, facts, reopen, train


def test_the_budget_is_never_passed(tmp_path: Path) -> None:
    plan = replace(PLAN, epsilon_budget=0.4)
    journal = begin(tmp_path, plan)
    with pytest.raises(BudgetSpent, match=r"would pass epsilon = 0\.4"):
        train(journal, range(1, 41), plan)
    opened = len(journal.history.opened)
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
    assert len(journal.history.opened) > 2 and journal.history.epsilon() <= 0.4


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
    with pytest.raises(BudgetSpent):
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
