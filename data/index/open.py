"""Open or build an index of either kind: tar shards, or a folder of single images."""

from __future__ import annotations

import os
from pathlib import Path

from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.format import FILES, Handling, read_manifest
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import RecordIndex, is_url


def open_index(folder: str | os.PathLike[str], *, excluded: Handling = "absent") -> RecordIndex:
    """Open the kind of index that `folder` contains; see ShardIndex.open and FolderIndex.open."""
    kind = read_manifest(folder).kind
    return (FolderIndex if kind == FILES else ShardIndex).open(folder, excluded=excluded)


def is_image_folder(source: str) -> bool:
    """Whether `source` is a folder without tar shards. Patterns and URLs name shards."""
    return not is_url(source) and Path(source).is_dir() and not any(Path(source).glob("*.tar"))
