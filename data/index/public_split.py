"""One set of records split into two disjoint parts: a public part, and the rest.

The split depends only on the number of records and on the share. It does not depend on a run: a run that took as public
a part that an earlier run protected would break that run's guarantee. Nor does it depend on any content, not even by a
hash: two neighbouring sets must be split alike, or a record that is protected in one would be public in the other. It
is a permutation of integers, so no list of records is kept in memory and a billion records are split as quickly as ten.

Share and number are frozen in the log of runs on the records when they are first split: with another share, or a new
split over another number, the next run would train without protection on records that an earlier run protects.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import numpy as np

from murmuration.data.index.epochs import Shuffle
from murmuration.data.index.public_cut import PublicSplit
from murmuration.data.index.selection import IndexView
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.index.unit_table import UnitTable
from murmuration.data.store.place import RecordIndex, ShardError, join

_NAME = b"murmuration public fraction 1"
_Records = TypeVar("_Records")


class SplitIndex(IndexView):
    """An index of one part. Record i of the public part is at place i of a shuffled order of all records; the private
    part begins where the public one ends.

    With `units`, the table of the whole index, the same is done with units, and none is cut in two: the records of a
    part are those of its units, numbered one unit after the other, and its own `units` is the table of them.
    """

    def __init__(self, whole: RecordIndex, fraction: float, public: bool, units: UnitTable | None = None) -> None:
        count = whole.records if units is None else units.count
        shared = public_share(count, fraction, "record" if units is None else "unit")
        super().__init__(whole)
        self.fraction, self.public = fraction, public
        self.cut = PublicSplit(count, fraction, None if units is None else units.by)
        own = shared if public else count - shared
        self._first = 0 if public else shared
        self._order = Shuffle(count, hashlib.sha256(_NAME + str(count).encode()).digest())
        self._whole_units, self.units = units, None
        self.records = own
        if units is not None:
            self._theirs = np.sort(self._places(np.arange(own)))
            told = f"{units.digest} {fraction!r} {'public' if public else 'private'}"
            self.units = units.part(self._theirs, hashlib.sha256(_NAME + told.encode()).hexdigest())
            self.records = self.units.records

    def of(self, whole: RecordIndex) -> SplitIndex:
        """The same part of the same records, opened in another way."""
        return SplitIndex(whole, self.fraction, self.public, self._whole_units)

    @property
    def manifest_digest(self) -> str:
        part = f"{self.whole.manifest_digest} {self.fraction!r} {'public' if self.public else 'private'}"
        if self.units is not None:
            part += f" {self.units.digest}"
        return hashlib.sha256(_NAME + part.encode()).hexdigest()

    def original(self, record: int) -> int:
        """The record's number in the whole set."""
        if not 0 <= record < self.records:
            raise IndexError(f"record {record} is outside the {self.records} of this part")
        return int(self.originals(np.array([record]))[0])

    def originals(self, records: np.ndarray) -> np.ndarray:
        if self.units is None or self._whole_units is None:
            return self._places(records)
        return self._whole_units.at(self._theirs, *self.units.within(records))

    def _places(self, numbers: np.ndarray) -> np.ndarray:
        """The records, or the units, of the whole set that these of the part are."""
        return self._order.at((self._first + numbers).astype(np.uint64)).astype(np.int64)


def whole_of(index: _Records) -> RecordIndex | _Records:
    """The index of all records where this is one of a part; anything else is returned as it is."""
    return index.whole if isinstance(index, SplitIndex) else index


def public_share(records: int, fraction: float, what: str = "record") -> int:
    """The number of records, or of units, in the public part; each part has at least one."""
    if records < 2:
        raise ShardError(f"{records} {what} cannot be split in two; drop public_fraction")
    return min(records - 1, max(1, round(records * fraction)))


def places_of(index: RecordIndex) -> frozenset[str]:
    """The places of the shards of an index; empty unless it is an index of tar shards."""
    whole = whole_of(index)
    return frozenset(str(join(whole.root, shard.name)) for shard in whole.shards if isinstance(whole, ShardIndex))


def apart(one: RecordIndex, other: RecordIndex) -> bool:
    """Whether two indexes are the two parts of one set, which share shards but no record."""
    return (
        isinstance(one, SplitIndex)
        and isinstance(other, SplitIndex)
        and one.whole.manifest_digest == other.whole.manifest_digest
        and one.cut == other.cut
        and one.public != other.public
    )
