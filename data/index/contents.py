"""Checks that records are, byte for byte, the ones that were indexed, before steps are repeated.

A step that is repeated under its old keys draws the old noise. If one of its records was changed in the meantime, the
two sums differ by that record alone, and anyone who saw the results of both can read it off. Sizes, which every start
compares, do not reveal a record that was blanked.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.public_split import SplitIndex, whole_of
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.cache import Copies
from murmuration.data.store.place import RecordIndex

# This many of the shards without a drawn record are compared as well; the choice is random each time.
SAMPLED = 2


def pins_contents(index: RecordIndex) -> bool:
    """Whether a record that changed under an equal size is noticed. If not, steps are never repeated under their old
    keys. Sizes alone are known of images without `--contents`, and of remote shards whose server sends no ETags."""
    whole = whole_of(index)
    if isinstance(whole, FolderIndex):
        return whole.pinned
    if isinstance(whole, ShardIndex):
        return isinstance(whole.root, Path) or all(shard.etag for shard in whole.shards)
    return True


def shards_of(index: RecordIndex, ids: np.ndarray) -> list[int]:
    """The local shards that contain these records. Images in folders are compared at every read if their index has
    hashes, and remote shards with the manifest; synthetic records follow from their rule."""
    whole = whole_of(index)
    if not isinstance(whole, ShardIndex) or not isinstance(whole.root, Path):
        return []
    numbers = index.originals(ids) if isinstance(index, SplitIndex) else ids
    found: list[int] = np.unique(np.searchsorted(whole.shard_ends, numbers, side="right")).tolist()
    return found


def forget_cached(index: RecordIndex, ids: np.ndarray | None, folder: Path, beat: Callable[[], None]) -> None:
    """Makes sure that these records of a remote index (None: all) come from its store, or from a cached shard that is
    the indexed one."""
    whole = whole_of(index)
    if not isinstance(whole, ShardIndex) or isinstance(whole.root, Path) or not folder.is_dir():
        return
    places = {str(whole.place(number)): shard for number, shard in enumerate(whole.shards)}
    copies, drawn = Copies(folder), set[str]()
    if ids is None:
        copies.drop_all_records()
        drawn.update(places)
    for number, record in enumerate(() if ids is None else ids):
        place, start, end = index.locate(int(record))
        copies.drop_record(place, places[str(place)], start, end)
        drawn.add(str(place))
        if number % 1000 == 0:
            beat()
    for place in sorted(drawn):
        copies.drop_changed_shard(place, places[place])
        beat()


def with_sample(index: RecordIndex, shards: Collection[int]) -> list[int]:
    """These shards and a few of the others."""
    others = sorted(set(range(len(index.shards))).difference(shards)) if shards else []
    chosen = secrets.SystemRandom().sample(others, min(SAMPLED, len(others)))
    return sorted([*shards, *chosen])


def require_contents(index: RecordIndex, shards: Sequence[int], beat: Callable[[], None]) -> None:
    """Read the shards from end to end; ShardError for the first that is not the indexed one."""
    whole = whole_of(index)
    assert isinstance(whole, ShardIndex) or not shards
    for shard in shards:
        assert isinstance(whole, ShardIndex)
        whole.check_shard(shard, contents=True)
        beat()
