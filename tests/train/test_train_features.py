"""Features of a frozen body: the same steps as over pictures, computed once, by all ranks or by none."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmuration.accounting.errors import BAD_INPUT
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.draw.micro_batch import EMPTY, slots
from murmuration.data.store.place import UnreadableError
from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from murmuration.model.trainable import select
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.commands.exit_codes import guarded
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.stop import Stopped
from murmuration.train.run import cached_features
from murmuration.train.run.cached_features import FeatureReader, apart, identity_of, pictures_at_once
from murmuration.train.storage.feature_store import (
    ABSENT,
    BAD,
    HEADER,
    LOCK,
    PRESENT,
    FeatureFolder,
    RowWriter,
    settled,
)
from tests.support import features_world
from tests.support.features_world import (
    DAMAGED,
    LABELS,
    OF,
    RECORDS,
    RESNET,
    Pictures,
    Stop,
    folder_of,
    head_only,
    made,
)
from tests.support.train_helpers import alone, on_ranks


def test_small_pictures_go_through_the_body_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, together = head_only(), list[int]()
    whole = model.features
    monkeypatch.setattr(model, "features", lambda images: (together.append(len(images)), whole(images))[1])
    made(tmp_path, alone(), Pictures(), model, micro_batch=20)
    assert together == [20, 3]
    assert [pictures_at_once(side, "cpu") for side in (448, 224, 112, 32)] == [4, 4, 16, 196]
    assert pictures_at_once(32, "cuda") == 128


def test_a_clipped_sum_over_features_is_the_one_over_pictures(tmp_path: Path) -> None:
    reader, pictures, model = made(tmp_path / "features", alone(), Pictures())
    assert (reader.stored.state == PRESENT).sum() == RECORDS - 1 and reader.stored.state[DAMAGED] == BAD
    clip = ReferenceClip(ClipRule("flat", 0.5, 0.0))
    shuffled = np.array([[3, 1, 20, 9, 7]])  # begins and ends as five neighbours would
    for ids in (slots(np.arange(RECORDS), 0, 1, 8), slots(np.array([2, 3, 7, 20]), 0, 1, 8), shuffled):
        for row in ids:
            over_pictures, over_features = pictures.fetch(row, 1).batch, reader.fetch(row, 1).batch
            assert torch.equal(over_pictures.present, over_features.present)
            sums = [clipped_totals(clip, model, b.inputs, b.present)[0] for b in (over_pictures, over_features)]
            for name, expected in sums[0].items():
                assert torch.allclose(sums[1][name], expected, atol=1e-6), name


@pytest.mark.parametrize("settings", [features_world.SETTINGS, RESNET], ids=["ViT", "ResNet"])
def test_a_row_is_that_of_its_picture_in_every_bit_whatever_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: ModelSettings
) -> None:
    model = build(settings, "classify")
    select(model, "head")
    every = np.arange(RECORDS)
    before = made(tmp_path / "before", alone(), Pictures(), model)[0].fetch(every, 1).batch.inputs["features"]
    other = features_world.IMAGES.clone()
    other[5] = 1e4
    monkeypatch.setattr(features_world, "IMAGES", other)
    after = made(tmp_path / "after", alone(), Pictures(), model)[0].fetch(every, 1).batch.inputs["features"]
    assert [int(row) for row in (before != after).any(1).nonzero()] == [5]


class Patients:
    """Unit u has the records 3u to 3u + 2; the last one has two. One of unit 2 is damaged."""

    def chosen(self, unit: int, step_key: bytes, step: int, at_most: int) -> np.ndarray:
        return np.arange(3 * unit, min(3 * unit + 3, RECORDS))[:at_most]


@pytest.mark.parametrize("engine", [ReferenceClip, BookKeepingClip])
@pytest.mark.parametrize("trained", ["head", "statistics"])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_unit_adds_what_its_records_do_together_and_no_more_than_c(
    tmp_path: Path, reduce: Any, trained: Any, engine: Any
) -> None:
    """Against autograd on one unit after the other."""
    rows = SlotRows(Patients(), 3, reduce, key=b"u" * 32)
    made_by_records, pictures, model = made(tmp_path / "features", alone(), Pictures(), head_only())
    reader = FeatureReader(made_by_records.stored, rows)
    select(model, trained)
    if trained == "statistics":
        model.head.settle(0.01)
    bound = 1.0 if trained == "statistics" else 0.5
    clip = engine(ClipRule("flat", bound, 0.0))
    clip.prepare(model)
    drawn = np.array([0, 2, EMPTY, 5, 7])
    batch = reader.fetch(drawn, 1).batch
    assert batch.present.tolist() == [True, True, False, True, True] and batch.rows == 3
    found = clipped_totals(clip, model, batch.inputs, batch.present)[0]
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    norms = []
    for unit in drawn[drawn != EMPTY]:
        records = [record for record in Patients().chosen(int(unit), b"", 1, 3) if record != DAMAGED]
        images = pictures.fetch(np.array(records), 1).batch.inputs
        model.zero_grad()
        losses = model({"features": model.features(images["images"]).detach(), "labels": images["labels"]})
        (losses.mean() if reduce == "mean" else losses.sum()).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        norms.append(float(torch.cat([g.flatten() for g in gradients.values()]).norm()))
        for name, gradient in gradients.items():
            expected[name] += gradient * min(1.0, bound / norms[-1])
    for name, sums in expected.items():
        assert torch.allclose(found[name], sums, atol=1e-5), name
    if trained == "statistics":
        assert (max(norms) <= 1 + 1e-6) == (reduce == "mean"), "a mean of shares is no longer than one of them"


def test_padding_and_bad_records_are_absent_and_zero(tmp_path: Path) -> None:
    reader, pictures, _ = made(tmp_path / "features", alone(), Pictures())
    batch = reader.fetch(np.array([6, 7, 8, EMPTY]), 5).batch
    assert batch.present.tolist() == [True, False, True, False]
    assert not batch.inputs["features"][~batch.present].any() and batch.inputs["features"][0].any()
    assert batch.inputs["labels"].tolist() == [1, 0, 3, 0]
    assert pictures.closed and not reader.bad_reasons


@pytest.mark.parametrize("ids", [[3, 4, 5], [3, 9, 5]])
def test_a_row_that_was_never_made_is_an_error_and_no_record_without_a_gradient(tmp_path: Path, ids: list[int]) -> None:
    reader, _, _ = made(tmp_path, alone(), Pictures())
    with (reader.stored.path / "state.u8").open("rb+") as file:
        file.seek(5)
        file.write(bytes([ABSENT]))
    with pytest.raises(UnreadableError) as gone:
        reader.fetch(np.array(ids), 1)
    told = str(gone.value)
    assert told == f"features that were computed are gone from {reader.stored.path}; compute them again"
    assert "5" not in told.replace(str(reader.stored.path), ""), "which record a step drew is no one's to know"
    assert reader.fetch(np.array([3, 4, EMPTY]), 1).batch.present.tolist() == [True, True, False]


def test_a_stopped_run_goes_on_where_a_row_is_missing_and_another_body_begins_anew(tmp_path: Path) -> None:
    whole, _, _ = made(tmp_path / "whole", alone(), Pictures())
    first, told = Pictures(unreadable_after=8), list[Any]()
    with pytest.raises(Stopped, match="records that cannot be read"):
        made(tmp_path / "broken", alone(), first, bad=lambda *reasons: told.append(reasons))
    assert first.closed and told == [("head", 0, {DAMAGED: "damaged"})], "nobody reads that record again"
    reader, second, model = made(tmp_path / "broken", alone(), Pictures())
    assert len(first.asked) == 8 and sorted(first.asked + second.asked) == list(range(RECORDS))
    assert np.array_equal(reader.stored.features, whole.stored.features)
    assert np.array_equal(reader.stored.labels, whole.stored.labels)
    assert made(tmp_path / "broken", alone(), Pictures())[1].asked == [], "nothing is computed twice"
    with torch.no_grad():
        model.cls_token.add_(1.0)
    other, third, _ = made(tmp_path / "broken", alone(), Pictures(), model)
    assert len(third.asked) == RECORDS and not np.array_equal(other.stored.features, whole.stored.features)
    assert made(tmp_path / "broken", alone(), Pictures())[1].asked == [], "two bodies keep their features side by side"


def test_heads_and_seeds_share_the_features_of_one_body(tmp_path: Path) -> None:
    """A sweep over `features.folder`: what the body computes is all that counts."""
    made(tmp_path, alone(), Pictures())
    sweep = {
        "init_seed": 5, "head_scale": 1.0, "head_bias": -3.0, "classify_loss": "softmax", "classes": 7,
        "text_length": 12, "vocabulary": 99, "mask_ratio": 0.5, "decoder_bias": True, "mae_decoder_depth": 2,
    }  # fmt: skip
    body = {name: value for name, value in head_only().state_dict().items() if not name.startswith("head.")}
    for name, value in sweep.items():
        model = head_only(**{name: value})
        model.load_state_dict(body, strict=False)
        assert made(tmp_path, alone(), Pictures(), model)[1].asked == [], name


def test_the_identity_is_of_records_pixels_labels_body_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    other = head_only(head_scale=1.0)
    assert identity_of(other, *OF) == identity_of(head_only(), *OF), "the head is no part"
    digest, spec, precision = OF
    changes: tuple[tuple[Any, ...], ...] = (
        ("others", spec, precision), (digest, replace(spec, augment="center"), precision), (digest, spec, "bf16"),
        (digest, replace(spec, labels=("shape",), target="shape"), precision),
        (digest, replace(spec, classes=3), precision),  # decides which records are bad
    )  # fmt: skip
    for changed in changes:
        assert identity_of(other, *changed) != identity_of(other, *OF)
    # The same weights, and yet other features.
    for change in ({"heads": 4}, {"pooling": "mean"}):
        same = head_only(**change)
        same.load_state_dict(other.state_dict())
        assert identity_of(same, *OF) != identity_of(other, *OF), change
    nets = [build(RESNET.model_copy(update=more), "classify") for more in ({}, {"head_scale": 1.0}, {"stages": (2,)})]
    first, head, deeper = (identity_of(net, *OF) for net in nets)
    assert first == head != deeper
    before = identity_of(other, *OF)
    monkeypatch.setattr(cached_features, "DECODER", "another")
    assert identity_of(other, *OF) != before, "pixels are a decoder's"


def test_ranks_share_the_rows_and_their_files_are_the_owners_alone(tmp_path: Path) -> None:
    pictures = [Pictures() for _ in range(3)]
    readers = on_ranks(3, lambda ranks: made(tmp_path / "features", ranks, pictures[ranks.rank])[0])
    assert [row for each in pictures for row in each.asked] == list(range(RECORDS))
    whole = made(tmp_path / "alone", alone(), Pictures())[0].stored
    for reader in readers:
        assert np.allclose(reader.stored.features, whole.features, atol=1e-6)
        assert np.array_equal(reader.stored.state, whole.state)
    (kept,) = (tmp_path / "features").iterdir()
    assert (tmp_path / "features").stat().st_mode & 0o777 == kept.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in kept.iterdir()} == {0o600}


def test_a_record_that_is_not_finite_does_not_take_the_one_before_it_along() -> None:
    """As the matrix units of some processors do, which read beyond the end of a row and multiply that by 0."""

    def reads_too_far(images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1)
        return rows + 0.0 * torch.cat([rows[1:], rows[:1]])

    images = torch.randn(5, 3, 4, 4)
    images[2, 1] = torch.inf
    found = apart(reads_too_far, images)
    assert torch.equal(found[[0, 1, 3, 4]], images.flatten(1)[[0, 1, 3, 4]])
    assert not bool(reads_too_far(images)[1].isfinite().all()) and not bool(found[2].isfinite().all())


# The files of features: whose they are, who fills them, and which bytes a rank writes when.


WIDTH = 16
ONE, ANOTHER = "1" * 64, "2" * 64


def folder(shared: Path, identity: str = ONE) -> FeatureFolder:
    return FeatureFolder.within(shared, identity, RECORDS, WIDTH)


def fill(of: FeatureFolder, ids: np.ndarray) -> None:
    writer = RowWriter(of)
    writer.put(ids, np.ones((len(ids), WIDTH)) * ids[:, None], ids, ids != 7)
    writer.close()


def filled(of: FeatureFolder) -> FeatureFolder:
    with of.claimed() as some:
        assert some
        fill(of, np.arange(RECORDS))
    return of


def test_a_torn_header_a_lost_file_and_another_shape_begin_anew(tmp_path: Path) -> None:
    first = filled(folder(tmp_path))
    with first.claimed() as some:
        assert not some
    (first.path / f".{HEADER}.17.tmp").touch()
    wider = FeatureFolder(first.path, ONE, RECORDS, 2 * WIDTH)
    for name, content, of in ((HEADER, b'{"identi', first), ("labels.i64", b"short", first), ("state.u8", b"", wider)):
        (first.path / name).write_bytes(content)
        with of.claimed() as some:
            assert some and len(of.missing(0, 1)) == RECORDS
            fill(first, np.arange(RECORDS)) if of is first else None


def test_rows_stay_where_they_were_made_and_bad_ones_are_zero(tmp_path: Path) -> None:
    of = folder(tmp_path)
    with of.claimed():
        fill(of, np.array([2, 3, 4, 9, 7]))
        assert of.missing(0, 2).tolist() == [0, 1, 5, 6, 8, 10] and of.missing(1, 2).tolist() == [*range(11, RECORDS)]
        with pytest.raises(RecipeError, match=r"^18 rows of the features in .* are missing although all were made"):
            of.rows()
        fill(of, np.concatenate([of.missing(1, 2), of.missing(0, 2)]))
    found = of.rows()
    expected = np.arange(RECORDS) * (np.arange(RECORDS) != 7)
    assert np.array_equal(found.labels, expected) and np.array_equal(found.features[:, 5], expected)
    assert found.state.tolist() == [BAD if row == 7 else PRESENT for row in range(RECORDS)]
    assert not found.features.flags.writeable


def test_only_files_of_its_own_are_replaced(tmp_path: Path) -> None:
    for inside in (".", ONE[:16]):
        shared = tmp_path / f"mine{len(inside)}"
        (shared / inside).mkdir(parents=True)
        (shared / inside / "thesis.txt").write_text("precious")
        with pytest.raises(RecipeError, match=r"contains other things \(thesis.txt\); name a folder of its own"):
            folder(shared).claimed().__enter__()
        assert [path.name for path in (shared / inside).iterdir()] == ["thesis.txt"]
        assert (shared / inside / "thesis.txt").read_text() == "precious"
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / ANOTHER[:16]).touch()  # named like a folder of ours
    with pytest.raises(RecipeError, match="contains other things"):
        folder(tmp_path / "file").claimed().__enter__()


def test_one_run_fills_while_others_are_refused_and_readers_and_other_bodies_are_not(tmp_path: Path) -> None:
    of = folder(tmp_path)

    def second() -> int:
        with folder(tmp_path).claimed():
            return 0

    with of.claimed():
        with pytest.raises(
            RecipeError, match=r"another run is computing the features in .*; start this one again once"
        ):
            second()
        assert guarded(second, True) == BAD_INPUT
        filled(folder(tmp_path, ANOTHER))
        fill(of, np.arange(RECORDS))
        assert guarded(second, True) == 0, "what is complete is read by as many as like"
    (of.path / HEADER).unlink()
    with of.claimed() as some:
        assert some and len(of.missing(0, 1)) == RECORDS, "the lock was given back"
    assert (of.path / LOCK).exists() and len(folder(tmp_path, ANOTHER).missing(0, 1)) == 0


def test_what_was_made_between_the_first_look_and_the_lock_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    of, true = folder(tmp_path), fcntl.flock

    def late(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", true)
        filled(FeatureFolder(of.path, ONE, RECORDS, WIDTH))
        true(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with of.claimed() as some:
        assert not some and not len(of.missing(0, 1))


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(RecipeError, match=r"features.lock cannot be locked \(No locks available\); name a features.f"):
        folder(tmp_path).claimed().__enter__()


def test_a_folder_that_a_machine_sees_otherwise_is_refused(tmp_path: Path) -> None:
    of = filled(folder(tmp_path))
    (of.path / HEADER).write_text((of.path / HEADER).read_text().replace(ONE, ANOTHER))
    for act in (of.rows, lambda: of.missing(0, 1), folder(tmp_path / "local").rows):
        with pytest.raises(RecipeError, match=r"are not those that the main rank made there; name a features.folder"):
            act()


def test_a_rank_writes_its_own_bytes_alone_and_marks_a_row_after_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Synchronously, so that what is marked lies on the disk, and without a mapping, which writes whole pages."""
    of, true = folder(tmp_path), os.pwrite
    names = list(of.files)
    seen: list[tuple[str, int, int]] = []

    def pwrite(descriptor: int, content: Any, offset: int) -> int:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DSYNC
        half = max(1, len(content) // 2)  # as an interrupted write does
        seen.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, offset, offset + half))
        return true(descriptor, content[:half], offset)

    with of.claimed():
        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(np, "memmap", None)
        for rank in (1, 0):
            fill(of, of.missing(rank, 2)[[0, 1, 2, 5, 6]])
            order = [names.index(name) for name, _, _ in seen]
            assert order == sorted(order), "the state is the last"
            for number, size in enumerate((4 * WIDTH, 8, 1)):
                spans = sorted((low, high) for name, low, high in seen if name == names[number])
                touched = [byte for low, high in spans for byte in range(low, high)]
                rows = [11 * rank + row for row in (0, 1, 2, 5, 6)]
                assert touched == [size * row + byte for row in rows for byte in range(size)]
            seen.clear()
        assert np.count_nonzero(np.fromfile(of.path / "state.u8", "|u1") != ABSENT) == 10


# Several ranks make features: they see each other's rows, and what ends one of them ends all of them alike.


def test_ranks_see_each_others_rows_although_a_machine_remembers_what_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """As on a network file system: a mapping shows the content at the time when it was opened."""

    def remembered(path: Path, dtype: str, mode: str, shape: tuple[int, ...]) -> np.ndarray:
        assert mode == "r"
        return np.fromfile(path, dtype).reshape(shape)

    monkeypatch.setattr(np, "memmap", remembered)
    readers = on_ranks(2, lambda ranks: made(tmp_path, ranks, Pictures())[0])
    for reader in readers:
        assert settled(reader.stored.state).all() and np.array_equal(reader.stored.labels[:7], LABELS[:7])


def test_all_ranks_end_together_where_one_sees_no_rows_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    true, own = FeatureFolder.rows, threading.local()

    def rows(folder: FeatureFolder) -> Any:
        if not own.rank:
            return true(folder)
        seen = shutil.copytree(folder.path, tmp_path / "seen by rank 1")
        (seen / "state.u8").write_bytes(bytes([PRESENT] * 20 + [ABSENT] * 3))
        return true(replace(folder, path=seen))

    monkeypatch.setattr(FeatureFolder, "rows", rows)

    def act(ranks: Any) -> str:
        own.rank = ranks.rank
        with pytest.raises(RecipeError) as caught:
            made(tmp_path / "features", ranks, Pictures())
        return str(caught.value)

    said = on_ranks(2, act)
    assert said[0] == said[1] and said[0].startswith("3 rows of the features in ")
    assert said[0].endswith("name a features.folder on a file system where they do")


@pytest.mark.parametrize("readable", [0, 4, 8])
def test_one_rank_that_cannot_read_ends_all_with_its_reason_and_keeps_what_was_made(
    tmp_path: Path, readable: int
) -> None:  # fmt: skip
    """Rank 1 has three rounds: it fails in the first, in the middle and in the last, which no other one follows."""
    pictures = [Pictures(), Pictures(unreadable_after=readable)]

    def act(ranks: Any) -> str:
        with pytest.raises(Stopped) as caught:
            made(tmp_path, ranks, pictures[ranks.rank])
        return str(caught.value)

    assert on_ranks(2, act) == ["records that cannot be read: shard-3.tar: cannot be read; restore access"] * 2
    there = {row for each in pictures for row in each.asked}
    assert len(pictures[1].asked) == readable and all(each.closed for each in pictures)
    again = Pictures()
    made(tmp_path, alone(), again)
    assert sorted({*again.asked, *there}) == list(range(RECORDS)) and not there & set(again.asked)


def test_one_rank_whose_disk_is_full_ends_all_with_that_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = RowWriter.put

    def put(self: RowWriter, ids: np.ndarray, *columns: Any) -> None:
        if ids[0] >= 15:
            raise OSError(errno.ENOSPC, "No space left on device")
        true(self, ids, *columns)

    monkeypatch.setattr(RowWriter, "put", put)

    def act(ranks: Any) -> int | None:
        with pytest.raises(OSError) as caught:
            made(tmp_path, ranks, Pictures())
        return caught.value.errno

    assert on_ranks(2, act) == [errno.ENOSPC] * 2
    assert len(folder_of(tmp_path).missing(0, 1)) in (RECORDS - 11, RECORDS - 12)


def test_ranks_with_fewer_rows_ask_about_a_stop_as_often_as_the_others(tmp_path: Path) -> None:
    """Asking is a collective act: a rank that is through would leave the others waiting."""
    stops = [Stop() for _ in range(5)]
    on_ranks(5, lambda ranks: made(tmp_path, ranks, Pictures(), stop=stops[ranks.rank]) and None)
    assert [stop.asked for stop in stops] == [3] * 5, "4 rows are one round, 5 are two; and once after the last"
