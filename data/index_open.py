"""Open or build an index of either kind: tar shards, or a folder of single images."""

from __future__ import annotations

import os
from pathlib import Path

from data.folders import FolderIndex
from data.index import RecordIndex, ShardIndex
from data.index_format import FILES, is_url, read_manifest


def open_index(folder: str | os.PathLike[str], *, exclusions: bool = True) -> RecordIndex:
    """What `folder` holds decides; see ShardIndex.open and FolderIndex.open."""
    kind = read_manifest(folder).kind
    return (FolderIndex if kind == FILES else ShardIndex).open(folder, exclusions=exclusions)


def is_image_folder(source: str) -> bool:
    """A folder without tar shards. Patterns and URLs name shards."""
    return not is_url(source) and Path(source).is_dir() and not any(Path(source).glob("*.tar"))
