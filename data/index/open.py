"""Open or build an index of either kind: tar shards, or a folder of single images."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.format import FILES, FOLDER, MANIFEST, Handling, find, mend, read_manifest
from murmuration.data.index.shard_index import ShardIndex, expand
from murmuration.data.index.unit_table import UnitTable
from murmuration.data.index.units import read_units, unit_named
from murmuration.data.store.place import RecordIndex, ShardError, is_url, require_no_access


def open_index(folder: str | os.PathLike[str], *, excluded: Handling = "absent") -> RecordIndex:
    """Open the kind of index that `folder` contains; see ShardIndex.open and FolderIndex.open. A pattern and a single
    tar are opened by the index beside their shards, if it is an index of these shards and of no others."""
    if is_url(text := os.fspath(folder)):
        require_no_access(text)
    if _names_shards(folder):
        places = [Path(os.path.realpath(place)) for place in expand(folder)]
        root = Path(os.path.commonpath([place.parent for place in places]))
        index = ShardIndex.open(_built(root, folder), excluded=excluded)
        found = [Path(os.path.realpath(index.place(number))) for number in range(len(index.shards))]
        if found != places:
            raise ShardError(
                f"{index.folder}: its {len(found)} shards are not the {len(places)} that {os.fspath(folder)} names; "
                f"name the folder for all of them, or {mend(folder)} --out INDEX and name INDEX"
            )
        return index
    kind = read_manifest(folder).kind
    return (FolderIndex if kind == FILES else ShardIndex).open(folder, excluded=excluded)


def require_index(source: str) -> None:
    """Refuses a folder that has none, before anything that takes seconds; `open_index` finds whatever else is wrong."""
    if not is_url(source) and not _names_shards(source):
        read_manifest(source)


def _names_shards(folder: str | os.PathLike[str]) -> bool:
    text = os.fspath(folder)
    if is_url(text) or os.path.isdir(text) or (find(text) / MANIFEST).is_file():
        return False
    return "{" in text or text.endswith(".tar")


def _built(root: Path, pattern: str | os.PathLike[str]) -> Path:
    folder = root / FOLDER
    if not (folder / MANIFEST).is_file():
        raise ShardError(f"{folder}: no index here; {mend(pattern)}")
    return folder


def open_units(index: RecordIndex, by: str) -> UnitTable:
    """The table of the units of a whole index, which must be named by `by`; ShardError if it has none, or others."""
    if not isinstance(index, ShardIndex | FolderIndex):
        raise ShardError("only an index of tar shards or of a folder of images has units")
    again = f"python launch/prepare.py index {index.root} --unit {shlex.quote(by)}"
    found = read_units(index.folder, index.manifest_digest, sum(shard.records for shard in index.shards))
    if found is None:
        raise ShardError(f"{index.folder}: this index knows no units; make them with: {again}")
    if found.by != by:
        raise ShardError(f"{index.folder}: the units of this index are named by {found.by!r}, not by {by!r}; name "
                         f"those, or make others with: {again}")  # fmt: skip
    if index.records != found.records:
        raise ShardError(f"{index.folder}: some records are skipped, so its units would be others; use all of them")
    return found


def unit_known(source: str) -> str | None:
    """What the units of the index that `source` names are named by; None if it knows none, or is not at hand.
    ShardError if it knows some, but not which."""
    try:
        folder = find(source)
        if _names_shards(source):
            folder = Path(os.path.commonpath([Path(os.path.realpath(each)).parent for each in expand(source)])) / FOLDER
    except (ShardError, OSError, ValueError):
        return None
    named = unit_named(folder)
    return None if named is None else named[0]


def is_image_folder(source: str) -> bool:
    """Whether `source` is a folder without tar shards. Patterns and URLs name shards."""
    return not is_url(source) and Path(source).is_dir() and not any(Path(source).glob("*.tar"))
