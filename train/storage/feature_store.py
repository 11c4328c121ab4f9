"""Where features are stored: a folder per body and set of records, a row per record, filled by one run at a time.

FOLDER/<16 digits of the identity>/ contains a header and three plain files. A row is written as exactly its own bytes:
through a mapping, a network file system would write back whole pages, and with them outdated cached copies of other
machines' rows. Rows are mapped, read-only, once all of them are on the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from murmuration.accounting.durable import atomic, flush, sync, try_lock
from murmuration.data.store.index_files import read_json
from murmuration.train.config.section import RecipeError

ABSENT, PRESENT, BAD = 0, 1, 2
HEADER, LOCK = "features.json", "features.lock"
FORMAT = 1


@dataclass(frozen=True)
class FeatureRows:
    """Features, their labels, and which rows are there."""

    path: Path
    features: np.ndarray
    labels: np.ndarray
    state: np.ndarray


@dataclass(frozen=True)
class FeatureFolder:
    """The folder of one identity; runs with other bodies have folders of their own beside it."""

    path: Path
    identity: str
    records: int
    width: int

    @staticmethod
    def within(shared: Path, identity: str, records: int, width: int) -> FeatureFolder:
        return FeatureFolder(shared / identity[:16], identity, records, width)

    @property
    def files(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The files with their types and shapes. The state comes last: it says whether a row of the others counts."""
        return {
            "features.f32": ("<f4", (self.records, self.width)),
            "labels.i64": ("<i8", (self.records,)),
            "state.u8": ("|u1", (self.records,)),
        }

    @contextlib.contextmanager
    def claimed(self) -> Iterator[bool]:
        """Whether rows are missing; if so, the files exist and no other run fills them meanwhile. Called on one rank.

        Complete features never change again, so runs that only read them, such as those of a sweep, need no lock.
        """
        if self._complete():
            yield False
            return
        _refuse_others(self.path.parent, self.path.parent, _known_beside)
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.mkdir(exist_ok=True, mode=0o700)
        _refuse_others(self.path.parent, self.path, self._known)
        lock = _locked(self.path / LOCK)
        try:
            if not self._fits():  # checked again under the lock: another run may have begun or ended just before
                self._begin_anew()
            yield not self._complete()
        finally:
            os.close(lock)

    def missing(self, rank: int, world: int) -> np.ndarray:
        """This rank's rows that are not there yet. The file is read, not mapped: a cached page may become stale."""
        self._require_fitting()
        low, high = rank * self.records // world, (rank + 1) * self.records // world
        state = np.fromfile(self.path / "state.u8", "|u1", count=high - low, offset=low)
        return low + np.flatnonzero(~settled(state))

    def rows(self) -> FeatureRows:
        """Maps all rows. Called only after all ranks have written their last row, so that no cached page hides one."""
        self._require_fitting()
        found = FeatureRows(
            self.path,
            *(np.memmap(self.path / name, dtype, "r", shape=shape) for name, (dtype, shape) in self.files.items()),
        )
        if gone := int(np.count_nonzero(~settled(found.state))):
            raise RecipeError(
                f"{gone} rows of the features in {self.path} are missing although all were made, so not every machine "
                "sees what the others write there; name a features.folder on a file system where they do"
            )
        return found

    def _header(self) -> dict[str, object]:
        return {"format": FORMAT, "identity": self.identity, "records": self.records, "width": self.width}

    def _fits(self) -> bool:
        try:
            sizes = {name: (self.path / name).stat().st_size for name in self.files}
            return read_json(self.path / HEADER) == self._header() and sizes == self._sizes()
        except (FileNotFoundError, ValueError):
            return False

    def _sizes(self) -> dict[str, int]:
        return {name: np.dtype(dtype).itemsize * int(np.prod(shape)) for name, (dtype, shape) in self.files.items()}

    def _complete(self) -> bool:
        return self._fits() and not len(self.missing(0, 1))

    def _require_fitting(self) -> None:
        """Also called after opening: another machine may see another folder under this name, or it may have been
        emptied."""
        if not self._fits():
            raise RecipeError(
                f"the features in {self.path} are not those that the main rank made there; name a features.folder that "
                "all machines share and nothing else changes"
            )

    def _begin_anew(self) -> None:
        for name in (HEADER, *self.files):
            (self.path / name).unlink(missing_ok=True)
        for name, size in self._sizes().items():
            descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.truncate(descriptor, size)
                flush(descriptor)
            finally:
                os.close(descriptor)
        with atomic(self.path / HEADER, 0o600) as file:  # last: without it, the others are begun anew
            file.write(json.dumps(self._header()).encode())
        sync(self.path.parent)

    def _known(self, path: Path) -> bool:
        return path.name in (HEADER, LOCK, *self.files) or path.name.startswith(f".{HEADER}.")


class RowWriter:
    """Writes one rank's rows. Its files are opened write-only and synchronously (O_DSYNC), so that a network file
    system sends the bytes written, not the page around them."""

    def __init__(self, folder: FeatureFolder) -> None:
        self._files = folder.files
        self._descriptors: list[int] = []
        for name in self._files:
            self._descriptors.append(os.open(folder.path / name, os.O_WRONLY | os.O_DSYNC))

    def put(self, ids: np.ndarray, features: np.ndarray, labels: np.ndarray, present: np.ndarray) -> None:
        """Writes rows; each is marked as present only once its content is on the disk."""
        columns = (
            np.where(present[:, None], features, 0.0), np.where(present, labels, 0), np.where(present, PRESENT, BAD),
        )  # fmt: skip
        begins = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
        for descriptor, (dtype, _), column in zip(self._descriptors, self._files.values(), columns, strict=True):
            rows = np.ascontiguousarray(column, dtype)
            for first, neighbours in zip(ids[begins], np.split(rows, begins[1:]), strict=True):
                _write(descriptor, neighbours.tobytes(), int(first) * rows[:1].nbytes)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def settled(state: np.ndarray) -> np.ndarray:
    """Whether a row needs nothing more: its features are there, or its record is bad."""
    return (state == PRESENT) | (state == BAD)


def _known_beside(path: Path) -> bool:
    return bool(re.fullmatch("[0-9a-f]{16}", path.name)) and path.is_dir()


def _refuse_others(named: Path, folder: Path, known: Callable[[Path], bool]) -> None:
    others = sorted(path.name for path in folder.iterdir() if not known(path)) if folder.exists() else []
    if others:
        raise RecipeError(f"features.folder {named} contains other things ({others[0]}); name a folder of its own")


def _locked(path: Path) -> int:
    """Locks the file. The file stays after its release: another run may already have opened it to lock it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        ours = try_lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise RecipeError(
            f"{path} cannot be locked ({error.strerror}); name a features.folder on a file system that has locks"
        ) from None
    if not ours:
        os.close(descriptor)
        raise RecipeError(
            f"another run is computing the features in {path.parent}; start this one again once that is done, or "
            "give it another features.folder"
        )
    return descriptor


def _write(descriptor: int, content: bytes, offset: int) -> None:
    """Writes all bytes: a signal or a full disk may cut a write short; with a full disk, the next one raises."""
    rest = memoryview(content)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written
