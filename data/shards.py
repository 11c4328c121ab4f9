"""One record in one read: the bytes that the index points at, taken apart into its members.

A record that cannot be *read* is a ShardError, never a bad record: leaving it out would make the sampled set
depend on the weather of a file system, so reads are tried again and then the run stops.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from typing import Protocol

from data.index import Place, RecordIndex
from data.tar import ShardError

_TRIES = 3
_OPEN_FILES = 256  # well under the usual limit of 1,024 descriptors per process


class RangeSource(Protocol):
    """Where bytes come from; raises OSError when they do not. A short answer is the caller's to notice."""

    def read(self, path: Place, start: int, end: int) -> bytes: ...

    def forget(self, path: Place) -> None:
        """Drop what is cached about `path` before it is tried again."""
        ...


class _Handle:
    """A descriptor that closes with its last user, so that eviction cannot pull it from under a reader."""

    def __init__(self, path: Place) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # Records lie far apart: read-ahead would fetch megabytes that nobody asked for.
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


class ShardReader:
    """`read(id)` -> the members of one record, by lower-case suffix."""

    def __init__(self, index: RecordIndex, source: RangeSource | None = None, *, pause: float = 0.2) -> None:
        self.index = index
        self._source: RangeSource = source if source is not None else LocalFiles()
        self._pause = pause

    def read(self, record: int) -> dict[str, bytes]:
        path, start, end = self.index.locate(record)
        what = str(path)  # the shard alone: which record was drawn is nobody's business, and this reaches the console
        problem: ShardError | None = None
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(self._pause * 2**attempt)
            try:
                raw = self._source.read(path, start, end)
                if len(raw) == end - start:
                    # Damaged headers are tried again too: a page torn in transit looks just like that.
                    return self.index.members(record, raw)
                problem = ShardError(f"{what}: {len(raw)} bytes came; the shard was cut, restore it")
            except OSError as error:
                problem = ShardError(f"{what}: cannot be read ({error.strerror or error}); restore access and resume")
            except ShardError as error:
                problem = error
            self._source.forget(path)
        assert problem is not None
        raise problem
