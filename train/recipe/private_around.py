"""Whether private records lie where public ones are read: in the same folders, in any folder below or above them.

A folder of pictures is searched as it is indexed: all folders below it, links followed, hidden ones left out. Every
folder is listed once and no file is opened, so a million pictures in one folder cost one listing. Tar shards are what
an index or a pattern names, so only the folders in which they lie, and those above, are asked for logs of runs.

What lies behind a URL has no folders to search. There, the log beside the index that is named is all that is asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from murmuration.data.draw.stream import StreamIndex
from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.format import BESIDE, FOLDER, MANIFEST
from murmuration.data.index.keyed_digest import folders_beside
from murmuration.data.index.open import open_index
from murmuration.data.index.public_split import SplitIndex, whole_of
from murmuration.data.index.shard_index import ShardIndex, shared_shard
from murmuration.data.store.place import RecordIndex, ShardError
from murmuration.train.storage.sibling_runs import BESIDE_SHARDS, LOG, RunLog

_MOST_LINKS = 40  # that one file is reached through, as in Linux


@dataclass
class Extent:
    """The real folders of a set of records, as far as they are local, and the logs of runs found while listing them."""

    tops: set[str]
    """Where the search began, and where links led it: what lies above these has not been listed."""
    folders: set[str] = field(default_factory=set)
    """Each file in them may be a record."""
    linked: set[str] = field(default_factory=set)
    """Folders of single files that are reached through links."""
    indexes: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)

    @staticmethod
    def of(records: RecordIndex | Path) -> Extent:
        """`records` may also be a folder of pictures without an index, or a single one."""
        whole = whole_of(records)
        if isinstance(whole, FolderIndex):
            return _searched(whole.root)
        if isinstance(whole, Path):
            if whole.is_dir():
                return _searched(whole)
            behind = set(_folders_behind(os.fspath(whole.absolute())))
            return Extent(behind, linked=behind)
        folders = {os.path.dirname(place) for place in _shards(whole)}
        return Extent(set(folders), folders)

    @cached_property
    def above(self) -> frozenset[str]:
        """The tops themselves and every folder that contains one."""
        return frozenset(
            os.fspath(folder) for top in self.tops | self.linked for folder in (Path(top), *Path(top).parents)
        )

    def logs(self) -> Iterator[Path]:
        """Logs of runs on records here: those beside indexes, and notes beside the records."""
        yield from (Path(folder) / LOG for folder in sorted(self.indexes))
        yield from (Path(folder) / BESIDE_SHARDS for folder in sorted(self.notes | self.above))
        for folder in sorted(self.above):
            for index in (Path(folder) / FOLDER, Path(folder + BESIDE)):
                if (index / MANIFEST).is_file():
                    yield index / LOG

    def meets(self, other: Extent) -> bool:
        """Whether one of the two contains the other, or a part of it."""
        return not (
            other.folders.isdisjoint(self.folders | self.linked | self.above) and other.linked.isdisjoint(self.folders)
        )


def share_records(public: RecordIndex | Path, extent: Extent, private: RecordIndex, of_private: Extent) -> bool:
    """Whether records of an index may be among the public ones: by the folders in which they lie, or, where both are
    tar shards, by the shards."""
    whole = whole_of(private)
    mine = whole_of(public)
    if isinstance(whole, ShardIndex) and isinstance(mine, ShardIndex | StreamIndex):
        if not _shards(whole).isdisjoint(_shards(mine)):
            return True
        if isinstance(mine, StreamIndex):
            return mine.shared_with(whole.shards) is not None
        return shared_shard(whole.shards, mine.shards) is not None
    return extent.meets(of_private)


@dataclass(frozen=True)
class LoggedPrivateRun:
    """A private run that is logged where public records lie."""

    run: str
    log: Path


def protected_around(
    public: RecordIndex | Path, extent: Extent, known_apart: Iterable[RecordIndex] = ()
) -> LoggedPrivateRun | None:
    """The first private run whose log lies in, below or above the folders of these records, unless its index shows
    that it is about others. `known_apart`: indexes that are known to be about others, wherever they lie.

    The records' own index is not asked here, nor is what it left beside them where only a part of them is public.
    """
    own = _own_logs(public)
    apart = {entry for index in known_apart for entry in _private_runs(index.folder / LOG)}
    notes: list[Path] = []
    for log in extent.logs():
        if log in own:
            continue
        if log.name == BESIDE_SHARDS:
            notes.append(log)
        elif runs := _private_runs(log):
            if _may_share(public, extent, log.parent):
                return LoggedPrivateRun(min(runs)[2], log)
            apart |= runs
    for note in notes:
        if unexplained := _private_runs(note) - apart:
            return LoggedPrivateRun(min(unexplained)[2], note)
    return None


def _own_logs(public: RecordIndex | Path) -> frozenset[Path]:
    """What the runs on a set with a public part left: they are held to the frozen cut instead."""
    if not isinstance(public, SplitIndex):
        return frozenset()
    files = [*RunLog.of(public).files]
    if isinstance(whole := public.whole, ShardIndex | FolderIndex):
        files += [folder / FOLDER / LOG for folder in folders_beside(whole)]
        files += [folder.with_name(folder.name + BESIDE) / LOG for folder in folders_beside(whole)]
    return frozenset(Path(os.path.realpath(file.parent)) / file.name for file in files)


def _private_runs(log: Path) -> set[tuple[str, str, str]]:
    """Ids, phases and names: a run may protect several sets, each in a phase of its own."""
    runs = RunLog.at(log).siblings()
    return {
        (str(run.get("id")), str(run.get("phase")), str(run.get("run"))) for run in runs if run.get("private", True)
    }


def _may_share(public: RecordIndex | Path, extent: Extent, index: Path) -> bool:
    """A log whose index cannot be read may be about any records here."""
    try:
        private = open_index(index, excluded="ignored")
        return share_records(public, extent, private, Extent.of(private))
    except (ShardError, OSError):
        return True


def _shards(index: RecordIndex) -> set[str]:
    """The real paths of local shards."""
    if isinstance(index, StreamIndex):
        places = index.places
    else:
        places = [index.place(n) for n in range(len(index.shards))] if isinstance(index, ShardIndex) else []
    return {os.path.realpath(place) for place in places if isinstance(place, Path)}


def _searched(root: Path) -> Extent:
    found = Extent({os.path.realpath(root)})
    waiting = sorted(found.tops)
    while waiting:
        folder = waiting.pop()
        if folder not in found.folders:
            waiting += _list(folder, found)
    return found


def _list(folder: str, found: Extent) -> list[str]:
    """Adds what one folder shows to `found`; returns the folders in it. Only links cost more than their line in the
    listing."""
    below: list[str] = []
    telling: set[str] = set()
    links: dict[str, str] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name in _TELLING:
                    telling.add(entry.name)
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    _follow(entry, folder, found, below, links)
                elif entry.is_dir(follow_symlinks=False):
                    below.append(entry.path)
    except OSError as error:
        raise ShardError(
            f"{folder}: cannot be searched for private records ({error.strerror}); repair or remove it"
        ) from error
    found.folders.add(folder)
    if BESIDE_SHARDS in telling:
        found.notes.add(folder)
    if MANIFEST in telling:
        found.indexes.add(folder)
    return below


_TELLING = frozenset((BESIDE_SHARDS, MANIFEST))


def _follow(entry: os.DirEntry[str], folder: str, found: Extent, below: list[str], links: dict[str, str]) -> None:
    """`links`: the real folders that links of this folder lead to, by what is written in them."""
    if entry.is_dir():
        target = os.path.realpath(entry.path)
        found.tops.add(target)
        below.append(target)
        return
    written = os.readlink(entry.path)
    if os.path.islink(os.path.join(folder, written)):
        found.linked.update(_folders_behind(entry.path))
        return
    there = os.path.dirname(written)
    if there not in links:
        links[there] = os.path.realpath(os.path.join(folder, there))
    found.linked.add(links[there])


def _folders_behind(path: str) -> Iterator[str]:
    """The real folder of a file, and those of the links on the way to it."""
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(os.path.dirname(path))
        yield folder
        if not os.path.islink(path):
            return
        path = os.path.join(folder, os.readlink(path))
