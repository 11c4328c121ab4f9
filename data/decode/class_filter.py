"""Leaves public records of some classes out, by the names in a public list.

Only for public records. Whether a private record is of such a class is a fact about that record, and n must not depend
on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from murmuration.data.decode.class_list import ClassList
from murmuration.data.decode.decode import BadRecord
from murmuration.data.decode.fields import class_in_file


@dataclass(frozen=True)
class ClassFilter:
    """`classes` and `label` say which class a record of a shard has; class folders need neither."""

    excluded: ClassList
    label: str | None
    classes: ClassList | None

    def keeps(self, members: Mapping[str, bytes]) -> bool:
        """Whether a record of a shard takes part. One without a readable class does, and is a bad record."""
        assert self.label is not None and self.classes is not None
        try:
            number = class_in_file(members, self.label, self.classes)
        except BadRecord:
            return True
        names = self.classes.in_files
        return not 0 <= number < len(names) or names[number] not in self.excluded.numbers
