"""Exclude private records that look like public or evaluation pictures, record by record.

Which set may be filtered by which is a question of privacy, and most directions leak:

- A private record compared with PUBLIC pictures is kept or excluded on its own merits: no other private record affects
  the decision, so adding or removing one record changes one record, and the guarantee of training holds for the rest.
- A PUBLIC set filtered by a private one reveals who is in the private set to anyone who sees what was trained on.
- A private set deduplicated within itself couples its records. Whether one of several copies is kept or none of them,
  the presence of one person's record decides about another person's, so one additional record can change several, or
  replace one gradient by another: the noise is sized for one (Debenedetti et al., arXiv 2309.05610).

Where the unit of the promise has several records, all of them may be excluded with any of them (`by_unit`): the
decision about a unit then follows from that unit alone. It couples its records, so a run that protects single records
refuses such a list.

An excluded record keeps its place: it is drawn like any other and contributes nothing, so n stays that of the index.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from murmuration.accounting.durable import atomic
from murmuration.accounting.errors import InputError
from murmuration.contrib.overlap.phash import DECODED, VERSION, WINDOWS, hamming, window_hashes
from murmuration.data.batch.shard_reader import ReadOptions, RecordReader, ShardReader, open_source
from murmuration.data.decode.decode import BadRecord, picture_in
from murmuration.data.decode.pool import DecodePool
from murmuration.data.decode.record import DataSpec, RecordMaker
from murmuration.data.index.exclusions import Exclusions
from murmuration.data.index.open import open_index, open_units
from murmuration.data.index.shard_index import shared_shard
from murmuration.data.index.units import unit_named
from murmuration.data.store.index_files import open_npy, read_json
from murmuration.data.store.place import RecordIndex, ShardError

# The perceptual hashes of every record of an index and of windows in its picture, kept beside it: made once, by
# several processes, resumable after a kill.
#
# Pictures are decoded as for training, in separate processes: a hostile file costs one record. A record without a
# usable picture has no hash. Hashes of private records are private (0700): they reveal what the pictures look like.

FOLDER = "phash"
_ABOUT, _HASHES, _STATES = "about.json", "hashes.npy", "states.npy"
_MISSING, _MADE, _BAD = 0, 1, 2
_RECORDS_PER_TASK = 128
_KINDS = {_HASHES: (np.uint64, (WINDOWS,)), _STATES: (np.uint8, ())}
Task = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Hashes:
    """One row of hashes per record of an index, the whole picture's first; `valid` says which records have one."""

    windows: np.ndarray
    valid: np.ndarray

    @property
    def values(self) -> np.ndarray:
        return self.windows[:, 0]


def hash_index(index: RecordIndex, workers: int, progress: Callable[[int, int], None]) -> Hashes:
    """`index` must be opened with exclusions ignored: these hashes decide what is excluded."""
    folder = index.folder / FOLDER
    values, states = _open(folder, index)
    missing = np.flatnonzero(states == _MISSING)
    done = len(states) - len(missing)
    progress(done, len(states))
    for numbers, found, state in _made(index, missing, workers):
        # The hash first: after a kill between the two lines it is made again.
        values[numbers] = found
        states[numbers] = state
        done += len(numbers)
        progress(done, len(states))
    values.flush()
    states.flush()
    return Hashes(values, np.array(states == _MADE))


def _open(folder: Path, index: RecordIndex) -> tuple[np.memmap, np.memmap]:
    """The two files, filled as far as an earlier call got, or new ones."""
    about = {"version": VERSION, "manifest_digest": index.manifest_digest, "records": index.records}
    if not _known(folder, about):
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / _ABOUT).unlink(missing_ok=True)
        for name, (kind, row) in _KINDS.items():
            np.lib.format.open_memmap(folder / name, mode="w+", dtype=kind, shape=(index.records, *row)).flush()
        with atomic(folder / _ABOUT, 0o600) as file:
            file.write(json.dumps(about).encode())
    return (
        np.lib.format.open_memmap(folder / _HASHES, mode="r+"),
        np.lib.format.open_memmap(folder / _STATES, mode="r+"),
    )


def _known(folder: Path, about: dict[str, Any]) -> bool:
    """Whether the files are whole and belong to these records; damaged ones are rebuilt."""
    try:
        found = [open_npy(folder / name) for name in _KINDS]
        whole = all(
            each.dtype == kind and each.shape == (about["records"], *row)
            for each, (kind, row) in zip(found, _KINDS.values(), strict=True)
        )
        return whole and read_json(folder / _ABOUT) == about
    except (OSError, ValueError):
        return False


def _made(index: RecordIndex, missing: np.ndarray, workers: int) -> Iterator[Task]:
    if not len(missing):
        return
    records: RecordReader = (
        index if isinstance(index, RecordReader) else ShardReader(index, open_source(index, ReadOptions()))
    )
    pool = DecodePool(RecordMaker(DataSpec(DECODED)), workers)
    threads = ThreadPoolExecutor(workers + 2, thread_name_prefix="hash")
    waiting: deque[Future[Task]] = deque()
    try:
        for start in range(0, len(missing), _RECORDS_PER_TASK):
            waiting.append(threads.submit(_task, records, pool, missing[start : start + _RECORDS_PER_TASK]))
            if len(waiting) > 2 * (workers + 2):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)
        pool.close()


def _task(records: RecordReader, pool: DecodePool, numbers: np.ndarray) -> Task:
    pixels = np.zeros((len(numbers), DECODED, DECODED, 3), dtype=np.uint8)
    states = np.full(len(numbers), _MADE, dtype=np.uint8)
    for row, number in enumerate(numbers.tolist()):
        picture = picture_in(records.read(number))
        try:
            if picture is None:
                raise BadRecord("no image")
            pixels[row] = pool.picture(picture)
        except BadRecord:
            states[row] = _BAD
    return numbers, window_hashes(pixels), states


MOST_DISTANCE = 16  # beyond this, pictures that merely look alike are taken for copies
_PARTS = 4  # parts of a hash: two hashes at distance d differ in at most d // 4 bits in one of their four parts
_QUERIES = 1 << 14
_ROWS = 1 << 16  # public records that are searched among at a time, so that memory does not grow with their number

Meter = Callable[[int, int], None]


class LeakError(ShardError):
    """The requested comparison would leak information about private records; the message names the leak and the fix."""


def exclude_overlaps(
    private: str | Path,
    against: Sequence[str | Path],
    distance: int,
    workers: int,
    progress: Callable[[str], Meter],
    runs_on: Callable[[Path], Sequence[str]],
    crops: bool = True,
    by_unit: bool = False,
) -> Exclusions:
    """Hash, compare, and write the list beside the private index. `runs_on` names the private runs on an index.
    `by_unit`: all records of a unit are excluded with any of them."""
    if not 0 <= distance <= MOST_DISTANCE:
        raise InputError(f"--distance {distance}: choose 0 (equal hashes) to {MOST_DISTANCE} bits")
    if workers < 1:
        raise InputError(f"--workers {workers}: at least 1 process decodes the pictures")
    try:
        import faiss  # noqa: F401  # before hours of hashing
    except ModuleNotFoundError:
        raise InputError("the search needs the package faiss: pip install 'murmuration[overlap]'") from None
    ours = open_index(private, excluded="ignored")
    theirs = [open_index(each, excluded="ignored") for each in against]
    refuse_leaks(ours, theirs, runs_on)
    units = open_units(ours, _unit_of(ours)) if by_unit else None
    known = [hash_index(each, workers, progress(f"hashing {each.folder.parent.name}")) for each in theirs]
    mine = hash_index(ours, workers, progress("hashing the private records"))
    found = overlapping(mine, known, distance, crops, progress("comparing"))
    if units is not None:
        found = units.records_of_all(units.units_of(found.astype(np.int64))).astype(np.uint64)
    if len(found) == ours.records:
        raise ShardError(f"{ours.folder}: every record looks like one of the others; there is nothing left to train on")
    names = tuple(f"{each.folder.parent.name} (manifest {each.manifest_digest})" for each in theirs)
    reason = "perceptual hash within the distance of a record of these sets"
    reason += ", or of a window that a crop of up to 10 % leaves" if crops else ""
    exclusions = Exclusions(ours.manifest_digest, found, names, distance, reason, "" if units is None else units.by)
    exclusions.write(ours.folder)
    return exclusions


def _unit_of(index: RecordIndex) -> str:
    if (named := unit_named(index.folder)) is None:
        raise ShardError(f"{index.folder}: this index knows no units; index it again with --unit, or omit --by-unit")
    return named[0]


def refuse_leaks(
    private: RecordIndex, against: Sequence[RecordIndex], runs_on: Callable[[Path], Sequence[str]]
) -> None:
    """Raise LeakError for the directions that this module's docstring rules out."""
    for other in against:
        if other.manifest_digest == private.manifest_digest or shared_shard(private.shards, other.shards):
            raise LeakError(
                f"{other.folder}: contains the private records themselves; deduplicating a private set within itself "
                "makes one person's record decide about another's (whether one copy is kept or none), which the noise "
                "does not cover; compare with public or evaluation pictures only"
            )
        if used := runs_on(other.folder):
            raise LeakError(
                f"{other.folder}: its records are private (run {used[0]!r} trained on them); filtering another set by "
                "them would reveal who is among them; swap the two sets if the other one is public"
            )
        if Exclusions.read(other.folder, other.manifest_digest, other.records) is not None:
            raise LeakError(
                f"{other.folder}: was itself filtered as a private set; filtering another set by it would reveal who "
                "is in it; name a public set"
            )


def overlapping(
    private: Hashes, public: Sequence[Hashes], distance: int, crops: bool = True,
    progress: Meter = lambda done, total: None,
) -> np.ndarray:  # fmt: skip
    """Sorted u64 ids of the private records within `distance` bits of any public one; with `crops`, also if only a
    window of one of the two pictures is as close to the whole of the other."""
    rows = np.flatnonzero(private.valid)
    close = np.zeros(len(private.valid), dtype=bool)
    progress(0, len(rows))
    for each in public if len(rows) else ():
        known = np.flatnonzero(each.valid)
        for start in range(0, len(known), _ROWS):
            part = known[start : start + _ROWS]
            whole = _Known(each.windows[part, 0])
            windows = _Known(each.windows[part].ravel()) if crops else whole
            for first in range(0, len(rows), _QUERIES):
                asked = rows[first : first + _QUERIES]
                close[asked] |= windows.near(private.windows[asked, 0], distance)
                if crops:
                    of_windows = whole.near(private.windows[asked].ravel(), distance)
                    close[asked] |= of_windows.reshape(len(asked), -1).any(axis=1)
                progress(first + len(asked), len(rows))
    return np.flatnonzero(close).astype(np.uint64)


class _Known:
    """Hashes to search among."""

    def __init__(self, hashes: np.ndarray) -> None:
        import faiss

        self._unique = np.unique(hashes)
        self._index = faiss.IndexBinaryMultiHash(64, _PARTS, 64 // _PARTS)
        self._index.add(_as_bytes(self._unique))  # pyright: ignore[reportCallIssue]

    def near(self, asked: np.ndarray, distance: int) -> np.ndarray:
        """Whether each is within `distance` bits of any."""
        self._index.nflip = distance // _PARTS
        # The radius is exclusive, and the matches are checked: the list must not rest on faiss's reading of the radius.
        found = self._index.range_search(_as_bytes(asked), distance + 1)  # pyright: ignore[reportCallIssue]
        limits, _, matches = found
        each = np.repeat(np.arange(len(asked)), np.diff(limits.astype(np.int64)))
        within = hamming(asked[each], self._unique[matches]) <= distance
        close = np.zeros(len(asked), dtype=bool)
        close[each[within]] = True
        return close


def _as_bytes(hashes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(hashes, dtype="<u8").view(np.uint8).reshape(-1, 8)
