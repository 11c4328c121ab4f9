"""Slots with several rows: views of a record, records of a unit. What a row holds depends on nobody beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.decode import record as record_module
from murmuration.data.decode.augment import caption_choice, drop_key, mask_noise
from murmuration.data.draw.micro_batch import EMPTY, ROW_SHARE, MicroBatch
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.text.encoder import TextEncoder, word_tokenizer

KEYS = b"a" * 32, b"m" * 32, b"d" * 32
IDS = np.array([3, EMPTY, 7])


def reader(index: ShardIndex, spec: DataSpec | None = None, text: TextEncoder | None = None, **options) -> BatchReader:
    spec = spec or DataSpec(24, "random_resized_crop", mask_patches=9, drop_keys=True)
    return BatchReader(index, spec, text, *KEYS, **options)


def row_of(batch: MicroBatch, row: int) -> dict[str, torch.Tensor]:
    return {name: tensor[row] for name, tensor in batch.inputs.items() if name != ROW_SHARE}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@dataclass
class Patients:
    """Unit u has the records 3u to 3u+2, but for the last, which has only one; from step 2 on, the last ones first."""

    asked: list[tuple[int, bytes, int, int]]

    def chosen(self, unit: int, step_key: bytes, step: int, at_most: int) -> np.ndarray:
        self.asked.append((unit, step_key, step, at_most))
        own = np.arange(3 * unit, min(3 * unit + 3, 7))
        return own[::-1][:at_most] if step > 1 else own[:at_most]


def test_one_view_is_what_it_was_and_says_nothing_of_rows(small_set: ShardIndex) -> None:
    batch = reader(small_set).read(IDS, 5)
    assert ROW_SHARE not in batch.inputs and batch.rows == 1
    assert same(row_of(batch, 2), row_of(reader(small_set, slots=SlotRows(views=1)).read(np.array([7]), 5), 0))


@pytest.mark.parametrize("options", [{}, {"reading": ReadOptions(in_flight=3)}, {"reading": ReadOptions(workers=1)}])
def test_views_of_a_record_have_draws_of_their_own(small_set: ShardIndex, options: dict) -> None:
    made = reader(small_set, slots=SlotRows(views=3), **options)
    batch = made.read(IDS, 5)
    made.close()
    assert batch.rows == 3 and batch.present.tolist() == [True, False, True]
    third = torch.tensor(1 / 3)
    assert torch.equal(batch.inputs[ROW_SHARE], torch.stack([third] * 3 + [torch.zeros(())] * 3 + [third] * 3))
    alone = reader(small_set).read(IDS, 5)
    for slot, record in ((0, 3), (2, 7)):
        assert same(row_of(batch, 3 * slot), row_of(alone, slot)), "the first view is that of a record seen once"
        pictures = batch.inputs["images"][3 * slot : 3 * slot + 3]
        assert not torch.equal(pictures[0], pictures[1]) and not torch.equal(pictures[1], pictures[2])
        for view in range(3):
            row = row_of(batch, 3 * slot + view)
            assert row["drop_key"] == drop_key(KEYS[2], 5, record, view)
            assert row["mask_noise"].tolist() == mask_noise(KEYS[1], 5, record, 9, view).tolist()
    assert not any(bool(tensor[3:6].any()) for tensor in batch.inputs.values()), "an empty slot is zero in all rows"
    fewer = reader(small_set, slots=SlotRows(views=2)).read(IDS, 5)
    beside = reader(small_set, slots=SlotRows(views=3)).read(np.array([7, 3, 9]), 5)
    assert same(row_of(fewer, 1), row_of(batch, 1)), "a view does not depend on how many others there are"
    assert same(row_of(beside, 4), row_of(batch, 1)), "nor on the slot"
    assert len({drop_key(KEYS[2], step, r, v) for step in range(9) for r in range(9) for v in range(9)}) == 729


def test_a_record_is_decoded_once_for_all_its_views(small_set: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, whole = [], record_module.decode_scaled
    monkeypatch.setattr(record_module, "decode_scaled", lambda *given: decoded.append(1) or whole(*given))
    reader(small_set, slots=SlotRows(views=8)).read(IDS, 5)
    assert len(decoded) == 2


def test_without_random_crops_all_views_show_the_same(small_set: ShardIndex) -> None:
    images = reader(small_set, DataSpec(24, "center"), slots=SlotRows(views=4)).read(np.array([3]), 1).inputs["images"]
    assert all(torch.equal(images[0], other) for other in images)
    assert torch.equal(images[:1], reader(small_set, DataSpec(24, "center")).read(np.array([3]), 1).inputs["images"])


def test_each_view_chooses_one_of_several_captions(tmp_path: Path, write_tar: Callable, picture: Callable) -> None:
    words = ["a", "b", "c", "d"]
    listed = json.dumps({"captions": words}).encode()
    write_tar(tmp_path / "0.tar", [{"__key__": f"{n}", "jpg": picture(n), "json": listed} for n in range(4)])
    text = TextEncoder(word_tokenizer(words, tmp_path / "t.json"), 4)
    batch = reader(build(tmp_path), DataSpec(16), text, slots=SlotRows(views=6)).read(np.arange(4), 2)
    encoded = [text.encode(word) for word in words]
    expected = [encoded[caption_choice(KEYS[0], 2, r, 4, v)] for r in range(4) for v in range(6)]
    assert batch.inputs["tokens"].tolist() == expected


@pytest.mark.parametrize(("reduce", "views"), [("mean", 1), ("mean", 2), ("sum", 2)])
def test_records_of_a_unit_are_its_rows(small_set: ShardIndex, reduce: str, views: int) -> None:
    units = Patients([])
    made = reader(small_set, slots=SlotRows(units, 2, reduce, views, b"u" * 32))
    batch = made.read(np.array([1, EMPTY, 2]), 2)
    assert units.asked == [(1, b"u" * 32, 2, 2), (2, b"u" * 32, 2, 2)], "nothing is asked for an empty slot"
    assert batch.rows == 2 * views and batch.present.tolist() == [True, False, True]
    records = reader(small_set, slots=SlotRows(views=views)).read(np.array([5, 4, 6]), 2)
    for place, row in enumerate((0, views, 4 * views)):
        for view in range(views):
            assert same(row_of(batch, row + view), row_of(records, place * views + view))
    shares = batch.inputs[ROW_SHARE].view(3, 2, views)
    assert shares[0].unique().tolist() == [pytest.approx((0.5 if reduce == "mean" else 1) / views)]
    assert shares[2, 0].unique().tolist() == [pytest.approx(1 / views)]
    assert not shares[1].any() and not shares[2, 1].any()
    assert not batch.inputs["images"][5 * views :].any(), "the place that stays free is zero"


def test_bad_records_of_a_unit_leave_it_the_others(tmp_path: Path, write_tar: Callable, picture: Callable) -> None:
    bad = {1, 3, 4, 5}
    samples = [{"__key__": f"{n}", "jpg": b"no picture" if n in bad else picture(n)} for n in range(7)]
    write_tar(tmp_path / "0.tar", samples)
    made = reader(build(tmp_path), slots=SlotRows(Patients([]), 3, views=2, key=b"u" * 32))
    found = made.fetch(np.array([0, 1, 2]), 1)
    assert set(found.bad) == bad, "the numbers are those of records"
    batch = found.batch.to("cpu")
    assert batch.present.tolist() == [True, False, True]
    shares = batch.inputs[ROW_SHARE].view(3, 6)
    assert shares.tolist() == [[0.25, 0.25, 0, 0, 0.25, 0.25], [0] * 6, [0.5, 0.5, 0, 0, 0, 0]]
    for name, tensor in batch.inputs.items():
        assert not tensor[batch.inputs[ROW_SHARE] == 0].any(), name
