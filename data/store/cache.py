"""Remote bytes cached on local NVMe, shared by all ranks of a node; never the only copy, never trusted unchecked.

Nothing is evicted. Poisson draws have no favourites, so replacing one record by another cannot raise the hit rate; it
would only wear the disk. Records that do not fit are read from the store every time.

The cache contains private records in the clear: folders are 0700, files 0600. Files appear complete (temporary file,
then link). A cached range carries its length and SHA-256 and is checked at every read; a cached shard is checked
against the manifest's SHA-256 before it appears and by its length whenever it is opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from murmuration.accounting.durable import flush, try_lock
from murmuration.data.store.place import Place, Shard, ShardError
from murmuration.data.store.stored import RangeSource

_HEAD = 8 + 32  # length and SHA-256 before the bytes of a kept range
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Cache:
    """Where to cache, how much at most, and whether to keep single records or the whole shards that contain them.

    Shards pay off when a run reads most records of most shards at least once; the first access fetches the shard.
    """

    folder: Path
    limit_bytes: int
    keep: Literal["records", "shards"] = "records"


class CachedRanges:
    """A source of ranges that tries the disk first. Safe for several threads and processes."""

    def __init__(self, behind: RangeSource, cache: Cache, shards: Mapping[str, Shard]) -> None:
        self._behind, self._cache, self._shards = behind, cache, shards
        cache.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._room = _Room(cache.folder, cache.limit_bytes)
        self._given_up: set[str] = set()

    def read(self, path: Place, start: int, end: int) -> bytes:
        shard = self._shards[str(path)]
        if self._cache.keep == "shards" and (kept := self._shard(str(path), shard)) is not None:
            with contextlib.suppress(OSError), kept.open("rb") as file:
                if os.fstat(file.fileno()).st_size == shard.bytes:
                    return os.pread(file.fileno(), end - start, start)
            return self._behind.read(path, start, end)
        return self._range(path, shard, start, end)

    def forget(self, path: Place) -> None:
        """Drop the whole shard, because bytes read from it were wrong. Ranges are checked anyway."""
        kept = self._file(str(path), self._shards[str(path)], "tar")
        if kept.exists():
            self._room.remove(kept)
        self._behind.forget(path)

    def _range(self, path: Place, shard: Shard, start: int, end: int) -> bytes:
        kept = self._file(f"{path} {start} {end}", shard, "part")
        with contextlib.suppress(OSError):
            whole = kept.read_bytes()
            raw = whole[_HEAD:]
            if whole[:_HEAD] == _head(raw) and len(raw) == end - start:
                return raw
            self._room.remove(kept)
        raw = self._behind.read(path, start, end)
        if len(raw) == end - start:
            with contextlib.suppress(OSError):  # a full or broken cache disk costs only speed
                self._room.add(kept, len(raw) + _HEAD, iter((_head(raw), raw)))
        return raw

    def _shard(self, url: str, shard: Shard) -> Path | None:
        """The cached file, fetched now by the first caller; None if it is not here (yet)."""
        kept = self._file(url, shard, "tar")
        if kept.exists():
            return kept
        if url in self._given_up or not self._room.fits(shard.bytes):
            return None
        try:
            with _only_one(kept.with_suffix(".lock")) as first:
                if first and not kept.exists():
                    self._room.add(kept, shard.bytes, self._whole(url, shard))
        except OSError:
            # From now on its records are read one by one; failures there are retried and then reported.
            self._given_up.add(url)
        return kept if kept.exists() else None

    def _whole(self, url: str, shard: Shard) -> Iterator[bytes]:
        hashed = hashlib.sha256()
        for start in range(0, shard.bytes, _CHUNK):
            raw = self._behind.read(url, start, min(shard.bytes, start + _CHUNK))
            if len(raw) != min(shard.bytes, start + _CHUNK) - start:
                raise OSError("a short answer")
            hashed.update(raw)
            yield raw
        if hashed.hexdigest() != shard.sha256:
            raise OSError("the fetched shard is not the indexed one")

    def _file(self, name: str, shard: Shard, ending: str) -> Path:
        return _file(self._cache.folder, name, shard, ending)


def _file(folder: Path, name: str, shard: Shard, ending: str) -> Path:
    """A file named by its expected content: another version of the shard is another file."""
    key = hashlib.sha256(f"{name}\n{shard.bytes} {shard.sha256} {shard.etag}".encode()).hexdigest()[:40]
    return folder / key[:2] / f"{key[2:]}.{ending}"


class Copies:
    """Removes cached copies that may differ from what was indexed, so that they are fetched again.

    What reading checks finds accidents: a record carries its own hash, a shard its length. Somebody who changed a copy
    could have changed those, too.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._folder, self._room = folder, _Room(folder, 0)
        except OSError as error:
            raise ShardError(f"{folder}: copies of records cannot be removed ({error.strerror}); remove it") from error

    def drop_record(self, place: Place, shard: Shard, start: int, end: int) -> None:
        """No index has a hash of a single record."""
        self._remove(_file(self._folder, f"{place} {start} {end}", shard, "part"))

    def drop_all_records(self) -> None:
        for kept in self._folder.rglob("*.part"):
            self._remove(kept)

    def drop_changed_shard(self, place: Place, shard: Shard) -> None:
        kept = _file(self._folder, str(place), shard, "tar")
        with contextlib.suppress(OSError), kept.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256:
                return
        self._remove(kept)

    def _remove(self, kept: Path) -> None:
        self._room.remove(kept)
        if kept.exists():
            raise ShardError(f"{self._folder}: copies of records cannot be removed; remove it")


def _head(raw: bytes) -> bytes:
    return len(raw).to_bytes(8, "little") + hashlib.sha256(raw).digest()


class _Room:
    """The number of bytes cached, agreed upon by all processes through one locked file.

    A process that finds the folder unused counts again, which also removes files left by killed processes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._threads = threading.Lock()
        self._used = os.open(folder / "used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # A shared lock, held for as long as this process lives; the kernel releases it if the process is killed.
        self._users = os.open(folder / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self._locked():
            if try_lock(self._users):
                self._write(self._count())
            # By hand: filelock has no shared lock on a descriptor, and each process that uses the cache holds this one.
            fcntl.flock(self._users, fcntl.LOCK_SH)

    def fits(self, size: int) -> bool:
        with self._locked():
            return self._read() + size <= self._limit

    def add(self, target: Path, size: int, content: Iterator[bytes]) -> None:
        """Write `target` whole or not at all; skip it if it does not fit."""
        with self._locked():
            used = self._read()
            if used + size > self._limit:
                return
            self._write(used + size)
        try:
            target.parent.mkdir(exist_ok=True, mode=0o700)
            descriptor, temporary = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
            try:
                with open(descriptor, "wb") as file:
                    for part in content:
                        file.write(part)
                    if target.suffix == ".tar":  # not checked at each read, so it must not be torn by a power cut
                        file.flush()
                        flush(file.fileno())
                # Two processes that fetched the same range wrote the same bytes; only one of the files is kept.
                os.link(temporary, target)
            finally:
                os.unlink(temporary)
        except BaseException:
            self._give_back(size)
            raise

    def remove(self, target: Path) -> None:
        with contextlib.suppress(OSError):
            size = target.stat().st_size
            target.unlink()
            self._give_back(size)

    def _give_back(self, size: int) -> None:
        with self._locked():
            self._write(max(0, self._read() - size))

    def _count(self) -> int:
        total = 0
        for folder, _, names in os.walk(self._folder):
            for name in names:
                path = os.path.join(folder, name)
                if name.endswith((".tmp", ".lock")):
                    os.unlink(path)
                elif name.endswith((".part", ".tar")):
                    total += os.stat(path).st_size
        return total

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            # By hand: filelock would poll, while the kernel wakes a process that waits for these few lines.
            fcntl.flock(self._used, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._used, fcntl.LOCK_UN)

    def _read(self) -> int:
        return int(os.pread(self._used, 20, 0) or b"0")

    def _write(self, used: int) -> None:
        os.pwrite(self._used, b"%020d" % used, 0)

    def __del__(self) -> None:
        for name in ("_used", "_users"):
            if hasattr(self, name):
                os.close(getattr(self, name))


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[bool]:
    """True for the first caller in any process; the others continue without waiting."""
    lock.parent.mkdir(exist_ok=True, mode=0o700)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)
