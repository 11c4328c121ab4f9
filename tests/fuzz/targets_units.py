"""The table of units beside an index: its facts, and the four files of numbers. Nothing here loads torch."""

from __future__ import annotations

import hashlib
import json
import struct
from itertools import chain
from random import Random

from murmuration.data.index.open import open_index, open_units
from murmuration.data.index.shard_index import Wanted
from murmuration.data.index.units import DIGESTS, FACTS, FORMAT, OF, RECORDS, STARTS
from tests.fuzz.engine import Broken
from tests.fuzz.mutate_bytes import mutate_bytes
from tests.fuzz.mutate_npy import mutate_npy
from tests.fuzz.targets_index import COUNTS, IndexWorld, answered

UNIT = "key:0+[01]?"
"""The first two of the five records are units of their own, and the rest are one."""


class UnitFacts(IndexWorld):
    file = f"index/{FACTS}"
    wanted = Wanted(unit=UNIT)

    def act(self, data: bytes) -> int:
        self.lay(data)
        code = self.opened()
        self.lay(data)
        # What units are named by is taken from the facts; another name makes another table.
        return max(code, self.prepared())

    def opened(self) -> int:
        return answered(self._opened)

    def _opened(self) -> int:
        """As training opens units; a table that is accepted must have every record once, in the unit that it names."""
        table = open_units(open_index(self.source), UNIT)
        held = [table.records_of(unit).tolist() for unit in range(table.count)]
        if not all(held) or sorted(chain(*held)) != list(range(sum(COUNTS))):
            raise Broken("a table of units that is no partition of the records is accepted")
        if any(table.unit_of(record) != unit for unit, records in enumerate(held) for record in records):
            raise Broken("a record's unit is not the one whose record it is")
        if table.chosen(table.count - 1, b"k", 1, 2).tolist() != table.chosen(table.count - 1, b"k", 1, 2).tolist():
            raise Broken("a unit's records differ from call to call")
        return 0


class UnitNumbers(UnitFacts):
    """A case is the name of a file, a line's end and its content; the digests in the facts are made to fit."""

    def seeds(self) -> list[bytes]:
        return [name.encode() + b"\n" + self.content[self.index / name] for name in (OF, RECORDS, STARTS, DIGESTS)]

    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes:
        name, line, content = data.partition(b"\n")
        if chance.random() < 0.1:
            return mutate_bytes(chance, name) + line + content
        return name + line + mutate_npy(chance, content, other.partition(b"\n")[2])

    def act(self, data: bytes) -> int:
        name, _, content = data.partition(b"\n")
        if name.decode("ascii", "replace") not in (OF, RECORDS, STARTS, DIGESTS):
            return 0
        self._lay_numbers(name.decode(), content)
        code = self.opened()
        self._lay_numbers(name.decode(), content)
        return max(code, self.prepared())

    def _lay_numbers(self, name: str, content: bytes) -> None:
        self.lay(self.content[self.path])
        (self.index / name).write_bytes(content)
        facts = json.loads(self.content[self.path])
        numbers = {each: self.content[self.index / each] for each in (OF, STARTS, DIGESTS)} | {name: content}
        of, starts, digests = (_body(numbers[each]) for each in (OF, STARTS, DIGESTS))
        units = len(starts) // 8 - 1
        head = f"murmuration units {FORMAT} {units}\n".encode()
        facts |= {
            "units": units, "digest": hashlib.sha256(head + of).hexdigest(),
            "names_sha256": hashlib.sha256(digests).hexdigest(),
        }  # fmt: skip
        self.path.write_text(json.dumps(facts))


def _body(content: bytes) -> bytes:
    """What follows the header of a .npy, where that is as numpy writes it."""
    if len(content) < 10:
        return b""
    (length,) = struct.unpack("<H", content[8:10])
    return content[10 + length :]
