"""Excluded records keep their slots and contribute nothing, or are skipped in epochs of public records."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.index.exclusions import FACTS, IDS, Exclusions
from murmuration.data.index.folders import build_folder
from murmuration.data.index.format import Kept
from murmuration.data.index.open import open_index
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import ShardError


def _exclude(index: ShardIndex, ids: list[int]) -> Exclusions:
    found = Exclusions(index.manifest_digest, np.array(ids, dtype=np.uint64), ("public",), 4, "overlap")
    found.write(index.folder)
    return found


@given(st.sets(st.integers(0, 60), max_size=60))
@settings(max_examples=200, suppress_health_check=[HealthCheck.differing_executors])
def test_dense_numbers_are_those_of_the_list_of_kept_ids(ids: set[int]) -> None:
    excluded = Exclusions("-", np.array(sorted(ids), dtype=np.uint64))
    kept = Kept(61, excluded, "skipped")
    assert [kept.number(record) for record in range(kept.records)] == [i for i in range(61) if i not in ids]
    for record in (-1, kept.records):
        with pytest.raises(ShardError, match="outside"):
            kept.number(record)
    assert not any(kept.left_out(record) for record in range(kept.records))
    slots = Kept(61, excluded)
    assert slots.records == 61 and [slots.number(record) for record in range(61)] == list(range(61))
    assert {record for record in range(61) if slots.left_out(record)} == ids
    ends = np.array([0, 10, 10, 61])
    assert slots.below(ends).tolist() == ends.tolist()
    assert kept.below(ends).tolist() == [len(set(range(end)) - ids) for end in ends]


@pytest.mark.parametrize("ids", [[0], [24], [10], [0, 1, 2, 9, 10, 11, 12, 24], list(range(1, 25))])
def test_the_index_honours_the_list(small_set: ShardIndex, ids: list[int]) -> None:
    texts = [ShardReader(small_set).read(record)["txt"] for record in range(25)]
    excluded = _exclude(small_set, ids)
    slots = ShardIndex.open(small_set.folder)
    assert slots.records == 25 and slots.manifest_digest == small_set.manifest_digest
    for record in range(25):
        assert slots.left_out(record) == (record in ids)
        if record not in ids:
            assert ShardReader(slots).read(record)["txt"] == texts[record]
            continue
        with pytest.raises(ShardError, match="never read") as refused:
            ShardReader(slots).read(record)
        assert str(record) not in str(refused.value).replace(str(slots.folder), ""), "it names no record"
    index = ShardIndex.open(small_set.folder, excluded="skipped")
    assert index.records == 25 - len(ids)
    left = [text for record, text in enumerate(texts) if record not in ids]
    assert [ShardReader(index).read(record)["txt"] for record in range(index.records)] == left
    with pytest.raises(ShardError, match="outside"):
        index.locate(index.records)
    assert index.excluded_digest == slots.excluded_digest == excluded.digest
    whole = ShardIndex.open(small_set.folder, excluded="ignored")
    assert whole.records == 25 and whole.excluded_digest == "" and not any(map(whole.left_out, range(25)))
    index.check_unchanged(contents=True)


def test_the_digest_follows_the_list(small_set: ShardIndex) -> None:
    seen = {""}
    for ids in ([3], [4], [3, 4]):
        _exclude(small_set, ids)
        seen.add(ShardIndex.open(small_set.folder).excluded_digest)
    assert len(seen) == 4
    _exclude(small_set, [])
    assert ShardIndex.open(small_set.folder).excluded_digest == "", "nothing is left out"


def test_a_list_for_other_records_is_refused(small_set: ShardIndex) -> None:
    _exclude(small_set, [3])
    folder = small_set.folder.parent
    (folder / "000001.tar").unlink()
    with pytest.raises(ShardError, match="other records"):
        build(folder)
    assert ShardIndex.open(folder, excluded="ignored").records == 24
    (small_set.folder / "exclusions.json").unlink()
    with pytest.raises(ShardError, match="exclusions"):
        ShardIndex.open(folder)
    (small_set.folder / "exclusions.npy").unlink()
    assert ShardIndex.open(folder).records == 24


def test_everything_excluded_is_refused(small_set: ShardIndex) -> None:
    _exclude(small_set, list(range(25)))
    with pytest.raises(ShardError, match="every record is excluded"):
        ShardIndex.open(small_set.folder, excluded="skipped")


def test_a_folder_of_images_honours_it_too(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "a/2.jpg", "b/3.jpg", "b/4.jpg"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(name.encode())
    whole = build_folder(tmp_path / "set")
    Exclusions(whole.manifest_digest, np.array([0, 2], dtype=np.uint64)).write(whole.folder)
    index = open_index(tmp_path / "set", excluded="skipped")
    assert [ShardReader(index).read(record) for record in range(index.records)] == [
        {"jpg": b"a/2.jpg", "cls": b"0"},
        {"jpg": b"b/4.jpg", "cls": b"1"},
    ]
    slots = open_index(tmp_path / "set")
    assert [slots.left_out(record) for record in range(slots.records)] == [True, False, True, False]
    assert slots.manifest_digest == whole.manifest_digest and slots.excluded_digest == index.excluded_digest != ""


def test_digests_are_hex_of_sha256(small_set: ShardIndex) -> None:
    _exclude(small_set, [1])
    index = ShardIndex.open(small_set.folder)
    for digest in (index.manifest_digest, index.excluded_digest):
        assert len(bytes.fromhex(digest)) == hashlib.sha256().digest_size


def test_exclusions_are_bound_to_their_records(tmp_path: Path) -> None:
    ids = np.array([1, 5, 6], dtype=np.uint64)
    Exclusions("digest", ids, ("val",), 4, "why").write(tmp_path)
    found = Exclusions.read(tmp_path, "digest", 7)
    assert found is not None and found.ids.tolist() == [1, 5, 6] and found.against == ("val",)
    assert Exclusions.read(tmp_path / "elsewhere", "digest", 7) is None
    with pytest.raises(ShardError, match="other records"):
        Exclusions.read(tmp_path, "another", 7)
    with pytest.raises(ShardError, match="beyond the 6"):
        Exclusions.read(tmp_path, "digest", 6)
    for wrong in ([5, 1], [1, 1]):
        with pytest.raises(ValueError, match="sorted"):
            Exclusions("digest", np.array(wrong, dtype=np.uint64))


@pytest.mark.parametrize("damage", ["ids", "missing ids", "missing facts", "torn facts", "not sorted"])
def test_damaged_exclusions_are_refused_not_ignored(tmp_path: Path, damage: str) -> None:
    """To ignore them would train on records that somebody asked to leave out."""
    Exclusions("digest", np.array([1, 5], dtype=np.uint64)).write(tmp_path)
    if damage == "ids":
        np.save(tmp_path / IDS, np.array([1, 4], dtype="<u8"))
    elif damage == "not sorted":
        np.save(tmp_path / IDS, np.array([5, 1], dtype="<u8"))
    elif damage == "torn facts":
        (tmp_path / FACTS).write_bytes((tmp_path / FACTS).read_bytes()[:40])
    else:
        (tmp_path / (IDS if damage == "missing ids" else FACTS)).unlink()
    with pytest.raises(ShardError, match="overlap again"):
        Exclusions.read(tmp_path, "digest", 9)
