"""Which checkpoints are kept and which go; a choice of the best is one by outputs: the planned budget is claimed."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.storage.checkpoint import Checkpoints, Keep, KeptCheckpoint, Position, pointer_text
from tests.support.checkpoint_world import HEADER, damage, save, stored, trained
from tests.support.train_helpers import alone

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


def folders(path: Path) -> list[str]:
    return sorted(each.name for each in path.glob("phase*"))


def test_what_a_kill_left_goes_before_its_steps_are_made_again(tmp_path: Path) -> None:
    """On other ranks they round otherwise: two results with the same noise must not lie side by side."""
    engine = trained(alone())
    checkpoints = Checkpoints(tmp_path, alone(), Keep())
    digest = checkpoints.save(Position(0, 2), engine, 0, HEADER)
    shutil.copytree(tmp_path / "phase00-step00000002", tmp_path / "phase00-step00000004")  # renamed, never named
    (tmp_path / ".phase00-step00000006.tmp").mkdir()
    (tmp_path / ".phase00-step00000006.tmp" / "piece-00000-of-00001.safetensors").write_bytes(b"weights")
    assert checkpoints.recover([KeptCheckpoint(0, 2, digest)]) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "phase00-step00000002"]
    (tmp_path / "latest").unlink()
    assert checkpoints.recover([KeptCheckpoint(0, 2, digest)]) == f"{tmp_path / 'latest'} is lost"
    assert stored(checkpoints, engine)[0] == 2
    (tmp_path / "latest").unlink()
    assert checkpoints.recover([]) is None
    assert not list(tmp_path.iterdir()), "before the ledger names any checkpoint, none may be gone on from"


def test_after_a_rollback_the_abandoned_one_goes_although_its_name_is_later(tmp_path: Path) -> None:
    engine = trained(alone())
    for step in (10, 20, 30):
        save(tmp_path, engine, step, Keep(2))
    damage(tmp_path / Position(0, 30).folder / "manifest.json", "missing")
    checkpoints = Checkpoints(tmp_path, alone(), Keep(2))
    assert checkpoints.fall_back().position.step == 20
    save(tmp_path, engine, 25, Keep(2))
    assert folders(tmp_path) == [Position(0, step).folder for step in (20, 25)]
    assert stored(checkpoints, engine)[0] == 25


def test_retention_keeps_the_last_the_regular_and_the_best(tmp_path: Path) -> None:
    engine = trained(alone())
    keep = Keep(last=2, every=30, best="public_loss")
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5, 50: 2.6, 60: 1.5, 70: 1.4}
    for step, loss in losses.items():
        save(tmp_path, engine, step, keep, public_loss=loss)
    assert folders(tmp_path) == [Position(0, step).folder for step in (20, 30, 60, 70)]
    best = keep.best_of(Checkpoints.listed(tmp_path))
    assert {phase: entry.step for phase, entry in best.items()} == {0: 20}
    accurate = Keep(best="zero_shot_colour")
    for step, right in ((80, 0.5), (90, 0.9), (100, 0.1), (110, 0.2)):
        save(tmp_path, engine, step, accurate, zero_shot_colour=right)
    assert folders(tmp_path) == [Position(0, step).folder for step in (90, 100, 110)]


def test_folders_of_other_names_are_never_retired(tmp_path: Path) -> None:
    engine = trained(alone())
    copy = tmp_path / f"{Position(0, 1).folder}-my-copy"
    copy.mkdir()
    for step in (1, 2, 3):
        save(tmp_path, engine, step, Keep(1))
    assert copy.exists() and folders(tmp_path) == [copy.name, Position(0, 3).folder]


def test_a_step_of_nine_digits_is_retired_like_any_other(tmp_path: Path) -> None:
    engine = trained(alone())
    for step in (99_999_999, 100_000_000, 100_000_001):
        save(tmp_path, engine, step, Keep(1))
    assert folders(tmp_path) == [Position(0, 100_000_001).folder]


def test_a_loss_that_is_not_finite_is_never_the_best_and_leaves_a_pointer_that_can_be_read(tmp_path: Path) -> None:
    losses = {40: math.nan, 30: 0.5, 20: math.inf, 10: 0.4}
    entries = [KeptCheckpoint(0, step, "0", {"loss": loss}) for step, loss in losses.items()]
    (tmp_path / "latest").write_bytes(pointer_text(entries))
    listed = Checkpoints.listed(tmp_path)
    assert {entry.step: entry.public for entry in listed} == {40: {}, 30: {"loss": 0.5}, 20: {}, 10: {"loss": 0.4}}
    for known in (entries, listed):
        assert [entry.step for entry in Keep(last=1, best="loss").chosen(known)] == [40, 10]


def test_each_phase_has_a_best_of_its_own_and_of_equals_the_newest() -> None:
    losses = {(1, 20): 5.0, (1, 10): 3.0, (0, 30): 1.0, (0, 20): 1.0, (0, 10): 2.0}
    entries = [KeptCheckpoint(phase, step, "", {"public_loss": loss}) for (phase, step), loss in losses.items()]
    best = Keep(best="public_loss").best_of(entries)
    assert {phase: entry.step for phase, entry in best.items()} == {0: 30, 1: 10}


def test_the_regular_ones_begin_with_the_first_that_was_trained() -> None:
    entries = [KeptCheckpoint(0, step, "") for step in (25, 20, 15, 10, 0)]
    assert [entry.step for entry in Keep(last=1, every=10).chosen(entries)] == [25, 20, 10]
