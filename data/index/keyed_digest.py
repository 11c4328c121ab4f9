"""Digests of records as ledgers, certificates, checkpoints and feature stores may show them: keyed.

A bare hash of private records answers a guess: anyone who knows all records but one hashes the set with and without it
and compares. So what leaves the machine is HMAC-SHA256 under 32 random bytes, the salt, which lies beside the index
(0600) and is as private as the records. It belongs to the index, not to a run: only so do a resume, other runs on the
same records, and weights that were made of them find the same digest again. It is made with the index, or when the
records of an older index are first used. It is never replaced, not by indexing again in place either, and a copy of the
index folder takes it along.

With a salt beside its secret key instead, each run would give the same records another digest, and weights that were
trained on them would no longer be recognised. So private records whose salt can neither be read nor made are refused.
Records that are declared public may then be named by the bare hash: nobody's secret depends on them.
"""

from __future__ import annotations

import hashlib
import hmac

from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.public_split import SplitIndex
from murmuration.data.index.salt import SALT, make_salt, read_salt
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import RecordIndex, ShardError


def ledger_digests(index: RecordIndex, *, public: bool, keyed: bool = True) -> tuple[str, str]:
    """Digests of the records, and of the list of those that are excluded (empty where none is).

    `public` is the user's word. Without `keyed` both are bare hashes, as runs of version 0.1.0 have them, which go on.
    Makes the salt where there is none yet; ShardError where private records must do without.
    """
    salt = _salt(index, public) if keyed else None
    if salt is None:
        return index.manifest_digest, index.excluded_digest
    excluded = _keyed(salt, "excluded", index.excluded_digest) if index.excluded_digest else ""
    return _keyed(salt, "records", index.manifest_digest), excluded


def every_ledger_digest(index: RecordIndex) -> frozenset[str]:
    """All digests by which a ledger may know these records, from before there were salts as well."""
    bare = {index.manifest_digest}
    if index.excluded_digest:  # version 0.1.0 gave a part of the records a digest of its own
        bare.add(hashlib.sha256(f"{index.manifest_digest} without {index.excluded_digest}".encode()).hexdigest())
    whole = _in_a_folder(index)
    salt = read_salt(whole.folder) if whole is not None else None
    return frozenset(bare if salt is None else bare | {_keyed(salt, "records", index.manifest_digest)})


def _keyed(salt: bytes, what: str, digest: str) -> str:
    return hmac.new(salt, f"murmuration {what} {digest}".encode(), hashlib.sha256).hexdigest()


def _in_a_folder(index: RecordIndex) -> ShardIndex | FolderIndex | None:
    """None for what is made by rule, streamed, or no records at all."""
    whole = index.whole if isinstance(index, SplitIndex) else index
    return whole if isinstance(whole, ShardIndex | FolderIndex) else None


def _salt(index: RecordIndex, public: bool) -> bytes | None:
    whole = _in_a_folder(index)
    if whole is None:
        return None
    try:
        return make_salt(whole.folder)
    except (ShardError, OSError) as error:
        if public:
            return None
        if isinstance(error, ShardError):
            raise
        raise ShardError(
            f"{whole.folder / SALT}: cannot be made ({error.strerror}), and without it the ledger would hold a bare "
            "hash of private records; let the owner of the index give prepare.py index again, which reads no shard "
            "twice, or index into a folder of your own with --out"
        ) from error
