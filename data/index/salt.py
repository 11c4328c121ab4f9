"""32 random bytes that key the digests of records (see keyed_digest.py). They are made once.

They lie in each index and, hidden, in the folders of the records, so that a new index, or one elsewhere, finds them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from murmuration.data.store.index_files import open_regular, write_once
from murmuration.data.store.place import Place, ShardError

SALT, BESIDE_RECORDS, SALT_BYTES = "salt.key", ".murmuration-salt.key", 32
_GONE = (errno.ENOENT, errno.ENOTDIR)


def folders_of(root: Place, names: Iterable[str] = ()) -> tuple[Path, ...]:
    """Folders where any other index of some of the same shards also looks, whatever else it contains: the one that
    contains them all, and each folder of shards. None behind a URL. An index of single files has only the first."""
    if not isinstance(root, Path):
        return ()
    inner = {(root / name).parent for name in names}
    return (root, *sorted(inner - {root}))


def read_salt(path: Path) -> bytes | None:
    """The salt in this file, or None if there is none. ShardError if it cannot be read or is damaged."""
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


def make_salt(folder: Path, beside: Sequence[Path] = ()) -> bytes:
    """The salt of the index in `folder`. An index without one takes that of the records, in the folders `beside`; what
    it has is left there. OSError if the index's own cannot be written."""
    salt = read_salt(folder / SALT)
    places = [each / BESIDE_RECORDS for each in beside]
    salt = salt or next((found for place in places if (found := readable_salt(place)) is not None), None)
    fresh = salt or secrets.token_bytes(SALT_BYTES)
    for place in places:
        with contextlib.suppress(OSError):  # data are often on read-only storage
            write_once(place, fresh, 0o600)
        salt = salt or readable_salt(place)  # of two indexes that are made at once, both take the one that is there
        fresh = salt or fresh
    write_once(folder / SALT, fresh, 0o600)
    found = read_salt(folder / SALT)
    assert found is not None
    return found


def readable_salt(path: Path) -> bytes | None:
    """The salt, or None if it cannot be read: another owner's salt may be private, and then this index gets its own."""
    try:
        return read_salt(path)
    except ShardError:
        return None
