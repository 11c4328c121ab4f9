"""ReaL: which classes are right for a record, by the name of its file or its key in a shard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmuration.data.batch.reader import RIGHT_CLASSES, BatchReader, DataSpec
from murmuration.data.index.folders import FolderIndex, build_folder
from murmuration.data.index.right_labels import RightLabels, RightlyLabelled
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import RecordIndex, ShardError
from tests.support.tars import png, tar

CLASSES = ("cat", "dog", "owl")
SPEC = DataSpec(8, labels=("cls",), target="cls", right_classes=len(CLASSES))


@pytest.fixture
def folder(tmp_path: Path) -> FolderIndex:
    for name in ("cat/1.png", "cat/2.png", "dog/1.png", "owl/ILSVRC2012_val_00000002.png"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(png())
    return build_folder(tmp_path / "set")


def read(tmp_path: Path, given: Any) -> RightLabels:
    (tmp_path / "right.json").write_text(json.dumps(given))
    return RightLabels.read(tmp_path / "right.json", CLASSES, len(CLASSES))


def found(index: RecordIndex, labels: RightLabels) -> list[list[int]]:
    """The numbers of the right classes of every record, as a model's inputs have them."""
    batch = BatchReader(RightlyLabelled(index, labels), SPEC).read(np.array([*range(index.records), -1]), 0)
    right = batch.inputs[RIGHT_CLASSES]
    assert right.shape == (index.records + 1, 3) and right.dtype == torch.bool and not right[-1].any()
    assert batch.present[:-1].all() and batch.inputs["labels"][: index.records].tolist() == [0, 0, 1, 2]
    return [row.nonzero().flatten().tolist() for row in right[:-1]]


def test_pictures_of_folders_are_found_by_their_path_or_by_their_name_alone(
    tmp_path: Path, folder: FolderIndex
) -> None:
    labels = read(tmp_path, {"cat/1.png": ["cat", 2], "dog/1": [1], "2": [0, 1, 1], "elsewhere": [2]})
    assert found(folder, labels) == [[0, 2], [0, 1], [1], []]


def test_the_published_list_counts_the_pictures_of_the_validation_set(tmp_path: Path, folder: FolderIndex) -> None:
    assert found(folder, read(tmp_path, [[0], [1, 2], []])) == [[], [], [], [1, 2]]


def test_records_of_shards_are_found_by_their_key(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    keys = {"a/x": b"0", "a/y": b"0", "b/x": b"1", "ILSVRC2012_val_00000002": b"2"}
    records = ((key, {"png": png(), "cls": told}) for key, told in keys.items())
    (tmp_path / "shards" / "0.tar").write_bytes(tar(records))
    build(tmp_path / "shards")
    index = ShardIndex.open(tmp_path / "shards")
    assert found(index, read(tmp_path, {"a/x": [2], "x": [1], "y.png": ["owl"]})) == [[2], [2], [1], []]
    assert found(index, read(tmp_path, [[0], [1, 2]])) == [[], [], [], [1, 2]]


@pytest.mark.parametrize(
    "given",
    [7, {"1": 2}, {"1": ["cow"]}, {"1": [3]}, {"1": [-1]}, {"1": [True]}, {"1": [0.0]}, {"1": [[0]]}, [0], [None]],
    ids=json.dumps,
)
def test_a_list_of_something_else_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ShardError, match=r"right\.json: .*write"):
        read(tmp_path, given)


def test_a_list_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"cannot be read .*name another"):
        RightLabels.read(tmp_path / "none.json", CLASSES, 3)
    (tmp_path / "torn.json").write_text('{"1": [0')
    with pytest.raises(ShardError, match="not a list of right labels"):
        RightLabels.read(tmp_path / "torn.json", CLASSES, 3)


def test_features_that_were_kept_before_there_were_right_labels_are_still_found() -> None:
    """Their folder's name is a digest of how records are read."""
    assert "right" not in repr(DataSpec(8)) and repr(SPEC) == repr(DataSpec(8, labels=("cls",), target="cls"))
