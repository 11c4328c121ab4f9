"""The state that launch scripts read: how a start ended, or that it was training when it was killed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmuration.accounting.keys import KeyFileError
from murmuration.data.text.encoder import TextEncoder, word_tokenizer
from murmuration.model.settings import ModelSettings
from murmuration.train.run.run import FAILED, RESUMABLE, TRAINING, tell_state
from murmuration.train.storage.model_note import ModelNote, ModelNoteError, copy_named_files, described, note_of
from murmuration.train.storage.run_dir import PublicTimes, RunDir

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


# The run directory's key: kills around the ledger's first line.


def test_a_kill_around_the_first_ledger_line_leaves_a_run_that_can_start(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    first = run_dir.run_key(fresh=True, debug_seed=None)
    assert not run_dir.key.exists()
    # Killed before the ledger's first line: nothing was drawn, so a new key takes its place.
    second = run_dir.run_key(fresh=True, debug_seed=None)
    assert first.secret != second.secret
    # Killed after it, before the key had its name: the ledger knows the key, and so does the next start.
    assert run_dir.run_key(fresh=False, debug_seed=None).secret == second.secret
    assert run_dir.key.exists() and not run_dir.new_key.exists()
    # A named key without a ledger means that the ledger was removed.
    with pytest.raises(KeyFileError, match="exists without a ledger"):
        run_dir.run_key(fresh=True, debug_seed=None)


# What a checkpoint says of its model and tokenizer, and what is made of a note that is damaged.


SIZES = ModelSettings(family="captioner", image_size=16, patch_size=8, width=24, depth=2, heads=3, text_length=8)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return word_tokenizer(["red", "blue"], tmp_path / "words.json")


def told(source: Path, root: Path) -> dict[str, Any]:
    root.mkdir(exist_ok=True)
    manifest = {"step": 3} | described(SIZES, TextEncoder(source, 8), str(source), root)
    return json.loads(json.dumps(manifest))


def test_model_and_tokenizer_come_back_from_an_exports_folder(source: Path, tmp_path: Path) -> None:
    manifest = told(source, tmp_path / "run")
    (tmp_path / "out").mkdir()
    copy_named_files(manifest, tmp_path / "run", tmp_path / "out")
    source.unlink()
    note = ModelNote.inside(note_of(manifest), tmp_path / "out")
    assert note is not None and note.settings == SIZES and note.tokenizer is not None
    assert TextEncoder(note.tokenizer, 8).words("red")
    assert str(tmp_path) not in json.dumps(manifest), "a path of the machine that trained"


def test_a_built_in_tokenizer_is_named_and_a_model_without_text_has_none(tmp_path: Path) -> None:
    manifest = described(SIZES, TextEncoder("clip:1024", 8), "clip:1024", tmp_path)
    note = ModelNote.inside(manifest, tmp_path)
    assert note is not None and note.tokenizer == "clip:1024" and not [*tmp_path.iterdir()]
    silent = ModelNote.inside(described(SIZES, None, None, tmp_path), tmp_path)
    assert silent is not None and silent.tokenizer is None


def test_a_tokenizer_that_is_gone_does_not_cost_the_checkpoint(source: Path, tmp_path: Path) -> None:
    text = TextEncoder(source, 8)
    source.write_text(source.read_text() + "\n")
    assert "tokenizer" not in described(SIZES, text, str(source), tmp_path)
    source.unlink()
    assert "tokenizer" not in described(SIZES, text, str(source), tmp_path)


def test_a_manifest_of_an_earlier_version_has_no_note(tmp_path: Path) -> None:
    assert ModelNote.inside({"step": 3}, tmp_path) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"model": {"family": "captioner", "heads": "many"}},
        {"model": 3},
        {"tokenizer": 3},
        {"tokenizer": {"built_in": "/etc/passwd"}},
        {"tokenizer": {"file": "../words.json", "sha256": "0"}},
        {"tokenizer": {"file": "tokenizer-0.json", "sha256": "0"}},
        {"tokenizer": {"file": "words.json", "sha256": "0"}},
    ],
)
def test_a_damaged_note_is_refused_in_one_sentence(source: Path, tmp_path: Path, damage: dict[str, Any]) -> None:
    manifest = told(source, tmp_path / "run") | damage
    with pytest.raises(ModelNoteError, match="export it again, or pass --config"):
        ModelNote.inside(manifest, tmp_path / "run")
