"""Nodes with shards of their own: the same draw, every record once where it lies, equal micro-batch counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.data.batch.loader import Loader
from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.draw.micro_batch import slots
from murmuration.data.draw.node_placement import Placement, on_this_node, place
from murmuration.data.draw.poisson import LANES, PoissonSampler
from murmuration.data.index.exclusions import Exclusions
from murmuration.data.index.folders import build_folder
from murmuration.data.index.format import Handling
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import ShardError

KEY = b"k" * 32


def _placed(sizes: list[int], holdings: list[list[bool]]) -> Placement:
    return place([f"{number}.tar" for number in range(len(sizes))], np.cumsum(sizes), np.array(holdings))


def _rows(placement: Placement, ids: np.ndarray, world: int, micro_batch: int) -> list[np.ndarray]:
    return [placement.rows(ids, rank, micro_batch) for rank in range(world)]


@given(data=st.data())
def test_every_drawn_record_is_computed_once_where_it_lies(data: st.DataObject) -> None:
    """Any sizes (empty shards too), any overlap of what nodes hold, unequal numbers of ranks."""
    shards, world = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=shards, max_size=shards))
    held = [data.draw(st.lists(st.booleans(), min_size=shards, max_size=shards)) for _ in range(world)]
    for shard in range(shards):  # somebody holds each
        held[data.draw(st.integers(0, world - 1))][shard] = True
    placement = _placed(sizes, held)
    ends, micro_batch = np.cumsum(sizes), data.draw(st.integers(1, 9))
    ids = np.flatnonzero(np.random.default_rng(sum(sizes)).random(int(ends[-1])) < 0.4)
    rows = _rows(placement, ids, world, micro_batch)
    assert len({row.shape for row in rows}) == 1 and len(rows[0]) >= 1 and rows[0].shape[1] == micro_batch
    for rank, row in enumerate(rows):
        found = np.searchsorted(ends, row[row >= 0], side="right")
        assert all(held[rank][shard] for shard in found), "a rank reads what its node holds, and nothing else"
    assert sorted(np.concatenate([row[row >= 0] for row in rows]).tolist()) == ids.tolist()
    fullest = max(int((row >= 0).sum()) for row in rows)
    assert len(rows[0]) == max(1, -(-fullest // micro_batch)), "no more micro-batches than the fullest rank needs"


def test_ranks_of_a_node_share_and_copies_even_out() -> None:
    """Two nodes of two ranks; the largest shard lies on both and goes where less is to do."""
    first, second = [True, False, True], [False, True, True]
    placement = _placed([100, 40, 50], [first, first, second, second])
    assert placement.groups == ((0, 1), (2, 3)) and placement.owners.tolist() == [0, 1, 1]
    rows = _rows(placement, np.arange(190), 4, 10)
    assert [int((row >= 0).sum()) for row in rows] == [50, 50, 45, 45]


def test_a_node_of_more_ranks_takes_more_and_what_has_one_holder_is_given_away_first() -> None:
    both, one = [True] * 6 + [False], [True] * 7
    larger = _placed([10] * 6 + [1], [both, both, one])
    assert larger.groups == ((0, 1), (2,)) and np.bincount(larger.owners[:6]).tolist() == [4, 2]
    assert _placed([10, 10], [[True, True], [True, False]]).owners.tolist() == [1, 0]
    alike = _placed([7, 9], [[True, True]] * 3)
    for rank in range(3):
        assert np.array_equal(alike.rows(np.arange(16), rank, 2), slots(np.arange(16), rank, 3, 2))


def test_what_would_lose_a_record_is_refused() -> None:
    with pytest.raises(ShardError, match=r"1\.tar lies on no node, nor do 1 more shards"):
        _placed([3, 3, 3], [[True, False, False], [True, False, False]])
    with pytest.raises(ValueError, match="lost"):
        _placed([3, 3], [[True, True]]).rows(np.array([2, 6]), 0, 2)


def _nodes(index: ShardIndex, tmp_path: Path, parts: list[list[int]]) -> list[Path]:
    """Folders of links, one per node."""
    folders = []
    for node, part in enumerate(parts):
        folders.append(tmp_path / f"node{node}")
        folders[-1].mkdir()
        for shard in part:
            os.link(index.place(shard), folders[-1] / index.shards[shard].name)  # pyright: ignore[reportArgumentType]
    return folders


@pytest.mark.parametrize(
    ("excluded", "handling", "ends"),
    [([], "absent", [10, 11, 25]), ([0, 9, 10, 24], "absent", [10, 11, 25]), ([0, 9, 10, 24], "skipped", [8, 8, 21])],
)
def test_nodes_read_the_bytes_that_one_machine_would(
    small_set: ShardIndex, tmp_path: Path, excluded: list[int], handling: Handling, ends: list[int]
) -> None:
    """Through the loader, with records left out: their slots are empty, or (in public epochs) their neighbours get new
    numbers, and shard 1 may hold none at all."""
    if excluded:
        ids = np.array(excluded, dtype=np.uint64)
        Exclusions(small_set.manifest_digest, ids, ("test",), 4, "by hand").write(small_set.folder)
    index = ShardIndex.open(small_set.folder, excluded=handling)
    assert index.shard_ends.tolist() == ends
    folders = _nodes(index, tmp_path, [[0, 2], [1, 2]])
    views = [on_this_node(index, str(folder)) for folder in folders]
    assert [view.held().tolist() for view in views] == [[True, False, True], [False, True, True]]
    assert {view.manifest_digest for view in views} == {index.manifest_digest}
    placement = place([shard.name for shard in index.shards], index.shard_ends, [view.held() for view in views])
    sampler = PoissonSampler(KEY, KEY, index.records, LANES // 2)
    spec, plain = DataSpec(16, augment="random_resized_crop"), {}
    whole = BatchReader(index, spec, augment_key=KEY)
    found: dict[int, bytes] = {}
    for rank, view in enumerate(views):
        reader = BatchReader(view, spec, augment_key=KEY)
        loader = Loader(
            reader, sampler, rank, 2, 3, last=2, plan=lambda ids, rank=rank: placement.rows(ids, rank, 3)
        )  # fmt: skip
        draw, batches = loader.step(1)
        assert draw.digest == sampler.draw(1).digest
        for row, batch in zip(placement.rows(draw.ids, rank, 3), batches, strict=True):
            assert batch.present.tolist() == [i >= 0 and not index.left_out(i) for i in row.tolist()]
            found |= {int(i): batch.inputs["images"][at].numpy().tobytes() for at, i in enumerate(row) if i >= 0}
        loader.close()
    for record in sampler.draw(1).ids.tolist():
        plain[record] = whole.read(np.array([record]), 1).inputs["images"][0].numpy().tobytes()
    assert found == plain


def test_folders_that_hold_something_else_are_refused(
    small_set: ShardIndex, tmp_path: Path, picture: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = _nodes(small_set, tmp_path, [[1]])
    monkeypatch.setenv("NODE", "node0")
    assert on_this_node(small_set, f"{tmp_path}/$NODE").held().tolist() == [False, True, False]
    with pytest.raises(ShardError, match=r"NOWHERE.*VARIABLES are set on every node"):
        on_this_node(small_set, f"{tmp_path}/$NOWHERE")
    with pytest.raises(ShardError, match="absolute"):
        on_this_node(small_set, "shards")
    with pytest.raises(ShardError, match="holds none of the 3 shards"):
        on_this_node(small_set, str(tmp_path / "missing"))
    (folder / "000002.tar").write_bytes(b"half")
    with pytest.raises(ShardError, match=r"000002\.tar: 4 bytes, but \d+ were indexed; copy it again"):
        on_this_node(small_set, str(folder))
    images = tmp_path / "images" / "cat"
    images.mkdir(parents=True)
    (images / "1.jpg").write_bytes(picture(1))
    with pytest.raises(ShardError, match="not an index of whole tar shards"):
        on_this_node(build_folder(images.parent), str(folder))


def test_a_shard_goes_where_it_makes_the_least_work_for_each_rank() -> None:
    """One rank has the first shard alone, three have both."""
    alone, three = np.array([True, False]), np.array([True, True])
    placed = place(["a", "b"], np.array([6, 12]), [alone, three, three, three])
    assert placed.owners.tolist() == [1, 1], "12 records for three are less than 6 for one"
