"""Decoding processes read records themselves where they lie on this machine: the same records, whatever the index."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.decode.class_list import ClassList
from murmuration.data.decode.fields import ClassFilter
from murmuration.data.index.folders import build_folder
from murmuration.data.index.public_split import SplitIndex
from murmuration.data.index.right_labels import RightLabels, RightlyLabelled
from murmuration.data.index.selection import Selection
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import RecordIndex, ShardError
from murmuration.data.store.stored import Stored
from murmuration.data.text.encoder import TextEncoder

KEY = b"k" * 32
LIST = ClassList(("cat", "dog"))
SPEC = DataSpec(
    20, "random_resized_crop", mask_patches=5, drop_keys=True,
    labels=("cls", "age"), target="cls", weight="w", classes=2,
)  # fmt: skip
BY_FOLDER = replace(SPEC, labels=("cls",), weight=None)
Picture = Callable[..., bytes]


@pytest.fixture
def sets(tmp_path: Path, write_tar: Callable[..., Path], picture: Picture) -> dict[str, RecordIndex]:
    for number in range(40):
        path = tmp_path / "folder" / ("dog" if number % 3 else "cat") / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, 20 + number) if number % 11 else b"nothing")
    for shard in range(2):
        samples = []
        for number in range(20 * shard, 20 * shard + 20):
            about = {"age": number, "w": number / 7, "captions": [f"one {number}", f"two {number}", f"red {number}"]}
            samples.append(
                {
                    "__key__": f"{number:04d}", "jpg": picture(number, 20 + number) if number % 7 else b"",
                    "json": json.dumps(about).encode() if number % 5 else b"{", "cls": str(number % 3 % 2).encode(),
                }
            )  # fmt: skip
        write_tar(tmp_path / "shards" / f"{shard}.tar", samples)
    shards, folder = build(tmp_path / "shards"), build_folder(tmp_path / "folder")
    labels = RightLabels({f"{number:04d}": (number % 2,) for number in range(40)})
    return {
        "shards": shards, "folder": folder, "contents": build_folder(tmp_path / "folder", contents=True),
        "split": SplitIndex(shards, 0.3, public=False), "classes": shards.without(
            ClassFilter(ClassList(("dog",)), "cls", LIST)
        ), "selection": Selection(folder, np.arange(30)[::-1].copy()),
        "boxes": Selection(shards, np.arange(40), [(2, 3, 18, 17)] * 40), "right": RightlyLabelled(shards, labels),
    }  # fmt: skip


HERE = ("selection", "boxes", "right")
"""Where the members of a record may be more than its bytes, the trainer reads it."""


def reader(index: RecordIndex, name: str, workers: int) -> BatchReader:
    spec = BY_FOLDER if name in ("folder", "contents", "selection") else SPEC
    spec = replace(spec, right_classes=2 if name == "right" else 0)
    text = TextEncoder("clip:4096", 9) if spec is not BY_FOLDER and name != "selection" and spec.weight else None
    reading = ReadOptions(workers, workers + 2)
    return BatchReader(index, spec, text, KEY, b"m" * 32, b"d" * 32, reading=reading, slots=SlotRows(views=2))


@pytest.mark.parametrize(
    "name", ["shards", "folder", "contents", "split", "classes", "selection", "boxes", "right"]
)  # fmt: skip
def test_the_same_batches_by_whomever_they_are_read(name: str, sets: dict[str, RecordIndex]) -> None:
    index = sets[name]
    ids = np.array([-1, *range(index.records), -1])
    here, there = reader(index, name, 0), reader(index, name, 2)
    asked: list[int] = []
    read = there._records.read
    there._records.read = lambda record: asked.append(record) or read(record)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        for step in (1, 2):
            expected, got = here.fetch(ids, step), there.fetch(ids, step)
            assert got.bad == expected.bad and expected.bad and torch.equal(got.batch.present, expected.batch.present)
            one, other = expected.batch.to("cpu").inputs, got.batch.to("cpu").inputs
            assert one.keys() == other.keys() and all(torch.equal(one[each], other[each]) for each in one)
        assert sorted(asked) == (sorted(2 * list(range(index.records))) if name in HERE else [])
    finally:
        there.close()


def test_what_a_process_cannot_read_is_read_again_with_patience(sets: dict[str, RecordIndex]) -> None:
    """A store that fails for a moment leaves no record out: the trainer reads those again, and only those."""
    index = sets["shards"]
    assert isinstance(index, ShardIndex)
    expected = reader(index, "shards", 0).fetch(np.arange(40), 1)
    there, asked, where = reader(index, "shards", 2), list[int](), index.stored
    read = there._records.read
    there._records.read = lambda record: asked.append(record) or read(record)  # pyright: ignore[reportAttributeAccessIssue]

    def stored(record: int) -> Stored | None:
        found = where(record)
        assert found is not None
        wrong = {3: replace(found, place=found.place.parent / "gone"), 8: replace(found, end=found.end + 512)}  # pyright: ignore
        return wrong.get(record, found)

    index.stored = stored  # pyright: ignore[reportAttributeAccessIssue]
    try:
        got = there.fetch(np.arange(40), 1)
    finally:
        there.close()
    assert sorted(asked) == [3, 8] and got.bad == expected.bad
    tensors = zip(got.batch.tensors(), expected.batch.tensors(), strict=True)
    assert all(torch.equal(one, other) for one, other in tensors)


def test_what_lies_elsewhere_is_read_as_many_at_a_time_as_asked(sets: dict[str, RecordIndex]) -> None:
    """A store answers slowly: however few processes decode, reading must not wait for them."""
    index, at_once = sets["shards"], 12
    assert isinstance(index, ShardIndex)
    index.stored = lambda record: None  # pyright: ignore[reportAttributeAccessIssue]  # as of a URL
    expected = reader(index, "shards", 0).fetch(np.arange(40), 1)
    there = BatchReader(
        index,
        SPEC,
        TextEncoder("clip:4096", 9),
        KEY,
        b"m" * 32,
        b"d" * 32,
        reading=ReadOptions(1, at_once),
        slots=SlotRows(views=2),
    )
    met, read = threading.Barrier(at_once), there._records.read

    def together(record: int) -> dict[str, bytes]:
        if record < at_once:
            met.wait(20)
        return read(record)

    there._records.read = together  # pyright: ignore[reportAttributeAccessIssue]
    try:
        got = there.fetch(np.arange(40), 1)
    finally:
        there.close()
    assert got.bad == expected.bad and torch.equal(got.batch.present, expected.batch.present)


def test_what_nobody_can_read_stops_the_run_with_the_same_words(sets: dict[str, RecordIndex], tmp_path: Path) -> None:
    index = sets["contents"]
    (tmp_path / "folder" / "cat" / "3.jpg").write_bytes(bytes((tmp_path / "folder" / "cat" / "3.jpg").stat().st_size))
    told = []
    for workers in (0, 2):
        with pytest.raises(ShardError, match="changed since it was indexed") as error:
            found = reader(index, "contents", workers)
            found._records._patience = replace(found._records._patience, tries=2, first_pause=0.0)  # pyright: ignore
            try:
                found.fetch(np.arange(index.records), 1)
            finally:
                found.close()
        told.append(str(error.value))
    assert told[0] == told[1] and "3.jpg" not in told[0]
