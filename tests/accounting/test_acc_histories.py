"""The machine of random histories finds no fault in the journal, and finds those that are planted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from murmuration.accounting.keys import KeyFileError
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from tests.accounting.histories import Runs
from tests.support.acc_world import begin, train

BOUNDS = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_random_histories() -> None:
    run_state_machine_as_test(Runs, settings=BOUNDS)


def test_a_checkpoint_without_its_line_is_an_orphan_once_its_steps_were_made_again(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.checkpointed(0, 0, "start")
    train(journal, range(1, 3))
    orphan = journal.ledger.length  # saved after step 2, and killed before its line
    journal.admit_checkpoint(0, 2, "orphan", orphan)
    journal.resumed(0, 2)
    journal.admit_checkpoint(0, 2, "orphan", orphan)  # killed again, right after it was gone on from
    journal.resumed(0, 0)  # somebody goes back by hand, and makes the steps again on other ranks
    with pytest.raises(LedgerError, match="does not know this checkpoint"):
        journal.admit_checkpoint(0, 2, "orphan", orphan)


@pytest.mark.slow
def test_more_random_histories() -> None:
    run_state_machine_as_test(Runs, settings=settings(BOUNDS, max_examples=800, stateful_step_count=60))


def first_rule(self: Journal, phase: int, step: int, config_digest: str) -> str | None:
    """How the first version decided: it looked at the last checkpoint's position alone."""
    segments = self.history.segments_of(phase)
    last = self.history.last_checkpoint()
    if not segments:
        return "first"
    if last is not None and (last.phase, last.step) > (phase, step):
        return "rolled back"
    return "the config changed" if segments[-1].config_digest != config_digest else None


def anything_goes(self: History, step_id) -> object:
    return next(s for s in self.segments if (s.phase, s.number) == (step_id.phase, step_id.segment))


class Unleaked(Runs):
    """The same without the claim that a leak of what is stored gives nothing away, which finds some faults first."""

    a_leak_gives_no_key_of_what_was_released = None  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "machine", "error", "said"),
    [
        ("the first rule", Runs, AssertionError, "gives the key of a released update"),
        ("the first rule", Unleaked, LedgerError, r"was opened while step \d had not ended"),
        ("copies unseen", Runs, AssertionError, "gives the key of a released update"),
        ("copies unseen", Unleaked, AssertionError, "share a noise key"),
        # The keys of what lies behind a checkpoint are forgotten, so the journal is not alone.
        ("no rollback", Runs, KeyFileError, r"were forgotten, so none after step \d can be"),
    ],
)
def test_the_machine_catches_planted_faults(
    monkeypatch: pytest.MonkeyPatch, fault: str, machine: type[Runs], error: type[Exception], said: str
) -> None:
    monkeypatch.setattr(History, "_require_current", anything_goes)
    if fault == "the first rule":
        monkeypatch.setattr(Journal, "new_segment_reason", first_rule)
        monkeypatch.setattr(Journal, "note_copied", lambda self, reason: None)
    elif fault == "no rollback":
        monkeypatch.setattr(
            Journal, "new_segment_reason",
            lambda self, phase, step, config: None if self.history.segments_of(phase) else "first",
        )  # fmt: skip
    else:
        monkeypatch.setattr(Journal, "note_copied", lambda self, reason: None)
    quick = settings(BOUNDS, max_examples=4000, phases=(Phase.generate,), report_multiple_bugs=False)
    with pytest.raises(error, match=said):
        run_state_machine_as_test(machine, settings=quick)
