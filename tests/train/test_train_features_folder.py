"""The files of features: whose they are, who fills them, and which bytes a rank writes when."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.accounting.errors import BAD_INPUT
from murmuration.train.commands.exits import guarded
from murmuration.train.config.section import RecipeError
from murmuration.train.storage.feature_store import ABSENT, BAD, HEADER, LOCK, PRESENT, FeatureFolder, RowWriter

RECORDS, WIDTH = 23, 16
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
