"""Indexes over another index, whose records they number anew or add to. All else is that of the index below."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from murmuration.data.store.place import Place, RecordIndex, Shard
from murmuration.data.store.stored import Stored, StoredRecords


class IndexView(ABC):
    """A RecordIndex whose records are those of `whole`. A subclass says which ones: how many `records` there are, and
    the `original` number of each."""

    def __init__(self, whole: RecordIndex) -> None:
        self.whole = whole

    @property
    def folder(self) -> Path:
        return self.whole.folder

    @property
    def shards(self) -> Sequence[Shard]:
        return self.whole.shards

    @property
    def excluded_digest(self) -> str:
        return self.whole.excluded_digest

    @abstractmethod
    def original(self, record: int) -> int:
        """The record's number in `whole`."""

    def left_out(self, record: int) -> bool:
        return self.whole.left_out(self.original(record))

    def locate(self, record: int) -> tuple[Place, int, int]:
        return self.whole.locate(self.original(record))

    def owner(self, record: int) -> str:
        return self.whole.owner(self.original(record))

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        return self.whole.members(self.original(record), raw)

    def stored(self, record: int) -> Stored | None:
        """None where a view adds to the members: another process could not."""
        own = type(self).members is not IndexView.members
        if own or not isinstance(self.whole, StoredRecords):
            return None
        return self.whole.stored(self.original(record))

    def check_unchanged(self, *, contents: bool = False) -> None:
        self.whole.check_unchanged(contents=contents)
