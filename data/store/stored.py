"""Byte ranges of files on a local or network disk, and records on this machine, as another process can read them
without the index."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from murmuration.data.store.place import Place, ShardError
from murmuration.data.store.tar import parse

_OPEN_FILES = 256  # well under the usual limit of 1,024 descriptors per process


class RangeSource(Protocol):
    """A source of bytes; raises OSError when they cannot be read. The caller must check for short answers."""

    def read(self, path: Place, start: int, end: int) -> bytes: ...

    def forget(self, path: Place) -> None:
        """Drop what is cached about `path` before it is tried again."""
        ...


class _Handle:
    """A descriptor that closes with its last user, so that eviction cannot close it under a reader."""

    def __init__(self, path: Place) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # Records lie far apart: read-ahead would fetch megabytes that are never used.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class LocalFiles:
    """`pread` on a bounded set of open files; safe to call from several threads."""

    def __init__(self) -> None:
        self._open: OrderedDict[Place, _Handle] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: Place, start: int, end: int) -> bytes:
        with self._lock:
            handle = self._open.pop(path, None) or _Handle(path)
            self._open[path] = handle
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        return os.pread(handle.fd, end - start, start)

    def forget(self, path: Place) -> None:
        with self._lock:
            self._open.pop(path, None)


@dataclass(frozen=True, slots=True)
class Stored:
    """The bytes of a record of a tar shard; or, with a `suffix`, of a single file."""

    place: Place
    start: int
    end: int
    suffix: str = ""
    number: bytes | None = None
    """That of its class, for a file in a class folder."""
    digest: bytes | None = None
    """The first bytes of the file's SHA-256, where the index has them."""

    def members(self, raw: bytes, what: str) -> dict[str, bytes]:
        """The bytes split by lower-case suffix; ShardError if they are not this record's."""
        if not self.suffix:
            return parse(raw, what)
        same = len(raw) == self.end - self.start
        if same and self.digest is not None:
            same = hashlib.sha256(raw).digest()[: len(self.digest)] == self.digest
        if not same:
            raise ShardError(f"{what}: a file changed since it was indexed; restore it or index again")
        return {self.suffix: raw} if self.number is None else {self.suffix: raw, "cls": self.number}

    def read(self, files: LocalFiles) -> dict[str, bytes] | None:
        """The members; None if they cannot be had at once. Whoever asked then reads with retries, and says why not."""
        try:
            raw = files.read(self.place, self.start, self.end)
            if len(raw) == self.end - self.start:
                return self.members(raw, "")
        except (OSError, ShardError):
            pass
        files.forget(self.place)
        return None


@runtime_checkable
class StoredRecords(Protocol):
    """An index that can say where its records lie on this machine."""

    def stored(self, record: int) -> Stored | None:
        """None if the record lies elsewhere, or more than its bytes is needed to say what its members are."""
        ...
