"""A record on this machine, as another process can read it without the index."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from murmuration.data.store.local import LocalFiles
from murmuration.data.store.place import Place, ShardError
from murmuration.data.store.tar import parse


@dataclass(frozen=True, slots=True)
class Stored:
    """The bytes of a record of a tar shard; or, with a `suffix`, of a single file."""

    place: Place
    start: int
    end: int
    suffix: str = ""
    number: bytes | None = None
    """That of its class, for a file in a class folder."""
    digest: bytes | None = None
    """The first bytes of the file's SHA-256, where the index has them."""

    def members(self, raw: bytes, what: str) -> dict[str, bytes]:
        """The bytes split by lower-case suffix; ShardError if they are not this record's."""
        if not self.suffix:
            return parse(raw, what)
        same = len(raw) == self.end - self.start
        if same and self.digest is not None:
            same = hashlib.sha256(raw).digest()[: len(self.digest)] == self.digest
        if not same:
            raise ShardError(f"{what}: a file changed since it was indexed; restore it or index again")
        return {self.suffix: raw} if self.number is None else {self.suffix: raw, "cls": self.number}

    def read(self, files: LocalFiles) -> dict[str, bytes] | None:
        """The members; None if they cannot be had at once. Whoever asked then reads with retries, and says why not."""
        try:
            raw = files.read(self.place, self.start, self.end)
            if len(raw) == self.end - self.start:
                return self.members(raw, "")
        except (OSError, ShardError):
            pass
        files.forget(self.place)
        return None


@runtime_checkable
class StoredRecords(Protocol):
    """An index that can say where its records lie on this machine."""

    def stored(self, record: int) -> Stored | None:
        """None if the record lies elsewhere, or more than its bytes is needed to say what its members are."""
        ...
