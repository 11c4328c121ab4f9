"""Keyed digests of records, for ledgers, certificates, checkpoints and feature stores.

A bare hash of private records confirms a guess: anyone who knows all records but one can hash the set with and without
it and compare. So the digest that leaves the machine is HMAC-SHA256 under 32 random bytes, the salt, which is stored
in the index and beside the records (0600) and is as private as they are. It belongs to the records, not to a run or an
index, so that a resume, other runs on the same records, another index of them, and weights trained on them give the
same digest. It is made with the index, or when the records of an index without it are first used. It is never replaced,
not even by indexing again in place, and a copy of either folder includes it.

If each run kept a salt beside its secret key instead, it would give the same records another digest, and weights
trained on them would no longer be recognised. So private records whose salt can neither be read nor made are refused.
Records declared public may then be named by the bare hash: nobody's secret depends on them.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.public_split import whole_of
from murmuration.data.index.salt import BESIDE_RECORDS, SALT, folders_of, make_salt, read_salt, readable_salt
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import RecordIndex, ShardError


def ledger_digests(index: RecordIndex, *, public: bool) -> tuple[str, str]:
    """Digests of the records and of the list of excluded ones (empty if none is excluded).

    `public` is the user's declaration. Makes the salt if there is none yet; ShardError if that fails for private
    records.
    """
    salt = _salt(index, public)
    if salt is None:
        return index.manifest_digest, index.excluded_digest
    excluded = _keyed(salt, "excluded", index.excluded_digest) if index.excluded_digest else ""
    return _keyed(salt, "records", index.manifest_digest), excluded


def ledger_digest_of(index: RecordIndex, digest: str, *, public: bool) -> str:
    """The digest by which a ledger names the table of units of these records."""
    salt = _salt(index, public)
    return digest if salt is None else _keyed(salt, "units", digest)


def every_ledger_digest(index: RecordIndex) -> frozenset[str]:
    """All digests by which a ledger may know these records: under the salt of this index, under one beside the records,
    and, where they were public and no salt could be made, the bare one."""
    bare = frozenset({index.manifest_digest})
    whole = _in_a_folder(index)
    if whole is None:
        return bare
    salts = [read_salt(whole.folder / SALT), *(readable_salt(each / BESIDE_RECORDS) for each in folders_beside(whole))]
    return bare | {_keyed(salt, "records", index.manifest_digest) for salt in salts if salt is not None}


def folders_beside(whole: ShardIndex | FolderIndex) -> tuple[Path, ...]:
    """The folders of the records as they were indexed, not those of a node's copies."""
    if isinstance(whole, FolderIndex):
        return folders_of(whole.root)
    return folders_of(whole.home, (shard.name for shard in whole.shards))


def _keyed(salt: bytes, what: str, digest: str) -> str:
    return hmac.new(salt, f"murmuration {what} {digest}".encode(), hashlib.sha256).hexdigest()


def _in_a_folder(index: RecordIndex) -> ShardIndex | FolderIndex | None:
    """The index in a folder behind `index`; None for records that are synthetic or streamed, or for none at all."""
    whole = whole_of(index)
    return whole if isinstance(whole, ShardIndex | FolderIndex) else None


def _salt(index: RecordIndex, public: bool) -> bytes | None:
    whole = _in_a_folder(index)
    if whole is None:
        return None
    try:
        return make_salt(whole.folder, folders_beside(whole))
    except (ShardError, OSError) as error:
        if public:
            return None
        if isinstance(error, ShardError):
            raise
        raise ShardError(
            f"{whole.folder / SALT}: cannot be made ({error.strerror}), and without it the ledger would contain a bare "
            "hash of private records; ask the owner of the index to run prepare.py index again, which reads no shard "
            "twice, or index into a folder of your own with --out"
        ) from error
