"""Class numbers for a classifier: the same from folders, from .cls members and from a stream; wrong ones are bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import ImageFolder

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.draw.stream import StreamEpochs, StreamIndex
from murmuration.data.index.folders import build_folder
from murmuration.data.index.shard_index import ShardIndex, build

Pictures = Callable[..., bytes]
CLASSES = ("n01440764", "n01443537", "n02085620")
SPEC = DataSpec(16, labels=("cls",), target="cls", classes=3)


def test_folders_number_their_classes_by_name_as_torchvision_does(tmp_path: Path, picture: Pictures) -> None:
    for number, name in enumerate((*reversed(CLASSES), *CLASSES)):
        (tmp_path / "train" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name / f"{name}_{number}.JPEG").write_bytes(picture(number))
    theirs = ImageFolder(str(tmp_path / "train"))
    index = build_folder(tmp_path / "train")
    assert index.classes == tuple(theirs.classes) == CLASSES
    batch = BatchReader(index, SPEC).read(np.array([0, 2, -1, 5]), 0)
    assert batch.inputs["labels"].dtype == torch.int64
    assert batch.inputs["labels"].tolist() == [theirs.targets[0], theirs.targets[2], 0, theirs.targets[5]]
    assert batch.present.tolist() == [True, True, False, True]
    assert set(BatchReader(index, DataSpec(16)).read(np.array([0]), 0).inputs) == {"images"}


@pytest.fixture
def labelled(tmp_path: Path, write_tar: Callable[..., Path], picture: Pictures) -> ShardIndex:
    """Good ones first, then each way of being none."""
    members = [b"0", b"2\n", b" 1", b"", b"3", b"-1", b"1.0", b"1_0", "٢".encode(), b"cat", b"9" * 30, None]
    samples = []
    for number, label in enumerate(members):
        samples.append(
            {"__key__": f"{number:02d}", "jpg": picture(number)} | ({"cls": label} if label is not None else {})
        )
    write_tar(tmp_path / "labelled" / "a.tar", samples)
    return build(tmp_path / "labelled")


def test_shards_carry_them_as_cls_and_a_record_without_a_usable_one_is_bad(labelled: ShardIndex) -> None:
    reader = BatchReader(labelled, SPEC)
    batch = reader.read(np.arange(12), 0)
    assert batch.inputs["labels"].tolist() == [0, 2, 1] + [0] * 9
    assert batch.present.tolist() == [True] * 3 + [False] * 9
    assert not batch.inputs["images"][3:].any(), "a bad record is an empty slot"
    assert sorted(reader.bad_records) == list(range(3, 12))
    assert all("class" in reason or "cls" in reason for reason in reader.bad_reasons.values())
    assert BatchReader(labelled, replace(SPEC, classes=4)).read(np.array([4]), 0).inputs["labels"].tolist() == [3]


def test_a_stream_carries_them_too(labelled: ShardIndex) -> None:
    stream = StreamIndex(str(labelled.folder.parent), 1, 4).begin(b"k", 12)
    batch = BatchReader(stream, SPEC).read(StreamEpochs(1, 12).ids(0), 1)
    assert sorted(batch.inputs["labels"][batch.present].tolist()) == [0, 1, 2]


def test_a_field_of_the_json_can_be_the_class_and_wild_numbers_are_bad(
    tmp_path: Path, write_tar: Callable[..., Path], picture: Pictures
) -> None:
    numbers = [{"kind": 2, "age": -5}, {"kind": 3, "age": 0}, {"kind": 1, "age": 10**30}, {"kind": -1, "age": 1}]
    numbers += [{"kind": 1}, {"kind": float("inf"), "age": 1}, {"kind": 1e300, "age": 1}]
    samples = [
        {"__key__": str(i), "jpg": picture(i), "json": json.dumps(fields).encode()} for i, fields in enumerate(numbers)
    ]
    write_tar(tmp_path / "a.tar", samples)
    reader = BatchReader(build(tmp_path), DataSpec(16, labels=("kind", "age"), target="kind", classes=3))
    batch = reader.read(np.arange(7), 0)
    assert batch.present.tolist() == [True] + [False] * 6
    assert batch.inputs["labels"].tolist() == [2] + [0] * 6 and batch.inputs["age"].tolist() == [-5] + [0] * 6
    assert "kind" not in batch.inputs


def test_names_do_not_clash() -> None:
    with pytest.raises(ValueError, match="one of the labels"):
        DataSpec(16, labels=("a", "labels"), target="a")
    with pytest.raises(ValueError, match="one of the labels"):
        DataSpec(16, labels=("a",), target="b")
    with pytest.raises(ValueError, match="classes"):
        DataSpec(16, classes=-1)
