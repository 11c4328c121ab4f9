"""32 random bytes beside an index that key the digests of its records (see keyed_digest.py). They are made once."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from murmuration.data.store.index_files import open_regular, write_once
from murmuration.data.store.place import ShardError

SALT, SALT_BYTES = "salt.key", 32
_GONE = (errno.ENOENT, errno.ENOTDIR)


def read_salt(folder: Path) -> bytes | None:
    """The salt, or None if there is none. ShardError if it cannot be read or is damaged."""
    path = folder / SALT
    try:
        descriptor = open_regular(path)
        try:
            found = os.read(descriptor, SALT_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise ShardError(
            f"{path}: cannot be read ({error.strerror}), and without it ledgers cannot name these records; ask its "
            "owner for access to it, as to the records"
        ) from error
    if len(found) != SALT_BYTES:
        raise ShardError(f"{path}: damaged; restore it from a copy of the index, since ledgers name the records by it")
    return found


def make_salt(folder: Path, *elsewhere: Path) -> bytes:
    """The salt of the index in `folder`, made if there is none. If another index of the same records, in one of the
    folders `elsewhere`, has a salt, it is copied, so that both name them alike. OSError if it cannot be written."""
    known = read_salt(folder)
    if known is not None:
        return known
    inherited = (_readable_salt(each) for each in elsewhere if each != folder)
    fresh = next((salt for salt in inherited if salt is not None), None) or secrets.token_bytes(SALT_BYTES)
    write_once(folder / SALT, fresh, 0o600)
    found = read_salt(folder)
    assert found is not None
    return found


def _readable_salt(folder: Path) -> bytes | None:
    """The salt, or None if it cannot be read: another owner's salt may be private, and then this index gets its own."""
    try:
        return read_salt(folder)
    except ShardError:
        return None
