"""One record in one read: the bytes that the index points at, split into the record's members.

A record that cannot be *read* is a ShardError, never a bad record: leaving it out would make the sampled set
depend on transient faults of a file system, so reads are retried and then the run stops.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from murmuration.data.decode.pool import LIMITS, Limits
from murmuration.data.store.cache import Cache, CachedRanges
from murmuration.data.store.place import Place, RecordIndex, ShardError, UnreadableError
from murmuration.data.store.remote import ChangedShardError, Identity, RemoteRanges
from murmuration.data.store.retry import Patience, patiently
from murmuration.data.store.stored import LocalFiles, RangeSource
from murmuration.data.store.tar import DAMAGED


@runtime_checkable
class RecordReader(Protocol):
    """Anything that returns a record's members, by lower-case suffix. An index whose records are generated, not stored,
    is itself a RecordReader and is read without the rest of this module."""

    def read(self, record: int) -> dict[str, bytes]: ...


class ShardReader:
    """`read(id)` -> the members of one record, by lower-case suffix. Safe to call from several threads."""

    def __init__(
        self,
        index: RecordIndex,
        source: RangeSource | None = None,
        *,
        pause: float = 0.2,
        tries: int = 8,
        cancelled: threading.Event | None = None,
    ) -> None:
        self.index = index
        self._source: RangeSource = source if source is not None else LocalFiles()
        self._patience = Patience(tries, pause)
        self._cancelled = cancelled

    def read(self, record: int) -> dict[str, bytes]:
        if self.index.left_out(record):
            raise ShardError(f"{self.index.folder}: an excluded record was requested, and those are never read")
        place, start, end = self.index.locate(record)
        what = self.index.owner(record)  # which record was drawn is private, and this reaches the console
        try:
            return patiently(lambda: self._once(place, start, end, record, what), self._patience, self._cancelled)
        except _DamagedError as error:
            raise UnreadableError(str(error)) from None
        except OSError as error:
            raise UnreadableError(f"{what}: cannot be read ({error.strerror or error}); restore access") from error

    def _once(self, place: Place, start: int, end: int, record: int, what: str) -> dict[str, bytes]:
        try:
            raw = self._source.read(place, start, end)
            if len(raw) == end - start:
                return self.index.members(record, raw)
            raise _DamagedError(f"{what}: {DAMAGED}")
        except ChangedShardError:
            raise
        except ShardError as error:
            # Damaged headers are retried too: a page torn in transit looks the same.
            self._source.forget(place)
            raise _DamagedError(str(error)) from error
        except OSError:
            self._source.forget(place)
            raise


class _DamagedError(OSError):
    """Bytes came but were wrong: worth a retry, as if they had not come."""


@dataclass(frozen=True)
class ReadOptions:
    """How bytes are fetched and pictures decoded. No option changes a pixel, so a resumed run may change them."""

    workers: int = 0  # decoding processes; 0 decodes in this process, where a hostile file can end it
    in_flight: int = 1  # records that this process reads at a time; decoding processes read local ones themselves
    timeout_seconds: float = 30.0  # of one request to a remote store
    cache: Cache | None = None
    limits: Limits = LIMITS  # of one decode; not an option of a run, because they decide which records are bad


def open_source(index: RecordIndex, reading: ReadOptions) -> RangeSource:
    """The source for the place of the records, behind the cache if one is configured."""
    place = index.locate(0)[0]
    if isinstance(place, Path):
        return LocalFiles()
    root = next(place.removesuffix(f"/{shard.name}") for shard in index.shards if place.endswith(f"/{shard.name}"))
    expected = {f"{root}/{shard.name}": Identity(shard.bytes, shard.etag or None) for shard in index.shards}
    remote = RemoteRanges(expected, reading.timeout_seconds)
    if reading.cache is None:
        return remote
    return CachedRanges(remote, reading.cache, {f"{root}/{shard.name}": shard for shard in index.shards})
