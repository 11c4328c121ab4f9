"""The perceptual hashes of every record of an index and of windows in its picture, kept beside it: made once, by
several processes, resumable after a kill.

Pictures are decoded as for training, in separate processes: a hostile file costs one record. A record without a usable
picture has no hash. Hashes of private records are private (0700): they reveal what the pictures look like.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from murmuration.accounting.durable import atomic
from murmuration.contrib.overlap.phash import DECODED, VERSION, WINDOWS, window_hashes
from murmuration.data.batch.shard_reader import ReadOptions, RecordReader, ShardReader, open_source
from murmuration.data.decode.decode import BadRecord, picture_in
from murmuration.data.decode.pool import DecodePool
from murmuration.data.decode.record import DataSpec, RecordMaker
from murmuration.data.store.index_files import open_npy, read_json
from murmuration.data.store.place import RecordIndex

FOLDER = "phash"
_ABOUT, _HASHES, _STATES = "about.json", "hashes.npy", "states.npy"
_KINDS = {_HASHES: (np.uint64, (WINDOWS,)), _STATES: (np.uint8, ())}
_MISSING, _MADE, _BAD = 0, 1, 2
_RECORDS_PER_TASK = 128


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


Task = tuple[np.ndarray, np.ndarray, np.ndarray]


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
