"""Files that appear complete or not at all, even after a power cut: written aside, synced, renamed. And the lock that
keeps a second process away from a ledger, an index or a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
_UNSTEADY = {
    errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.ENODEV, errno.ENXIO, errno.ENOLINK, errno.ECONNRESET, errno.ECONNABORTED, errno.EPROTO, errno.EUCLEAN,
}  # fmt: skip
"""Errors of a disk that fails or of a network file system that went away: neither space nor permission is missing."""


def remedy(error: OSError, otherwise: str = "free space or fix the permissions") -> str:
    """What to do about a file that cannot be written."""
    return "see that the disk or network file system works (df, dmesg)" if error.errno in _UNSTEADY else otherwise


def of_storage(error: OSError) -> bool:
    """Whether the error is the storage's, and not one of what was asked for."""
    return error.errno in _FULL | _UNSTEADY


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
            flush(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Makes a file's content durable; or a folder's names, without which a rename in it is not durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def flush(descriptor: int) -> None:
    """Returns once what was written to an open file or folder is durable."""
    with naming(descriptor):
        os.fsync(descriptor)


@contextmanager
def naming(descriptor: int) -> Iterator[None]:
    """Errors of a write or a sync name the file, as those of `open` do by themselves."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            error.filename = error.filename or os.readlink(f"/proc/self/fd/{descriptor}")
        raise


def try_lock(descriptor: int) -> bool:
    """Locks this open file or folder until it is closed, and returns True; False if another process has the lock.

    The kernel releases it when its holder ends, however it ends; there is no lock file to remove.
    """
    from filelock import lock_descriptor  # not above: a ledger is verified without a lock, and the import takes a while

    return lock_descriptor(descriptor, blocking=False)
