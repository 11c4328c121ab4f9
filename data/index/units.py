"""Which records belong to one unit (a patient, a person, a place), where the unit of the promise is not a record.

A unit is named by a field of the records' .json (`patient_id`), or by `key:PATTERN`, a regular expression that is
matched from the beginning of each record's key (webdataset's `__key__`; of single images, their path below the folder):
`key:[^_]+` is what stands before the first `_`, `key:(.*)/` the folder. If the pattern has a group, the first group is
the unit, otherwise all that matched.

Units are numbered by their first record. Four private files (0600) lie beside the index, 32 bytes a record and 8 a unit
together: `unit_digests.npy` has 16 bytes for each record, a hash of the name of its unit, so that indexing continues
without reading a shard twice; `unit_of.npy` the number of each record's unit; `unit_records.npy` the records sorted by
unit; and `unit_starts.npy` where each unit's begin in it. `units.json` says what they are. n, the number of units, is a
public constant, and like n of records it does not depend on which records are excluded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from murmuration.accounting.unit import KEY, fault_of_name
from murmuration.data.index.unit_table import AT_ONCE, FORMAT, Missing, UnitTable, chunks, digest_of
from murmuration.data.store.index_files import index_file, open_npy, read_json
from murmuration.data.store.place import ShardError

FACTS, DIGESTS, OF, RECORDS, STARTS = (
    "units.json", "unit_digests.npy", "unit_of.npy", "unit_records.npy", "unit_starts.npy",
)  # fmt: skip
DIGEST_BYTES = 16
NOBODY = bytes(DIGEST_BYTES)
"""Stands in place of the hash of a record that names no unit."""
_PERSON = b"mur-unit-name"
_LARGEST_JSON = 1 << 20


@dataclass
class UnitColumn:
    """The hashes of the units of one shard's records, in their order, as they are found in its members."""

    by: str
    found: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._pattern = pattern_of(self.by)

    def begin(self, key: str) -> None:
        """The next record begins."""
        self.found += NOBODY if self._pattern is None else unit_of_key(self._pattern, key)

    def wants(self, suffix: str, size: int) -> bool:
        return self._pattern is None and suffix == "json" and size <= _LARGEST_JSON

    def look_into(self, raw: bytes) -> None:
        """A .json of the record that began last."""
        try:
            value = json.loads(raw)[self.by]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            return
        # One patient may be 7 in one file and "7" in another.
        if type(value) in (int, str) and value != "":
            self.found[-DIGEST_BYTES:] = _hashed(str(value))


def pattern_of(by: str) -> re.Pattern[str] | None:
    """The pattern of keys in the name of a unit; None if it is a field."""
    if (fault := fault_of_name(by)) is not None:
        raise ShardError(f"--unit {by!r} {fault}")
    if not by.startswith(KEY):
        return None
    try:
        return re.compile(by.removeprefix(KEY))
    except (re.error, RecursionError, OverflowError) as error:
        raise ShardError(f"--unit {by}: not a regular expression ({error})") from None


def unit_of_key(pattern: re.Pattern[str], key: str) -> bytes:
    found = pattern.match(key)
    name = None if found is None else found.group(1 if pattern.groups else 0)
    return _hashed(name) if name else NOBODY


def _hashed(name: str) -> bytes:
    """Not equal to NOBODY but by a chance of 2^-128."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=_PERSON).digest()


def group(digests: np.ndarray) -> np.ndarray:
    """The number of each record's unit, int64; units are numbered by their first record. A record that names none is
    a unit of its own."""
    high, low = (np.array(half) for half in digests.view("<u8").T)  # copies, which may be written
    alone = np.flatnonzero((high == 0) & (low == 0))
    low[alone] = alone.astype(np.uint64) + 1  # and a high half of 0, which no hash has but by a chance of 2^-64
    order = np.lexsort((low, high))  # stable: the first record of a unit comes first
    new = np.ones(len(order), dtype=bool)
    new[1:] = (high[order[1:]] != high[order[:-1]]) | (low[order[1:]] != low[order[:-1]])
    del high, low
    firsts = order[new]
    numbers = np.empty(len(firsts), dtype=np.int64)
    numbers[np.argsort(firsts)] = np.arange(len(firsts))
    found = np.empty(len(order), dtype=np.int64)
    found[order] = numbers[np.cumsum(new) - 1]
    return found


def write_units(
    target: Path, manifest: str, by: str, missing: Missing, parts: Iterable[np.ndarray], records: int
) -> UnitTable:  # fmt: skip
    """Write the table of an index; `parts` are the hashes of its records in order, `manifest` its digest."""
    (target / FACTS).unlink(missing_ok=True)  # a kill in between leaves no table, and not half of two
    hashed = hashlib.sha256()
    with index_file(target / DIGESTS) as file:
        shape = (records, DIGEST_BYTES)
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for part in parts:
            hashed.update(raw := part.tobytes())
            file.write(raw)
    digests = open_npy(target / DIGESTS)
    if missing == "refuse" and (lost := int(np.count_nonzero(~digests.any(axis=1)))):
        what = f"a key that {by} matches" if by.startswith(KEY) else f"a text or whole number {by!r} in a .json"
        raise ShardError(
            f"{target}: {lost} of {records} records lack {what}, so their unit is unknown; correct them, or let each "
            "be a unit of its own with --unit-missing own"
        )
    of = group(digests)
    order = np.argsort(of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(of), dtype=np.int64)])
    for name, values in ((OF, of), (RECORDS, order), (STARTS, starts)):
        with index_file(target / name) as file:
            np.save(file, values.astype("<i8", copy=False))
    facts = {
        "format": FORMAT, "manifest": manifest, "unit": by, "missing": missing, "units": len(starts) - 1,
        "records": records, "digest": digest_of(starts, of), "names_sha256": hashed.hexdigest(),
    }  # fmt: skip
    with index_file(target / FACTS) as file:
        file.write(json.dumps(facts).encode() + b"\n")
    found = read_units(target, manifest, records)
    assert found is not None
    return found


def read_units(folder: Path, manifest: str, records: int) -> UnitTable | None:
    """The table of the index in `folder` whose digest and whole number of records these are; None if it has none.
    ShardError if it belongs to other records or is damaged."""
    again = "index again with --unit"
    if not (folder / FACTS).exists():
        return None
    try:
        facts: dict[str, Any] = read_json(folder / FACTS)
        by, missing = str(facts["unit"]), facts["missing"]
        of, order, starts = (open_npy(folder / name) for name in (OF, RECORDS, STARTS))
        if facts["format"] != FORMAT or missing not in ("refuse", "own") or pattern_fault(by) is not None:
            raise ValueError("its facts are not those of a table of units")
        units, made_for, digest = int(facts["units"]), facts["manifest"], facts["digest"]
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ShardError(f"{folder / FACTS}: the table of units cannot be read ({error}); {again}") from error
    if made_for != manifest:
        raise ShardError(f"{folder / FACTS}: made for other records than those of this index; {again}")
    whole = all(each.dtype == np.dtype("<i8") for each in (of, order, starts))
    whole = whole and of.shape == order.shape == (records,) and starts.shape == (units + 1,)
    if not whole or digest != digest_of(starts, of) or not _sound(of, order, starts):
        raise ShardError(f"{folder / FACTS}: its files do not belong together; {again}")
    return UnitTable(by, missing, starts, order, of, digest)


def pattern_fault(by: str) -> str | None:
    try:
        pattern_of(by)
    except ShardError as error:
        return str(error)
    return None


def unit_named(folder: Path) -> tuple[str, Missing] | None:
    """What the units of the index in this folder are named by, whatever its records are now; None if it has none.
    ShardError if that cannot be read: single records would then be protected in their place."""
    try:
        facts = read_json(folder / FACTS)
        by, missing = facts["unit"], facts["missing"]
        if not isinstance(by, str) or missing not in ("refuse", "own"):
            raise ValueError("its facts are not those of a table of units")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShardError(
            f"{folder / FACTS}: the table of units cannot be read ({error}); index again with --unit"
        ) from error
    if (fault := pattern_fault(by)) is not None:
        raise ShardError(f"{folder / FACTS}: {fault}; index again with --unit")
    return by, missing


def known_digests(folder: Path, manifest: str, records: int, by: str) -> np.ndarray | None:
    """The hashes that an earlier call kept of the records with this digest, if they are of the same units."""
    try:
        facts, found = read_json(folder / FACTS), open_npy(folder / DIGESTS)
        same = facts["format"] == FORMAT and facts["unit"] == by and facts["manifest"] == manifest
        if not same or found.dtype != np.uint8 or found.shape != (records, DIGEST_BYTES):
            return None
        hashed = hashlib.sha256()
        for part in chunks(found):
            hashed.update(part.tobytes())
        return found if facts["names_sha256"] == hashed.hexdigest() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sound(of: np.ndarray, order: np.ndarray, starts: np.ndarray) -> bool:
    """Whether every record is in exactly one unit, in the sorted row of that unit, and no unit is empty."""
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(order) or np.any(starts[1:] <= starts[:-1]):
        return False
    last = -1
    for at, part in enumerate(chunks(order)):
        if len(part) and not (part.min() >= 0 and part.max() < len(of)):
            return False
        first = at * AT_ONCE
        units = np.searchsorted(starts, np.arange(first, first + len(part)), side="right") - 1
        begins = np.concatenate([[first == 0 or starts[units[0]] == first], units[1:] != units[:-1]])
        before = np.concatenate([[last], part[:-1]])
        if np.any(of[part] != units) or np.any((part <= before) & ~begins):
            return False
        last = int(part[-1])
    return True


def column_of(by: str | None) -> UnitColumn | None:
    return None if by is None else UnitColumn(by)


def as_rows(column: bytes) -> np.ndarray:
    return np.frombuffer(column, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
