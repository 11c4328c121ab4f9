"""One pass over one shard, which yields record offsets, size and hash, or the reason not to trust the shard."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from murmuration.accounting.strict_json import parse
from murmuration.data.index.census import Census
from murmuration.data.index.units import UnitColumn, column_of
from murmuration.data.store.index_files import open_regular
from murmuration.data.store.place import Place, ShardError
from murmuration.data.store.tar import Member, Read, shown, split_name, walk

_CHUNK = 4 << 20
_LARGEST_STATS = 64 << 20
# A file written within the resolution of its time stamp may change again without a change of the stamp.
_FINE_STAMP_NS, _COARSE_STAMP_NS = 50_000_000, 2_000_000_000

Stamp = tuple[int | str, ...]


@dataclass(frozen=True)
class Scan:
    """`stamp` is the shard's size and times, or its ETag; None if these could not reveal a later change."""

    offsets: np.ndarray
    bytes: int
    sha256: str
    census: Census
    etag: str = ""
    stamp: Stamp | None = None
    units: bytes | None = None  # the hashes of the records' units, if they were asked for

    @property
    def records(self) -> int:
        return len(self.offsets) - 1

    @property
    def offsets_sha256(self) -> str:
        return hashlib.sha256(self.offsets.tobytes()).hexdigest()


def scan(place: Place, unit: str | None = None) -> Scan:
    """Read the shard once from front to back; raises ShardError on anything doubtful. `unit`: what units are named by,
    if they are to be found."""
    return scan_file(place, unit) if isinstance(place, Path) else scan_url(place, unit)


def scan_file(path: Path, unit: str | None = None) -> Scan:
    started = time.time_ns()
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            window = _Window(file.read)
            census, column = Census(), column_of(unit)
            offsets = record_offsets(window.read, before.st_size, str(path), census, column)
            window.drain(before.st_size)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise unreadable(path, error) from error
    if stamp_of(before) != stamp_of(after) or window.size != before.st_size:
        raise ShardError(f"{path}: changed while it was being indexed; wait until its writer is done")
    stamp = stamp_of(after) if settled(after, started) else None
    return Scan(offsets, before.st_size, window.sha256, census, stamp=stamp, units=_found(column))


def scan_url(url: str, unit: str | None = None) -> Scan:
    from murmuration.data.store.remote import open_shard

    with open_shard(url) as stream:
        window = _Window(stream.read)
        census, column = Census(), column_of(unit)
        offsets = record_offsets(window.read, stream.size, url, census, column)
        window.drain(stream.size)
    if window.size != stream.size:
        raise ShardError(f"{url}: {window.size} bytes came, {stream.size} were announced; fetch it again")
    # Without an ETag nothing reveals a later change that keeps the size.
    stamp = (stream.size, stream.etag) if stream.etag else None
    return Scan(offsets, stream.size, window.sha256, census, stream.etag or "", stamp, _found(column))


def _found(column: UnitColumn | None) -> bytes | None:
    return None if column is None else bytes(column.found)


def stamp_of(stat: os.stat_result) -> Stamp:
    """Size, mtime and ctime: copying tools set mtime back, but nothing sets ctime back."""
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def settled(stat: os.stat_result, now: int) -> bool:
    latest = max(stat.st_mtime_ns, stat.st_ctime_ns)
    return now - latest > (_FINE_STAMP_NS if latest % 1_000_000_000 else _COARSE_STAMP_NS)


def unreadable(path: Path, error: OSError) -> ShardError:
    return ShardError(f"{path}: cannot be read ({error.strerror or error}); check the path and permissions")


class _Window:
    """A stream in the form that `walk` needs; each byte is read once and hashed on the way."""

    def __init__(self, more: Callable[[int], bytes]) -> None:
        self._more = more
        self._held, self._at = bytearray(), 0
        self._digest = hashlib.sha256()

    @property
    def size(self) -> int:
        return self._at + len(self._held)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def read(self, offset: int, count: int) -> bytes:
        while self.size < offset + count and self._pull(offset):
            pass
        return bytes(self._held[offset - self._at : offset - self._at + count])

    def drain(self, size: int) -> None:
        """Read to the end, or until more than `size` bytes came, in case the stream never ends."""
        while self.size <= size and self._pull(self.size):
            pass

    def _pull(self, keep_from: int) -> bool:
        chunk = self._more(_CHUNK)
        self._digest.update(chunk)
        dropped = min(keep_from - self._at, len(self._held))
        del self._held[:dropped]
        self._at += dropped
        self._held += chunk
        return bool(chunk)


def record_offsets(
    read: Read, size: int, what: str, census: Census, units: UnitColumn | None = None
) -> np.ndarray:  # fmt: skip
    """The start of every record and then the end of the last member.

    `census` counts the members found; `units` notes whose records they are.
    """
    starts: list[int] = []
    key, suffixes, end = None, set[str](), 0
    seen: set[str] = set()

    def members() -> Generator[Member]:
        nonlocal end
        end = yield from walk(read, size, what, whole=True)

    for member in members():
        parts = split_name(member.name)
        if parts is None:
            census.loose += 1
            continue
        if parts[0] != key:
            census.count(suffixes)
            key, suffixes = parts[0], set()
            if key in seen:
                raise ShardError(
                    f"{what}: key '{shown(key)}' occurs twice; one record would count as two, so rename it"
                )
            seen.add(key)
            starts.append(member.start)
            if units is not None:
                units.begin(key)
        if parts[1] in suffixes:
            raise ShardError(f"{what}: '{shown(member.name)}' occurs twice; rewrite the shard")
        suffixes.add(parts[1])
        if census.wants(parts[1], member.size):
            census.look_into(read(member.data, member.size))
        if units is not None and units.wants(parts[1], member.size):
            units.look_into(read(member.data, member.size))
    census.count(suffixes)
    return np.array([*starts, end], dtype="<u8")


def check_stats(path: Path, records: int) -> str | None:
    """Compare with the count that img2dataset leaves beside each shard, the only evidence that one ends too early.

    Returns a remark if that file cannot be understood.
    """
    stats = path.with_name(f"{path.stem}_stats.json")
    if not stats.is_file():
        return None
    try:
        if stats.stat().st_size > _LARGEST_STATS:
            raise ValueError("it is far too large")
        expected = parse(stats.read_bytes())["successes"]
        if type(expected) is not int:
            raise ValueError("its successes are not a count")
    except OSError as error:
        raise unreadable(stats, error) from error
    except (ValueError, KeyError, TypeError) as error:
        return f"{stats}: not a count of img2dataset ({error}), so it was not compared with the shard"
    if expected != records:
        raise ShardError(f"{path}: {records} records, but {stats.name} counts {expected}; fetch the shard again")
    return None
