"""Where a run continues if its pointer is lost: where its ledger says, and at nothing older unless that is declared."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from murmuration.accounting.keys import RunKey, store
from murmuration.accounting.ledger.chain import Ledger, LedgerError
from murmuration.accounting.ledger.journal import Journal
from murmuration.train.run.board import Board
from murmuration.train.run.context import RunContext
from murmuration.train.run.run import _require_same_run
from murmuration.train.storage.checkpoint import CheckpointError, Checkpoints, Keep, Position, pointer_text
from murmuration.train.storage.open_run import OpenRun
from murmuration.train.storage.run_dir import RunDir
from tests.support.acc_world import CONFIG, SIGNER, train, whole_run
from tests.support.step_world import journal_at, step_of
from tests.support.train_helpers import alone, plan_for

LOSSES = {2: 1.0, 4: 3.0, 6: 2.0}


@dataclass
class Run:
    """Six private steps with a checkpoint at every other one; `resume` is what a start does before anything else."""

    root: Path
    keep: Keep = field(default_factory=lambda: Keep(2))
    said: list[str] = field(default_factory=list)

    def trained(self) -> Run:
        plan = plan_for()
        run_dir = RunDir(self.root)
        run_dir.prepare()
        journal = journal_at(self.root, plan)
        step, engine = step_of(alone(), journal, plan)
        board, checkpoints = Board(run_dir, main=True), Checkpoints(run_dir.checkpoints, alone(), self.keep)
        for number in range(1, 7):
            step.run(number, 1e-2)
            if number in LOSSES:
                measured = {"public_loss": LOSSES[number]}
                header = {"ledger": {"length": journal.ledger.length, "head": journal.ledger.head}}
                checkpoints.begin(Position(0, number), engine, 0, header)
                checkpoints.settle(lambda digest, number=number: journal.checkpointed(0, number, digest), measured)
                board.public("private", number, measured)
        board.close()
        journal.ledger.close()
        return self

    @property
    def folder(self) -> Path:
        return self.root / "checkpoints"

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def resume(self, new_segment: str | None = None) -> tuple[int | None, str | None]:
        """The step that it continues from, and why its next steps need a new segment."""
        journal = Journal(Ledger.open(self.root / "ledger.jsonl"))
        run = RunContext(
            "run", RunDir(self.root), alone(), journal, None, Checkpoints(self.folder, alone(), self.keep), new_segment,
            config=SimpleNamespace(run=SimpleNamespace(keep_best=self.keep.best)),  # pyright: ignore
            board=SimpleNamespace(say=self.said.append), stop=None,  # pyright: ignore
        )  # fmt: skip
        try:
            loaded = run.latest()
            if loaded is None:
                return None, None
            return loaded.position.step, journal.new_segment_reason(0, loaded.position.step, "config")
        finally:
            journal.ledger.close()


def lose(pointer: Path) -> None:
    pointer.unlink()


def tear(pointer: Path) -> None:
    pointer.write_bytes(pointer.read_bytes()[:40])


def nest(pointer: Path) -> None:
    pointer.write_text("[" * 50_000)


def grow(pointer: Path) -> None:
    pointer.write_text(
        '{"folder": "phase00-step00000006", "manifest_sha256": "a", "public": {"x": 1' + "0" * 5000 + "}}"
    )


@pytest.mark.parametrize("damage", [lose, tear, nest, grow])
def test_a_lost_or_damaged_pointer_is_rebuilt_from_the_ledger(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    run = Run(tmp_path).trained()
    pointer = run.folder / "latest"
    before, names = Checkpoints.listed(run.folder), run.names()
    assert run.resume() == (6, None) and not run.said
    damage(pointer)
    assert run.resume() == (6, None)
    assert [(entry.folder, entry.manifest_sha256) for entry in Checkpoints.listed(run.folder)] == [
        (entry.folder, entry.manifest_sha256) for entry in before
    ]
    assert run.names() == names and len(run.said) == 1 and "rebuilt from the checkpoints" in run.said[0], run.said
    assert run.resume() == (6, None) and len(run.said) == 1, "that is said once"


def test_a_rebuilt_pointer_knows_the_best_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, Keep(1, best="public_loss")).trained()
    lose(run.folder / "latest")
    assert run.resume() == (6, None)
    assert {entry.step: entry.public["public_loss"] for entry in Checkpoints.listed(run.folder)} == {6: 2.0, 2: 1.0}


def test_an_older_pointer_is_set_right_and_the_newest_checkpoint_stays(tmp_path: Path) -> None:
    run = Run(tmp_path).trained()
    old = [entry for entry in Checkpoints.listed(run.folder) if entry.step == 4]
    (run.folder / "latest").write_bytes(pointer_text(old))
    assert run.resume() == (6, None) and "names an older checkpoint than the ledger" in run.said[0]


@pytest.mark.parametrize("how", ["folder", "manifest", "piece"])
@pytest.mark.parametrize("pointer", ["lost", "whole"])
def test_an_older_checkpoint_is_taken_only_by_a_declared_rollback(tmp_path: Path, how: str, pointer: str) -> None:
    run = Run(tmp_path).trained()
    newest = run.folder / Position(0, 6).folder
    if pointer == "lost":
        lose(run.folder / "latest")
    if how == "folder":
        shutil.rmtree(newest)
    else:
        next(newest.glob("piece*") if how == "piece" else newest.glob("manifest*")).write_bytes(b"{}")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"step00000006.*restore it, or declare --new-segment 'why'"):
            run.resume()
    step, reason = run.resume("the disk lost it")
    assert step == 4 and reason is not None and "rolled back to step 4" in reason
    assert "continuing from phase00-step00000004, and all opened steps stay charged" in run.said[-1]


@pytest.mark.parametrize("lost", [False, True])
def test_steps_are_not_made_again_behind_a_public_phase_that_was_gone_through_again(tmp_path: Path, lost: bool) -> None:
    plan, run_dir = plan_for(), RunDir(tmp_path)
    run_dir.prepare()
    store(RunKey.from_debug_seed(1), run_dir.key)

    def started(new_segment: str | None = None) -> OpenRun:
        journal = Journal(Ledger.open(tmp_path / "ledger.jsonl"))
        kept = Checkpoints(run_dir.checkpoints, alone(), Keep(2))
        return OpenRun("toy", run_dir, alone(), journal, RunKey.from_debug_seed(1), kept, new_segment)

    run, (_, engine) = started(), step_of(alone(), None, plan)
    journal = run.writer
    journal.start_run("toy", "check", True, {}, "hmac-sha256", SIGNER)
    journal.declare_plan(1, "private", plan, {"accountant": "pld"})
    for phase, number in ((0, 2), (1, 0)):
        if phase == 1:
            run.derive(1, run.segment(1, "private", "config", "data", 0))
        header = {"ledger": {"length": journal.ledger.length, "head": journal.ledger.head}}
        run.checkpoints.begin(Position(phase, number), engine, 0, header)
        run.checkpoints.settle(lambda digest, at=(phase, number): journal.checkpointed(*at, digest), {})
    train(journal, range(1, 4), plan, phase=1)
    journal.ledger.close()
    if lost:
        shutil.rmtree(run_dir.checkpoints / Position(1, 0).folder)
    run = started("the disk lost it" if lost else None)
    found = run.latest()
    assert found is not None and (found.position.phase, found.position.step) == ((0, 2) if lost else (1, 0))
    assert run.segment(1, "private", "config", "data", 0).number == (1 if lost else 0)
    train(run.writer, range(1, plan.steps + 1), plan, phase=1)
    assert run.writer.history.steps()[0] == plan.steps + (3 if lost else 0), "opened steps stay charged"


def test_without_any_whole_checkpoint_nothing_begins_anew(tmp_path: Path) -> None:
    run = Run(tmp_path).trained()
    shutil.rmtree(run.folder)
    run.folder.mkdir()
    with pytest.raises(CheckpointError, match="incomplete; restore it, or declare"):
        run.resume()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole; restore one"):
        run.resume("all gone")


@pytest.mark.parametrize("pointer", ["lost", "whole"])
def test_a_ledger_that_was_cut_is_refused_by_the_checkpoints_beside_it(tmp_path: Path, pointer: str) -> None:
    """They are newer than it, and are not thrown away for that."""
    run = Run(tmp_path).trained()
    names = run.names()
    ledger = tmp_path / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    marks = [number for number, line in enumerate(lines) if b'"kind":"checkpoint"' in line]
    ledger.write_bytes(b"".join(lines[: marks[1] + 1]))
    if pointer == "lost":
        lose(run.folder / "latest")
        names.remove("latest")
    with pytest.raises(LedgerError, match="step00000006 was written with another or a longer ledger; restore"):
        run.resume()
    assert run.names() == names


def test_a_damaged_pointer_before_the_first_checkpoint_is_dropped(tmp_path: Path) -> None:
    journal_at(tmp_path, plan_for()).ledger.close()
    run = Run(tmp_path)
    run.folder.mkdir()
    (run.folder / "latest").write_text("{")
    assert run.resume() == (None, None) and run.names() == []


@pytest.mark.parametrize(("number", "digest"), [(0, CONFIG), (0, "a changed config"), (1, CONFIG)])
def test_a_finished_run_is_certified_from_its_own_config_alone(tmp_path: Path, number: int, digest: str) -> None:
    config = SimpleNamespace(digest=lambda phase, contents: digest)
    run = SimpleNamespace(writer=whole_run(tmp_path), config=config, contents=lambda phase: {})
    phases: list = [SimpleNamespace(number=number, name="private")]
    if (number, digest) == (0, CONFIG):
        return _require_same_run(run, phases)  # pyright: ignore
    with pytest.raises(LedgerError, match="'private' was none of it, or was trained with another config or data"):
        _require_same_run(run, phases)  # pyright: ignore
