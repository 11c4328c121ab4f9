"""Sources of byte ranges: the protocol, and the simplest one, files on a local or network disk."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Protocol

from murmuration.data.store.place import Place

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
