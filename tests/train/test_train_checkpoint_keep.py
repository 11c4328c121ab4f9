"""Keeping the best checkpoint is a choice by outputs: the ledger says so, and the planned budget is claimed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from accounting.accountant import describe
from accounting.history import History
from accounting.journal import Journal
from accounting.ledger import Ledger
from accounting.plan import PrivacyPlan

PLAN = PrivacyPlan(
    records=100, threshold=2**32, clip_norm=1.0, noise_multiplier=20.0, steps=4, delta=1e-3, epsilon_budget=2.0
)


def test_a_kept_best_makes_the_claim_the_planned_budget(tmp_path: Path) -> None:
    journal = Journal(Ledger.open(tmp_path / "ledger.jsonl"))
    journal.start_run("tiny", "check", False, {})
    journal.declare_plan(0, "private", replace(PLAN), describe("pld"))
    assert journal.history.why_budget_is_claimed() is None
    journal.declare_choice("public_loss")
    journal.declare_choice("public_loss")
    journal.ledger.close()
    history = History.read(tmp_path / "ledger.jsonl")[0]
    assert history.choices == ["public_loss"], "said once"
    because = history.why_budget_is_claimed()
    assert because == "checkpoints are kept by their public_loss, so one may be chosen by outputs"
