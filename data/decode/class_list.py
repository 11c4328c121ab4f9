"""A public list of classes: which output of a classifier stands for which name, whatever folders or records exist.

Without one, class folders are numbered by the rank of their names among those present. For private records that is a
leak: one additional record, alone in its folder, shifts the label of every record behind it, and the noise is sized for
one record. Also, two data folders with different classes would share outputs by rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from murmuration.accounting.strict_json import parse
from murmuration.data.store.place import ShardError
from murmuration.data.store.tar import shown

RECEIPT, OF_ROWS = "packed.json", "classes_of_rows"


def made_of_rows(folder: Path) -> str | None:
    """The digest of the list that prepare.py pack took from the rows of what it packed into this folder."""
    try:
        found = parse((folder / RECEIPT).read_bytes())
    except (OSError, ValueError):
        return None
    return found.get(OF_ROWS) if isinstance(found, dict) else None


@dataclass(frozen=True)
class ClassList:
    """`names` are those of the outputs. Files may number more classes: `whole` is their list, if it is another."""

    names: tuple[str, ...]
    whole: tuple[str, ...] = ()

    @property
    def in_files(self) -> tuple[str, ...]:
        """The names in the order of the numbers that files contain."""
        return self.whole or self.names

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def numbers_in_files(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.in_files)}

    def output(self, number: int) -> int | None:
        """The output of the class that has this number in files; None if it has none."""
        if not self.whole:
            return number
        return self.numbers.get(self.whole[number]) if 0 <= number < len(self.whole) else None

    def without(self, excluded: Collection[str]) -> ClassList:
        """The same list, with outputs for the other classes alone, in their order."""
        left = tuple(name for name in self.names if name not in excluded)
        return self if len(left) == len(self.names) else ClassList(left, self.in_files)

    @property
    def digest(self) -> str:
        """SHA-256 of the names in their order; the list is public."""
        listed = [self.names, self.whole] if self.whole else self.names
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    @staticmethod
    def read(path: Path) -> ClassList:
        """One name per line, or a JSON list if the file name ends in .json."""
        try:
            raw = path.read_bytes()
            found = parse(raw) if path.suffix == ".json" else raw.decode("utf-8-sig").splitlines()
        except OSError as error:
            raise ShardError(f"{path}: the class list cannot be read ({error.strerror}); name another") from None
        except ValueError as error:
            raise ShardError(f"{path}: not a class list ({error}); write one name per line, in UTF-8") from None
        if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
            raise ShardError(f"{path}: not a class list; write one name per line, or a JSON list of names")
        names = tuple(name.strip() for name in found)
        if "" in names:
            raise ShardError(f"{path}: line {names.index('') + 1} names no class, and numbers count lines; remove it")
        if twice := next((name for number, name in enumerate(names) if names.index(name) < number), None):
            raise ShardError(f"{path}: names {shown(twice)} twice; one class has one number")
        return ClassList(names)
