"""Phases on pictures made by rule: what the config accepts, and that they open without a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.data.batch.reader import BatchReader
from murmuration.data.synthetic.index import SyntheticIndex
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.recipe.ready_phase import prepare

MODEL = {
    "family": "captioner", "size": "custom", "image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2,
    "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2, "mae_decoder_width": 16, "mae_decoder_depth": 1,
    "mae_decoder_heads": 2, "text_length": 24, "vocabulary": 1024,
}  # fmt: skip


def _load(tmp_path: Path, data: dict[str, Any], **phase: Any) -> Config:
    whole = {
        "name": "warm-start", "data": data, "objective": "mae", "batch": 4, "schedule": {"peak": 1e-3}, "steps": 2,
    } | phase  # fmt: skip
    (tmp_path / "run.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 2, "model": MODEL, "phases": [whole]})
    )
    return load(tmp_path / "run.json", [])


def test_a_synthetic_phase_opens_and_reads(tmp_path: Path) -> None:
    config = _load(tmp_path, {"source": "synthetic", "kind": "spectrum", "records": 10, "seed": 3, "size": 24})
    phase = prepare(config)[0]
    assert isinstance(phase.index, SyntheticIndex) and phase.index.side == 24 and phase.index.records == 10
    assert phase.settings.data.public and not phase.private
    batch = BatchReader(phase.index, phase.data_spec(augment=True), mask_key=b"m" * 32).read(np.array([0, 9, -1]), 1)
    assert batch.present.tolist() == [True, True, False] and batch.inputs["images"].shape == (3, 3, 16, 16)


def test_captioned_shapes_train_a_captioner_with_clips_words(tmp_path: Path) -> None:
    data = {"source": "synthetic", "kind": "shapes", "records": 8, "tokenizer": "clip:1024"}
    phase = prepare(_load(tmp_path, data, objective="caption"))[0]
    assert phase.text is not None and phase.text.vocabulary == 1024
    batch = BatchReader(phase.index, phase.data_spec(augment=True), phase.text).read(np.arange(8), 1)
    assert batch.present.all() and (batch.inputs["tokens"] == phase.text.end).any(dim=1).all()


def test_the_seed_is_part_of_the_identity(tmp_path: Path) -> None:
    digests = set()
    for change in ({}, {"seed": 2}, {"kind": "mixed"}, {"records": 99}, {"size": 20}):
        config = _load(tmp_path, {"source": "synthetic", "kind": "shaders", "records": 100, "seed": 1, **change})
        digests.add((config.digest(0, {}), prepare(config)[0].index.manifest_digest))
    assert len({pair[0] for pair in digests}) == len({pair[1] for pair in digests}) == 5


def test_more_per_step_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exceeds the 3 records"):
        prepare(_load(tmp_path, {"source": "synthetic", "records": 3}))


def test_names_of_tokenizers_are_not_made_into_paths(tmp_path: Path) -> None:
    for name, expected in (("clip:515", "clip:515"), ("words.json", str(tmp_path / "words.json"))):
        config = _load(tmp_path, {"path": "clip", "tokenizer": name}, objective="caption")
        data: Any = config.phases[0].data
        assert data.tokenizer == expected and data.path == str(tmp_path / "clip")
