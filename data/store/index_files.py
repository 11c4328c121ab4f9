"""The files of an index and those beside shards: written whole or not at all, and read without trust."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from murmuration.accounting.durable import atomic, remedy
from murmuration.accounting.strict_json import parse
from murmuration.data.store.place import Place, ShardError

_AGAIN = "then repeat the command"
_FIXES = {
    errno.ENOSPC: f"free some space there, {_AGAIN}",
    errno.EDQUOT: f"free some of the quota, {_AGAIN}",
    errno.EFBIG: f"raise the limit of file sizes (ulimit -f), {_AGAIN}",
}

OWNER_ALONE, FOR_ALL = 0o600, 0o644

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@contextmanager
def index_file(path: Path, mode: int = OWNER_ALONE, tidy: bool = True) -> Iterator[IO[bytes]]:
    """`atomic`, but a full or read-only disk is a ShardError that names the file and the fix."""
    try:
        with atomic(path, mode, tidy=tidy) as file:
            yield file
    except OSError as error:
        raise cannot_write(path, error) from error


def write_once(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write the file if it does not exist; of several processes that do so at once, one wins. OSError on failure."""
    if not path.exists():
        with atomic(path, mode, once=True) as file:
            file.write(content)


def make_folder(target: Path, mode: int = OWNER_ALONE) -> None:
    """Make the folder, for files of this mode; ShardError if it cannot be made, because data are often on read-only
    storage."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(mode | (mode & 0o444) >> 2, exist_ok=True)
    except OSError as error:
        raise cannot_write(target, error) from error


def mode_like(shards: Collection[Place]) -> int:
    """The mode of files that tell of these shards. Nobody knows who may read what is behind a URL."""
    paths = [shard for shard in shards if isinstance(shard, Path)]
    with contextlib.suppress(OSError):
        if len(paths) == len(shards):
            return mode_between((path.stat().st_mode for path in paths), {path.parent for path in paths})
    return OWNER_ALONE


def mode_between(modes: Iterable[int], folders: Iterable[Path]) -> int:
    """The mode of files that tell of the ones with these modes in these folders: for everybody if everybody can read
    each of them, or else for the owner alone."""
    ways = {way for folder in map(Path.resolve, folders) for way in (folder, *folder.parents)}
    readable = all(mode & stat.S_IROTH for mode in modes)
    return FOR_ALL if readable and all(way.stat().st_mode & stat.S_IXOTH for way in ways) else OWNER_ALONE


def cannot_write(path: Path, error: OSError) -> ShardError:
    fix = _FIXES.get(error.errno or 0) or remedy(error, "name another folder with --out")
    return ShardError(f"{path}: cannot be written ({error.strerror or error}); {fix}")


def open_regular(path: Path) -> int:
    """A descriptor for reading. A pipe would block for ever, and a device may never end, so both are a ShardError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ShardError(f"{path}: not a regular file but a folder, a pipe or a device; remove it or name the shards")
    # Non-blocking: in the meantime somebody may have put a pipe in its place.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def read_json(path: Path) -> Any:
    """The file's content, parsed strictly. OSError if it cannot be read, ValueError if it is not JSON."""
    return parse(path.read_bytes())


def open_npy(path: Path) -> np.ndarray:
    """The array in a .npy file, mapped for reading. ValueError if the file is damaged, OSError if it cannot be read.

    The caller must check shape and type: the header is only a claim.
    """
    try:
        _require_mappable(path)
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except _Unmappable as error:
        raise ValueError(f"{path.name} {error}") from None
    except Exception as error:
        # numpy reads the header as Python and a zip as an archive: SyntaxError, TokenError, EOFError, OverflowError,
        # MemoryError, BadZipFile and others.
        raise ValueError(f"{path.name} is not a .npy file: {type(error).__name__}") from error
    if not isinstance(found, np.ndarray):
        found.close()
        raise ValueError(f"{path.name} is not a .npy file but an archive of several")
    return np.asarray(found)


class _Unmappable(Exception):
    """The message continues a sentence that begins with the name of the file."""


def _require_mappable(path: Path) -> None:
    """Check what numpy's memmap does not: it divides by the item size and multiplies the sizes unchecked.

    An item size of 0 ends the process (SIGFPE), and a negative or overflowing size maps memory that is not there.
    """
    with path.open("rb") as file:
        if file.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
            return  # an archive or something else, which np.load distinguishes and does not map
        file.seek(0)
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise _Unmappable(f"has a header of version {version[0]}.{version[1]}, which no index uses")
        shape, _, kind = _HEADERS[version](file)
        if kind.itemsize == 0:
            raise _Unmappable("contains items of 0 bytes, so it cannot be mapped")
        if min(shape, default=0) < 0:
            raise _Unmappable(f"claims a negative size, {min(shape)}")
        claimed, there = math.prod(shape) * kind.itemsize, os.fstat(file.fileno()).st_size - file.tell()
        if claimed > there:
            raise _Unmappable(f"was cut off: its header claims {claimed} bytes and {there} are there")
