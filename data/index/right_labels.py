"""ReaL: all classes that are right for a picture, from a public list beside the records (Beyer et al., 2006.07159).

A picture is found in the list by its path below the folder, or its key in a tar shard, else by its file name alone;
with or without the extension. The published list has no names: its entries belong to ILSVRC2012_val_00000001 and on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmuration.accounting.strict_json import JsonError, parse
from murmuration.data.decode.fields import RIGHT
from murmuration.data.index.folders import IMAGES, FolderIndex
from murmuration.data.index.public_split import whole_of
from murmuration.data.index.selection import IndexView
from murmuration.data.store.place import RecordIndex, ShardError
from murmuration.data.store.tar import key_of, shown

PUBLISHED = "ILSVRC2012_val_{:08d}"


@dataclass(frozen=True)
class RightLabels:
    by_name: Mapping[str, tuple[int, ...]]

    @staticmethod
    def read(path: Path, classes: Sequence[str], count: int) -> RightLabels:
        """JSON: {picture: [class, …]}, or the published list of lists. A class is a number below `count`, or a name of
        `classes`."""
        try:
            found = parse(path.read_bytes())
        except OSError as error:
            raise ShardError(f"{path}: the right labels cannot be read ({error.strerror}); name another") from None
        except JsonError as error:
            raise ShardError(f"{path}: not a list of right labels ({error}); write {{picture: [class, …]}}") from None
        if isinstance(found, list):
            found = {PUBLISHED.format(number): labels for number, labels in enumerate(found, 1)}
        if not isinstance(found, dict):
            raise ShardError(f"{path}: not a list of right labels; write {{picture: [class, …]}} as JSON")
        numbers = {name: number for number, name in enumerate(classes)}
        return RightLabels(
            {_without_extension(name): _numbers(path, name, given, numbers, count) for name, given in found.items()}
        )

    def of(self, name: str) -> tuple[int, ...]:
        """Right labels of a picture, named without its extension; none if it is not listed."""
        return self.by_name.get(name) or self.by_name.get(name.rpartition("/")[2], ())


def _numbers(path: Path, name: str, given: Any, numbers: Mapping[str, int], count: int) -> tuple[int, ...]:
    found = [-1]
    if isinstance(given, list) and all(type(each) in (int, str) for each in given):
        found = [numbers.get(each, -1) if isinstance(each, str) else each for each in given]
    if any(not 0 <= number < count for number in found):
        raise ShardError(
            f"{path}: the labels of {shown(name)} are no list of classes; write numbers below {count}, or names of "
            "classes"
        )
    return tuple(found)


def _without_extension(name: str) -> str:
    stem, extension = os.path.splitext(name)
    return stem if extension.lower() in IMAGES else name


class RightlyLabelled(IndexView):
    """An index whose records bring along their right labels, as a member of their own."""

    def __init__(self, whole: RecordIndex, labels: RightLabels) -> None:
        super().__init__(whole)
        self.labels = labels

    @property
    def records(self) -> int:
        return self.whole.records

    @property
    def manifest_digest(self) -> str:
        return self.whole.manifest_digest

    def original(self, record: int) -> int:
        return record

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        labels = self.labels.of(self._name(record, raw))
        return {**super().members(record, raw), RIGHT: " ".join(map(str, labels)).encode()}

    def _name(self, record: int, raw: bytes) -> str:
        whole = whole_of(self.whole)
        if not isinstance(whole, FolderIndex):
            return key_of(raw, self.owner(record))
        place = self.locate(record)[0]
        assert isinstance(place, Path)
        return _without_extension(str(place.relative_to(whole.root)))
