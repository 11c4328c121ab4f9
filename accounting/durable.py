"""Files that appear complete or not at all, even after a power cut: written aside, synced, renamed. And the lock that
keeps a second process away from a ledger, an index or a folder."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# Random, so that nobody else with write access to the folder can put a link or a file of his own there beforehand.
_ASIDE = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV)  # errors of file systems without hard links
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
def atomic(path: Path, mode: int = 0o644, once: bool = False, tidy: bool = True) -> Iterator[IO[bytes]]:
    """A file object whose content replaces `path` when the block ends without an error.

    `once`: if `path` exists by then, it stays; of several writers one wins. `tidy`: first remove what killed writers
    left in this folder, which costs a listing: without it, the caller does so once for many files.
    """
    if tidy:
        remove_left(path.parent)
    temporary, descriptor = _aside(path, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            flush(file.fileno())
            if once:
                _link(temporary, path)
            else:
                temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _aside(path: Path, mode: int) -> tuple[Path, int]:
    """A new file beside `path`, locked for as long as it is open: `remove_left` tells by the lock who was killed."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with suppress(OSError):  # no locks on this file system: what a kill leaves there stays
            if not try_lock(descriptor) or not os.fstat(descriptor).st_nlink:  # removed before it was locked
                os.close(descriptor)
                continue
        return temporary, descriptor


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        temporary.rename(path)


def remove_left(folder: Path) -> None:
    """Remove the files of `atomic` whose writers were killed; those that are being written stay."""
    with suppress(OSError):
        for name in [each for each in os.listdir(folder) if _ASIDE.fullmatch(each)]:
            with suppress(OSError):
                left = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    if try_lock(left):
                        (folder / name).unlink()
                finally:
                    os.close(left)


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
