"""Several ranks make features: they see each other's rows, and what ends one of them ends all of them alike."""

from __future__ import annotations

import errno
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.stop import Stopped
from murmuration.train.storage.feature_store import ABSENT, PRESENT, FeatureFolder, RowWriter, settled
from tests.support.features_world import LABELS, RECORDS, Pictures, Stop, folder_of, made
from tests.support.train_helpers import alone, on_ranks


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
