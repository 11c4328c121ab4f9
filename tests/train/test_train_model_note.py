"""What a checkpoint says of its model and tokenizer, and what is made of a note that is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from murmuration.data.text.encoder import TextEncoder, word_tokenizer
from murmuration.model.settings import ModelSettings
from murmuration.train.storage.model_note import ModelNote, ModelNoteError, copy_named_files, described, note_of

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
