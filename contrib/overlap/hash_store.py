"""The perceptual hashes of every record of an index and of windows in its picture, kept beside it: made once, by
several processes, resumable after a kill.

Pictures are decoded as for training, in separate processes: a hostile file costs one record. A record without a usable
picture has no hash. Hashes of private records are private (0700): they reveal what the pictures look like.

A hash has 64 bits: which of the lowest 8 x 8 cosine frequencies of a picture lie above their median. This is
imagehash's pHash, on 32 x 32 pixels of luma. Copies that were re-encoded or resized differ in a few bits, other
pictures in about 32. A crop of a few per cent is another picture to it, so windows are hashed as well: all rectangles
with 90, 95 or 100 % of the width and of the height, in steps of 2.5 %. The hash of a crop is close to that of the
window nearest to it. Whether this is so, and how often a stranger is as close: `benchmarks/overlap.py`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from murmuration.accounting.durable import atomic
from murmuration.data.batch.shard_reader import ReadOptions, RecordReader, ShardReader, open_source
from murmuration.data.decode.decode import BadRecord, picture_in
from murmuration.data.decode.pool import DecodePool
from murmuration.data.decode.record import DataSpec, RecordMaker
from murmuration.data.store.index_files import open_npy, read_json
from murmuration.data.store.place import RecordIndex

VERSION = 2
DECODED = 64  # the side to which pictures are decoded before they are averaged down
_SIDE, _LOW = 32, 8
_STEP, _LENGTHS = 1 / 40, (1, 38 / 40, 36 / 40)  # of windows, as shares of a side
_LUMA = np.array([299, 587, 114], dtype=np.float64) / 1000
FOLDER = "phash"
_ABOUT, _HASHES, _STATES = "about.json", "hashes.npy", "states.npy"
_MISSING, _MADE, _BAD = 0, 1, 2
_RECORDS_PER_TASK = 128
Task = tuple[np.ndarray, np.ndarray, np.ndarray]


def window_hashes(pixels: np.ndarray) -> np.ndarray:
    """uint64 [n, WINDOWS] from uint8 [n, 64, 64, 3]; that of the whole picture comes first."""
    stacked = np.concatenate(_projections())
    count = len(stacked) // _LOW
    low = (stacked @ (pixels @ _LUMA) @ stacked.T).reshape(-1, count, _LOW, count, _LOW).swapaxes(2, 3)
    flat = low.reshape(-1, _LOW * _LOW).round(6)
    bits = flat > np.median(flat, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64).reshape(-1, WINDOWS)


def hamming(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.bitwise_count(one ^ other)


@lru_cache(maxsize=1)
def _cosines() -> np.ndarray:
    """The first rows of the cosine transform (type II, not normalised, like scipy's default)."""
    frequency, place = np.arange(_LOW)[:, None], np.arange(_SIDE)[None, :]
    return 2 * np.cos(np.pi * frequency * (2 * place + 1) / (2 * _SIDE))


def _spans() -> list[tuple[float, float]]:
    """Where windows begin and end along one side; the whole side comes first."""
    return [(k * _STEP, k * _STEP + long) for long in _LENGTHS for k in range(round((1 - long) / _STEP) + 1)]


WINDOWS = len(_spans()) ** 2
_KINDS = {_HASHES: (np.uint64, (WINDOWS,)), _STATES: (np.uint8, ())}


@lru_cache(maxsize=1)
def _projections() -> list[np.ndarray]:
    """For each span of a side of 64 pixels: its 8 lowest cosine frequencies after averaging it down to 32 pixels."""
    found = []
    for begin, end in _spans():
        edges = np.linspace(begin * DECODED, end * DECODED, _SIDE + 1)
        shares = np.zeros((_SIDE, DECODED))
        for cell, pixel in product(range(_SIDE), range(DECODED)):
            shared = min(edges[cell + 1], pixel + 1) - max(edges[cell], pixel)
            shares[cell, pixel] = max(0.0, shared) / (edges[cell + 1] - edges[cell])
        found.append(_cosines() @ shares)
    return found


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
