"""The files of an index, and those that lie beside shards: written whole or not at all, and read without trust."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from data.durable import atomic
from data.tar import ShardError

_MOST_DIGITS = 20
_AGAIN = "then give the same command again"
_FIXES = {
    errno.ENOSPC: f"free some space there, {_AGAIN}",
    errno.EDQUOT: f"free some of the quota, {_AGAIN}",
    errno.EFBIG: f"raise the limit of file sizes (ulimit -f), {_AGAIN}",
}


@contextmanager
def index_file(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """`atomic`, where a disk that is full or read-only is a ShardError that names the file and the fix."""
    try:
        with atomic(path, mode) as file:
            yield file
    except OSError as error:
        raise cannot_write(path, error) from error


def make_folder(target: Path) -> None:
    """Data often lie where nobody may write."""
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(target, error) from error


def cannot_write(path: Path, error: OSError) -> ShardError:
    fix = _FIXES.get(error.errno or 0, "name another folder with --out")
    return ShardError(f"{path}: cannot be written ({error.strerror or error}); {fix}")


def open_regular(path: Path) -> int:
    """A descriptor for reading. A pipe would wait for ever, and a device may never end: those are a ShardError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ShardError(f"{path}: not a regular file but a folder, a pipe or a device; remove it or name the shards")
    # Not blocking: in between, somebody may have put a pipe in its place.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def read_json(path: Path) -> Any:
    """What the file holds; see `parse_json`. OSError where it cannot be read."""
    return parse_json(path.read_bytes())


def parse_json(raw: bytes) -> Any:
    """ValueError for all that is no JSON, for nesting too deep for Python's parser, and for numbers of many digits."""
    try:
        return json.loads(raw, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def open_npy(path: Path) -> np.ndarray:
    """The array in a .npy file, mapped for reading. ValueError for one that is damaged, OSError if it cannot be read.

    Shape and type are for the caller to compare: what the header says is a claim.
    """
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:
        # numpy reads the header as Python and a zip as an archive: SyntaxError, TokenError, EOFError, OverflowError,
        # MemoryError, BadZipFile and others.
        raise ValueError(f"{path.name} is no .npy file: {type(error).__name__}") from error
    if not isinstance(found, np.ndarray):
        found.close()
        raise ValueError(f"{path.name} is no .npy file but an archive of several")
    return np.asarray(found)
