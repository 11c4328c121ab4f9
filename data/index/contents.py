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
from murmuration.data.index.public_split import SplitIndex
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import RecordIndex

# This many of the shards without a drawn record are compared as well; the choice is random each time.
SAMPLED = 2


def pins_contents(index: RecordIndex) -> bool:
    """Whether a record that changed under an equal size is noticed. If not, steps are never repeated under their old
    keys. Sizes alone are known of images without `--contents`, of shards that were indexed by their sidecars, and of
    remote shards whose server sends no ETags."""
    whole = index.whole if isinstance(index, SplitIndex) else index
    if isinstance(whole, FolderIndex):
        return whole.pinned
    if isinstance(whole, ShardIndex):
        local = isinstance(whole.root, Path)
        return all(shard.sha256 if local else shard.etag for shard in whole.shards)
    return True


def shards_of(index: RecordIndex, ids: np.ndarray) -> list[int]:
    """The local shards that contain these records. Images in folders are compared at every read if their index has
    hashes, and remote shards with the manifest; synthetic records follow from their rule."""
    whole = index.whole if isinstance(index, SplitIndex) else index
    if not isinstance(whole, ShardIndex) or not isinstance(whole.root, Path):
        return []
    numbers = index.originals(ids) if isinstance(index, SplitIndex) else ids
    found: list[int] = np.unique(np.searchsorted(whole.shard_ends, numbers, side="right")).tolist()
    return found


def with_sample(index: RecordIndex, shards: Collection[int]) -> list[int]:
    """These shards and a few of the others."""
    others = sorted(set(range(len(index.shards))).difference(shards)) if shards else []
    chosen = secrets.SystemRandom().sample(others, min(SAMPLED, len(others)))
    return sorted([*shards, *chosen])


def require_contents(index: RecordIndex, shards: Sequence[int], beat: Callable[[], None]) -> None:
    """Read the shards from end to end; ShardError for the first that is not the indexed one."""
    whole = index.whole if isinstance(index, SplitIndex) else index
    assert isinstance(whole, ShardIndex) or not shards
    for shard in shards:
        assert isinstance(whole, ShardIndex)
        whole.check_shard(shard, contents=True)
        beat()
