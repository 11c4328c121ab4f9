"""Which records belong to which unit, in memory or mapped from the files of an index (`units.py`)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from murmuration.data.integer_hash import mixed
from murmuration.data.store.place import ShardError

FORMAT = 1
AT_ONCE = 1 << 22
Missing = Literal["refuse", "own"]


class UnitTable:
    """Units 0 … count - 1 and the records of each. Private, but for `count`, `by` and `missing`."""

    def __init__(
        self, by: str, missing: Missing, starts: np.ndarray, records: np.ndarray, of: np.ndarray, digest: str
    ) -> None:
        self.by = by
        self.missing: Missing = missing
        self.digest = digest
        """Covers which records belong to which unit. Private if the records are."""
        self._starts, self._records, self._of = starts, records, of

    @staticmethod
    def of_names(by: str, names: Sequence[object] | np.ndarray) -> UnitTable:
        """From the unit of each record, as a program names them; units are numbered by their first record."""
        try:
            named = np.asarray(names)
            if named.ndim != 1:  # a name of two parts would count as two records
                raise ValueError(f"they have {named.ndim} dimensions")
            _, firsts, inverse = np.unique(named, return_index=True, return_inverse=True)
        except (TypeError, ValueError) as error:
            raise ShardError(f"units.of needs one text or number for each record ({error})") from None
        ranked = np.argsort(np.argsort(firsts))
        of = ranked[inverse.reshape(-1)].astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(np.bincount(of), dtype=np.int64)])
        return UnitTable(by, "own", starts, np.argsort(of, kind="stable").astype(np.int64), of, digest_of(starts, of))

    @property
    def count(self) -> int:
        return len(self._starts) - 1

    @property
    def records(self) -> int:
        return len(self._records)

    @property
    def sizes(self) -> np.ndarray:
        """How many records each unit has."""
        return np.diff(self._starts)

    def records_of(self, unit: int) -> np.ndarray:
        """The unit's records, sorted."""
        if not 0 <= unit < self.count:
            raise ShardError(f"unit {unit} is outside 0..{self.count - 1}; the numbers belong to another index")
        return np.asarray(self._records[int(self._starts[unit]) : int(self._starts[unit + 1])])

    def records_of_all(self, units: np.ndarray) -> np.ndarray:
        """All records of several units, sorted."""
        begin, sizes = self._starts[units], self._starts[units + 1] - self._starts[units]
        within = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.sort(self._records[np.repeat(begin, sizes) + within])

    def unit_of(self, record: int) -> int:
        if not 0 <= record < len(self._of):
            raise ShardError(f"record {record} is outside 0..{len(self._of) - 1}; the ids belong to another index")
        return int(self._of[record])

    def units_at(self, first: int, count: int) -> np.ndarray:
        """The unit of each of so many records."""
        return np.asarray(self._of[first : first + count])

    def units_of(self, records: np.ndarray) -> np.ndarray:
        """The units of several records, each once, sorted."""
        return np.unique(self._of[records])

    def first_records(self) -> np.ndarray:
        """The first record of each unit; they rise."""
        return np.asarray(self._records[self._starts[:-1]])

    def chosen(self, unit: int, step_key: bytes, step: int, at_most: int) -> np.ndarray:
        """The records that a unit contributes to a step, sorted: all, or so many of them by key; the same on any rank.

        The choice bounds nothing: whichever records it takes, they are clipped as one. So it is drawn like a caption
        among several, with the key of augmentation, and no privacy rests on it.
        """
        records = self.records_of(unit)
        if len(records) <= at_most:
            return records
        name = struct.pack("<QQ", step, unit)
        seed = hashlib.blake2b(name, key=step_key[:64], digest_size=16, person=b"mur-unit-rows").digest()
        first, second = np.frombuffer(seed, dtype="<i8")
        order = mixed(mixed(records ^ first) ^ second)
        return np.sort(records[np.argsort(order, kind="stable")[:at_most]])

    def part(self, units: np.ndarray, digest: str) -> UnitTable:
        """The table of these units alone (sorted), with their records numbered one unit after the other."""
        starts = np.concatenate([[0], np.cumsum(self.sizes[units], dtype=np.int64)])
        of = np.repeat(np.arange(len(units), dtype=np.int64), np.diff(starts))
        return UnitTable(self.by, self.missing, starts, np.arange(starts[-1], dtype=np.int64), of, digest)

    def within(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The unit of each record and its place in it, where records are numbered by unit (see `part`)."""
        units = self._of[records]
        return units, records - self._starts[units]

    def at(self, theirs: np.ndarray, units: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The records at these places of units of a part that has `theirs` of this table's."""
        return np.asarray(self._records[self._starts[theirs[units]] + places])


def digest_of(starts: np.ndarray, of: np.ndarray) -> str:
    """SHA-256 over which unit each record belongs to."""
    hashed = hashlib.sha256(f"murmuration units {FORMAT} {len(starts) - 1}\n".encode())
    for part in chunks(of):
        hashed.update(part.astype("<i8", copy=False).tobytes())
    return hashed.hexdigest()


def chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(values), AT_ONCE):
        yield values[start : start + AT_ONCE]
