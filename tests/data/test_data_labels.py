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
from murmuration.data.decode.class_list import ClassList
from murmuration.data.draw.stream import StreamEpochs, StreamIndex
from murmuration.data.index.folders import build_folder
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import ShardError

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


def test_a_field_of_the_json_can_name_the_class_as_the_list_does(
    tmp_path: Path, write_tar: Callable[..., Path], picture: Pictures
) -> None:
    """A run whose records all were bad would spend its budget on noise, and must not say so."""
    fields = [{"kind": "cat"}, {"kind": " 2 "}, {"kind": 2}, {"kind": "0"}, {"kind": "dog"}]
    samples = [
        {"__key__": str(i), "jpg": picture(i), "json": json.dumps(each).encode()} for i, each in enumerate(fields)
    ]
    write_tar(tmp_path / "a.tar", samples)
    classes = ClassList(("2", "bird", "cat"))
    spec = DataSpec(16, labels=("kind",), target="kind", classes=3, class_list=classes)
    reader = BatchReader(build(tmp_path), spec)
    batch = reader.read(np.arange(5), 0)
    assert batch.present.tolist() == [True] * 4 + [False]
    assert batch.inputs["labels"].tolist() == [2, 0, 2, 0, 0]
    assert list(reader.bad_reasons.values()) == ["the record's kind is not a whole number or a name on the class list"]


LIST = ClassList(("n02085620", "n01443537", "n01440764", "n09999999"))


def pictures_in(folder: Path, picture: Pictures, names: tuple[str, ...]) -> Path:
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{number}.jpg").write_bytes(picture(number))
    return folder


def test_one_record_alone_in_its_class_does_not_move_the_labels_of_others(tmp_path: Path, picture: Pictures) -> None:
    """By the places of folders it moves all of them; by a list none, and where its name is no class it is bad."""
    one = build_folder(pictures_in(tmp_path / "one", picture, CLASSES))
    more = build_folder(pictures_in(tmp_path / "more", picture, ("n00000001", *CLASSES)))
    spec = replace(SPEC, classes=4)
    by_place = [BatchReader(index, spec).read(np.arange(index.records), 0).inputs["labels"] for index in (one, more)]
    assert not torch.equal(by_place[0], by_place[1][1:])
    spec = replace(spec, class_list=LIST)
    by_list = [BatchReader(index.numbered_by(LIST), spec).read(np.arange(index.records), 0) for index in (one, more)]
    assert by_list[0].inputs["labels"].tolist() == by_list[1].inputs["labels"][1:].tolist() == [2, 1, 0]
    assert by_list[1].present.tolist() == [False, True, True, True]
    assert more.classes[0] == "n00000001" and one.numbered_by(LIST).classes == one.classes


def test_a_cls_may_hold_a_number_or_a_name_of_the_list(
    tmp_path: Path, write_tar: Callable[..., Path], picture: Pictures
) -> None:
    held = [b"3", b"n01443537", b" n02085620\n", b"n0144353", b"4", b"", b"N01443537", b"\xff"]
    samples = [{"__key__": str(i), "jpg": picture(i), "cls": label} for i, label in enumerate(held)]
    write_tar(tmp_path / "a.tar", samples)
    index = build(tmp_path)
    reader = BatchReader(index, replace(SPEC, classes=4, class_list=LIST))
    batch = reader.read(np.arange(8), 0)
    assert batch.present.tolist() == [True] * 3 + [False] * 5
    assert batch.inputs["labels"].tolist() == [3, 1, 0] + [0] * 5
    without = BatchReader(index, replace(SPEC, classes=4)).read(np.arange(8), 0)
    assert without.present.tolist() == [True] + [False] * 7


def test_lists_are_read_from_lines_and_from_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcat\r\n dog \na/abbey\n")
    (tmp_path / "a.json").write_text('["cat", "dog", "a/abbey"]')
    lines, json_list = ClassList.read(tmp_path / "a.txt"), ClassList.read(tmp_path / "a.json")
    assert lines == json_list and lines.names == ("cat", "dog", "a/abbey") and lines.numbers["a/abbey"] == 2
    assert lines.digest == json_list.digest != ClassList(("dog", "cat", "a/abbey")).digest


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "cannot be read"), ("a.txt", b"", "write one name per line"),
        ("a.txt", b"cat\n\ndog", "line 2 names no class"), ("a.txt", b"cat\ndog\ncat", "names cat twice"),
        ("a.txt", b"\xff\xfe", "not a class list"), ("a.json", b"[1]", "not a class list"),
        ("a.json", b"{", "not a class list"), ("a.json", b'{"cat": 1}', "not a class list"),
    ],
)  # fmt: skip
def test_what_is_no_list_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ShardError, match=message):
        ClassList.read(tmp_path / name)
