"""What ends a phase early: a plateau of the public loss, or a person; both decide alike after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.train.config.phase import Plateau
from murmuration.train.run.early_end import Ending, PlateauRule, asked_for, measured_before
from tests.support.step_world import step_of
from tests.support.train_helpers import alone, on_ranks, plan_for


def rule(losses: list[float], patience: int = 2, min_delta: float = 0.0, not_before: int = 0) -> str | None:
    measured = {10 * number: loss for number, loss in enumerate(losses)}
    return PlateauRule(Plateau(patience=patience, min_delta=min_delta, not_before=not_before), measured).reason()


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([], False), ([3.0], False), ([3.0, 2.0, 1.0], False), ([3.0, 3.0], False), ([3.0, 3.0, 3.0], True),
        ([3.0, 2.0, 2.5], False), ([3.0, 2.0, 2.5, 2.1], True), ([3.0, 2.0, 2.5, 1.9, 2.0], False),
        ([1.0, float("nan"), float("nan")], True),
    ],
)  # fmt: skip
def test_patience_counts_checkpoints_without_a_new_best(losses: list[float], ends: bool) -> None:
    assert (rule(losses) is not None) == ends


def test_a_small_fall_is_no_improvement_and_some_steps_are_made_in_any_case() -> None:
    slow = [3.0, 2.99, 2.98, 2.97]
    assert rule(slow) is None and rule(slow, min_delta=0.05) is not None
    assert rule(slow, min_delta=0.05, not_before=31) is None
    assert rule([*slow, 2.96], min_delta=0.05, not_before=31) is not None
    # Small falls add up: three of them are one improvement over the best that counted.
    assert rule([3.0, 2.97, 2.94], min_delta=0.05) is None


def test_a_resumed_run_reads_up_what_was_measured_and_decides_alike(tmp_path: Path) -> None:
    log = tmp_path / "public.jsonl"
    lines = [{"phase": "a", "step": step, "public_loss": 5.0 - step} for step in range(4)]
    lines += [{"phase": "b", "step": 1, "public_loss": 9.0}, {"phase": "a", "step": 2, "lr": 1.0}]
    lines += [{"phase": "a", "step": 2, "public_loss": 7.0}]
    log.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"phase": "a", "st')
    assert measured_before(log, "a", 2) == {0: 5.0, 1: 4.0, 2: 7.0}, "the last word on a step, and nothing after it"
    assert measured_before(tmp_path / "none", "a", 2) == {}


def test_the_first_step_at_which_a_phase_may_end_counts() -> None:
    assert rule([3.0, 3.0, 3.0], not_before=20) is not None and rule([3.0, 3.0, 3.0], not_before=21) is None


def test_an_ending_goes_on_from_the_log_with_what_is_measured(tmp_path: Path) -> None:
    log = tmp_path / "public.jsonl"
    log.write_text("".join(json.dumps({"phase": "a", "step": s, "public_loss": 3.0}) + "\n" for s in (10, 20, 30)))
    phase: Any = SimpleNamespace(name="a", settings=SimpleNamespace(plateau=Plateau(patience=2)))
    folder: Any = SimpleNamespace(public_log=log, end_file=tmp_path / "end_phase")

    ending = Ending.of(phase, folder, alone(), 20)
    assert ending.reason() is None
    ending.measured(30, {"zero_shot_colour": 0.5})
    assert ending.reason() is None
    ending.measured(30, {"public_loss": 3.5})
    assert ending.reason() == "the public loss has not fallen below 3 at 2 checkpoints in a row"


def test_a_file_ends_the_phases_that_it_names_on_all_ranks_and_for_good(tmp_path: Path) -> None:
    file = tmp_path / "end_phase"
    assert not asked_for(file, "warm")
    ending = Ending("warm", file, alone(), None)
    assert ending.reason() is None
    file.write_text("other\nwarm\n")
    assert ending.reason() == "end_phase names it" and ending.reason() is not None
    assert not asked_for(file, "war"), "whole names alone"
    assert on_ranks(2, lambda ranks: Ending("warm", file, ranks, None).reason()) == ["end_phase names it"] * 2


def test_a_private_phase_that_ended_early_claims_its_planned_budget(tmp_path: Path) -> None:
    plan = plan_for(steps=6)
    journal = Journal(Ledger.open(tmp_path / "ledger.jsonl"))
    journal.start_run("toy", "check", False, {})
    journal.declare_plan(0, "private", plan, {"accountant": "pld"})
    journal.begin_segment(0, "config", "data", 0, "first", salt="salt")
    step, _ = step_of(alone(), journal, plan)
    for number in (1, 2, 3):
        step.run(number, 1e-3)
    journal.finish()
    history, _ = History.read(tmp_path / "ledger.jsonl")
    assert history.why_budget_is_claimed() == "phase private ended after 3 of 6 planned steps"
    assert history.epsilon() < plan.epsilon_budget
