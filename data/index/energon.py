"""NVIDIA Energon's `.tar.idx` beside each shard: u64 little-endian starts of the samples, then the end of the last.

That is one shard's part of our offsets.npy, so a set prepared for one is prepared for the other. A sidecar is a
third party's claim: it is compared with the shard, and even a trusted one must have a record at every offset.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from murmuration.data.index.scan import Scan, settled, stamp_of, unreadable
from murmuration.data.store.index_files import index_file, open_regular
from murmuration.data.store.place import ShardError
from murmuration.data.store.tar import BLOCK, Read, split_name, walk

# Long names and PAX headers of a record's first member lie within this many bytes, practically always.
_HEADERS = 4096


def sidecar(path: Path) -> Path:
    return path.with_suffix(".tar.idx")


def write_sidecar(path: Path, offsets: np.ndarray) -> None:
    target = sidecar(path)
    if not _same(target, offsets):
        with index_file(target) as file:
            file.write(offsets.astype("<u8").tobytes())


def check_sidecar(path: Path, offsets: np.ndarray) -> None:
    """Refuse a sidecar that disagrees with the shard: one of the two has changed since the sidecar was made."""
    target = sidecar(path)
    if not target.is_file() or _same(target, offsets):
        return
    claimed = target.stat().st_size // 8 - 1
    raise ShardError(
        f"{target}: does not match its shard ({claimed} records claimed, {len(offsets) - 1} found); check that the "
        "shard is the right one, then delete the sidecar or replace it with --energon"
    )


def _same(target: Path, offsets: np.ndarray) -> bool:
    """Whether the sidecar contains these offsets; one of another size is not read."""
    try:
        if not target.is_file() or target.stat().st_size != offsets.nbytes:
            return False
        return target.read_bytes() == offsets.astype("<u8").tobytes()
    except OSError as error:
        raise unreadable(target, error) from error


def trusted_scan(path: Path) -> Scan:
    """Offsets from the sidecar, each checked in the shard, without reading the contents; so there is no content hash.

    One error is not noticed here: a record that the sidecar omits, so that it counts as part of the one before it.
    Reading notices it (two keys in one record) and stops the run.
    """
    target = sidecar(path)
    started = time.time_ns()
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            offsets = _parsed(target, before.st_size)
            _check_records(lambda at, count: os.pread(file.fileno(), count, at), offsets, before.st_size, str(path))
            after = os.fstat(file.fileno())
    except FileNotFoundError as error:
        raise ShardError(f"{error.filename}: missing; without --trust-idx the shard itself is read") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if stamp_of(before) != stamp_of(after):
        raise ShardError(f"{path}: changed while it was being indexed; wait until its writer is done")
    return Scan(offsets, before.st_size, "", stamp=stamp_of(after) if settled(after, started) else None)


def _parsed(target: Path, size: int) -> np.ndarray:
    count = target.stat().st_size
    # A shard cannot contain more records than blocks, so a longer list is not worth reading.
    if count < 8 or count % 8 or count // 8 > size // BLOCK + 1:
        raise ShardError(f"{target}: {count} bytes are not a list of offsets; delete it, or replace it with --energon")
    offsets = np.frombuffer(target.read_bytes(), dtype="<u8")
    # Differences of unsigned numbers are never negative, so compare neighbours.
    if np.any(offsets % BLOCK) or np.any(offsets[1:] <= offsets[:-1]) or int(offsets[-1]) > size:
        raise ShardError(f"{target}: offsets out of order or beyond the shard; delete it, or replace it with --energon")
    return offsets


def _check_records(read: Read, offsets: np.ndarray, size: int, what: str) -> None:
    """Every offset starts a record with a new key, none lies before the first, and the archive ends at the last."""
    bounds = [int(offset) for offset in offsets]
    stale = "the .tar.idx is stale, omit --trust-idx"
    first = bounds[0]
    if any(split_name(member.name) for member in walk(read, first, what, whole=False)):
        raise ShardError(f"{what}: a record lies before the first offset; {stale}")
    end = bounds[-1]
    if any(True for _ in walk(lambda at, count: read(end + at, count), size - end, what, whole=True)):
        raise ShardError(f"{what}: members lie after the last offset; {stale}")
    seen: set[str] = set()
    for start, stop in pairwise(bounds):
        key = _first_key(read, start, stop, what)
        if key is None or key in seen:
            raise ShardError(f"{what}: byte {start} does not start a new record; {stale}")
        seen.add(key)


def _first_key(read: Read, start: int, stop: int, what: str) -> str | None:
    """Key of the member whose first header block lies at `start`."""
    head = read(start, min(_HEADERS, stop - start))

    def within(at: int, count: int) -> bytes:
        held = head[at : at + count]
        return held if len(held) == count else read(start + at, count)

    member = next(walk(within, stop - start, what, whole=False), None)
    parts = split_name(member.name) if member is not None and member.start == 0 else None
    return parts[0] if parts else None
