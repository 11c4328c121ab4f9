"""Which shards a draw reads, compared byte by byte before its step is made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from murmuration.data.index.contents import SAMPLED, pins_contents, require_contents, shards_of, with_sample
from murmuration.data.index.folders import build_folder
from murmuration.data.index.public_split import SplitIndex
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import RecordIndex, ShardError
from murmuration.data.synthetic.index import SyntheticIndex
from tests.support.evaluation_world import class_folders
from tests.support.range_server import RangeServer, serving


def one_by_one(index: RecordIndex, ids: np.ndarray) -> list[int]:
    names = {Path(index.owner(int(record))).name for record in ids}
    return [number for number, shard in enumerate(index.shards) if shard.name in names]


def test_the_shards_of_a_draw_are_those_of_its_records(small_set: ShardIndex) -> None:
    rng = np.random.default_rng(5)
    private = SplitIndex(small_set, 0.3, public=False)
    for index in (small_set, private):
        for size in (0, 1, 2, 5, index.records):
            ids = np.sort(rng.choice(index.records, size, replace=False))
            assert shards_of(index, ids) == one_by_one(index, ids)
    assert shards_of(SyntheticIndex("shapes", 10, 1, 8), np.arange(3)) == []


def test_a_changed_shard_is_found_only_by_whoever_draws_from_it(small_set: ShardIndex) -> None:
    path = small_set.folder.parent / small_set.shards[1].name
    raw = bytearray(path.read_bytes())
    raw[600] ^= 1
    path.write_bytes(raw)
    small_set.check_unchanged()  # by its size
    beats: list[int] = []
    require_contents(small_set, [0, 2], lambda: beats.append(1))
    assert len(beats) == 2
    for index in (small_set, SplitIndex(small_set, 0.3, public=False)):
        with pytest.raises(ShardError, match=f"{path.name}: changed since it was indexed"):
            require_contents(index, [0, 1, 2], lambda: None)


def test_others_are_sampled_anew_each_time(small_set: ShardIndex) -> None:
    assert with_sample(small_set, []) == [], "nothing is made again"
    found = with_sample(small_set, {1})
    assert 1 in found and len(found) == min(len(small_set.shards), 1 + SAMPLED)


def test_what_is_indexed_by_size_alone_says_so(small_set: ShardIndex, tmp_path: Path) -> None:
    assert pins_contents(small_set) and pins_contents(SplitIndex(small_set, 0.3, public=False))
    assert pins_contents(SyntheticIndex("shapes", 10, 1, 8))
    pictures = class_folders(tmp_path / "pictures", 2)
    for contents in (False, True):
        index = build_folder(pictures, contents=contents)
        assert pins_contents(index) == pins_contents(SplitIndex(index, 0.5, public=False)) == contents
        victim, _, size = index.locate(0)
        assert isinstance(victim, Path)
        raw = victim.read_bytes()
        if contents:
            with pytest.raises(ShardError, match="a file changed"):
                index.members(0, bytes(size))
        else:
            assert index.members(0, bytes(size)), "nothing notices"
        assert index.members(0, raw)


def test_servers_without_etags_pin_no_contents(small_set: ShardIndex) -> None:
    folder = small_set.folder.parent
    with serving(RangeServer(folder)) as server:
        for etags in (True, False):
            server.etags = etags
            remote = build(f"{server.url}/{{000000..{len(small_set.shards) - 1:06d}}}.tar", folder / f"etags-{etags}")
            assert pins_contents(remote) == etags
