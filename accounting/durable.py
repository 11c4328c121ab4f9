"""Files that appear complete or not at all, even after a power cut: written aside, synced, renamed. And the lock that
keeps a second process away from a ledger, an index or a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def atomic(path: Path, mode: int = 0o644, one_writer: bool = False) -> Iterator[IO[bytes]]:
    """A file object whose content replaces `path` when the block ends without an error.

    `one_writer`: nobody else writes this file now, so a killed process's temporary file can be overwritten.
    """
    mark = "" if one_writer else f".{os.getpid()}"
    temporary = path.with_name(f".{path.name}{mark}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Makes a file's content durable; or a folder's names, without which a rename in it is not durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Locks this open file or folder until it is closed, and returns True; False if another process has the lock.

    The kernel releases it when its holder ends, however it ends; there is no lock file to remove.
    """
    from filelock import lock_descriptor  # not above: a ledger is verified without a lock, and the import takes a while

    return lock_descriptor(descriptor, blocking=False)
