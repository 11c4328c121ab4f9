"""Some records of an index, in a given order and as often as wanted, each whole or cropped to a box.

For evaluations on public records. Excluded records stay excluded, and shards and classes are those of the whole index.
"""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from murmuration.data.decode.decode import SUFFIXES, BadRecord, decode
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


Box = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels of the upright picture."""
_NAME = b"murmuration selection 1"


class Selection(IndexView):
    def __init__(self, whole: RecordIndex, ids: np.ndarray, boxes: Sequence[Box] | None = None) -> None:
        if boxes is not None and len(boxes) != len(ids):
            raise ValueError(f"{len(boxes)} boxes for {len(ids)} records; give one each")
        super().__init__(whole)
        self.ids, self.boxes = ids, boxes

    @property
    def records(self) -> int:
        return len(self.ids)

    @property
    def manifest_digest(self) -> str:
        return self.digest_with(self.whole.manifest_digest)

    def digest_with(self, whole: str) -> str:
        """What identifies these records, given what identifies all: their own digest, or a keyed one."""
        told = _NAME + whole.encode() + np.ascontiguousarray(self.ids, "<i8").tobytes()
        return hashlib.sha256(told + repr(self.boxes).encode()).hexdigest()

    def original(self, record: int) -> int:
        return int(self.ids[record])

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        found = super().members(record, raw)
        if self.boxes is None:
            return found
        suffix = next((suffix for suffix in SUFFIXES if suffix in found), None)
        cropped = None if suffix is None else _cropped(found.pop(suffix), self.boxes[record])
        return found if cropped is None else found | {"png": cropped}


def _cropped(picture: bytes, box: Box) -> bytes | None:
    """The box as PNG, black where it lies outside of the picture; None where there is no picture to crop."""
    try:
        pixels = decode(picture)
    except BadRecord:
        return None
    made = io.BytesIO()
    Image.fromarray(pixels).crop(box).save(made, "PNG", compress_level=1)
    return made.getvalue()
