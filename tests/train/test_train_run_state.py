"""The state that launch scripts read: how a start ended, or that it was training when it was killed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmuration.train.run.run import FAILED, RESUMABLE, TRAINING, tell_state
from murmuration.train.storage.public_times import PublicTimes
from murmuration.train.storage.run_dir import RunDir

STARTED = 1_700_000_000


def run_of(folder: RunDir, main: bool) -> Any:
    history = SimpleNamespace(last_checkpoint=lambda: None)
    return SimpleNamespace(
        name="run",
        folder=folder,
        board=SimpleNamespace(latest=None),
        journal=SimpleNamespace(history=history) if main else None,
        checkpoints=SimpleNamespace(times=PublicTimes(STARTED)),
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_only_the_main_rank_tells_how_far_a_run_is_and_another_only_that_it_failed(folder: RunDir) -> None:
    main, other = run_of(folder, True), run_of(folder, False)
    assert folder.state() == {}
    tell_state(main, status=TRAINING)
    first = folder.state()
    tell_state(other, status=TRAINING)
    tell_state(other, status=RESUMABLE, error="DistBackendError")
    assert folder.state() == first and first["status"] == TRAINING
    tell_state(other, status=FAILED, error="KeyError")
    assert (folder.state()["status"], folder.state()["error"]) == (FAILED, "KeyError")
    assert folder.state_file.stat().st_mtime == STARTED, "when it failed is not public"


def test_a_rank_that_lost_another_does_not_hide_why(folder: RunDir) -> None:
    """Otherwise a fault of one rank would be resumed again and again."""
    main, other = run_of(folder, True), run_of(folder, False)
    tell_state(main, status=TRAINING)
    tell_state(other, status=FAILED, error="KeyError")
    tell_state(main, status=RESUMABLE, error="RuntimeError")
    assert folder.state()["status"] == FAILED
    tell_state(main, status=TRAINING)  # the next start
    tell_state(main, status=RESUMABLE, error="RuntimeError")
    assert folder.state()["status"] == RESUMABLE


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_state_that_cannot_be_read_is_none(folder: RunDir, text: bytes) -> None:
    folder.state_file.write_bytes(text)
    assert folder.state() == {}
