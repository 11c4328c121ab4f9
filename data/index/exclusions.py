"""Which records of an index are excluded from training, and why: two small files beside the index.

`exclusions.npy` contains the ids (sorted u64, numbered as in the index without exclusions), `exclusions.json` the sets
they were compared with. An excluded record keeps its place: it is drawn like any other and contributes exactly
zero, as if it were absent, and it is never read. So n, the sampling rate, delta and the divisor do not depend on the
list, which is a function of private records: two data sets that differ in one record may have different lists.

The list is part of a phase's identity: a run that has started continues with another list only in a new segment. Public
epochs skip excluded records.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from murmuration.data.store.index_files import index_file, open_npy, read_json
from murmuration.data.store.place import ShardError

IDS, FACTS = "exclusions.npy", "exclusions.json"
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Exclusions:
    """`manifest_digest` is the digest of the whole index; `ids` are record numbers in it. Both files are private."""

    manifest_digest: str
    ids: np.ndarray
    against: tuple[str, ...] = ()
    distance: int = 0
    reason: str = ""
    unit: str = ""
    """What the units are named by whose records are excluded together; empty if each record is on its own merits."""

    def __post_init__(self) -> None:
        if self.ids.dtype != np.uint64 or self.ids.ndim != 1 or np.any(self.ids[1:] <= self.ids[:-1]):
            raise ValueError("excluded ids must be one sorted row of different u64 numbers")

    @property
    def digest(self) -> str:
        """SHA-256 of the ids, for the identity of a phase."""
        return hashlib.sha256(np.ascontiguousarray(self.ids, dtype="<u8").tobytes()).hexdigest()

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write both files to the index folder. `read` refuses the mismatched files that a kill in between leaves."""
        target = Path(folder)
        with index_file(target / IDS) as file:
            np.save(file, self.ids.astype("<u8"))
        facts: dict[str, Any] = {
            "format": FORMAT,
            "manifest_digest": self.manifest_digest,
            "records": len(self.ids),
            "ids_sha256": self.digest,
            "against": list(self.against),
            "distance": self.distance,
            "reason": self.reason,
        }
        if self.unit:
            facts["unit"] = self.unit
        with index_file(target / FACTS) as file:
            file.write(json.dumps(facts, indent=1).encode() + b"\n")

    @classmethod
    def read(cls, folder: str | os.PathLike[str], manifest_digest: str, records: int) -> Exclusions | None:
        """The exclusions, or None if there are none; ShardError if they belong to other records or are damaged.

        `manifest_digest` and `records` are those of the whole index.
        """
        target = Path(folder)
        mend = "run python -m murmuration.contrib.overlap again, or remove both files to train on every record"
        if not (target / FACTS).exists() and not (target / IDS).exists():
            return None
        try:
            facts: dict[str, Any] = read_json(target / FACTS)
            found = cls(
                facts["manifest_digest"],
                open_npy(target / IDS).astype(np.uint64, casting="equiv"),
                tuple(facts["against"]),
                int(facts["distance"]),
                str(facts["reason"]),
                str(facts.get("unit", "")),
            )
            damaged = facts["ids_sha256"] != found.digest or facts["format"] != FORMAT
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise ShardError(f"{target / FACTS}: the exclusions cannot be read ({error}); {mend}") from error
        if damaged:
            raise ShardError(f"{target / IDS}: not the ids that {FACTS} was written for; {mend}")
        if found.manifest_digest != manifest_digest:
            raise ShardError(f"{target / FACTS}: made for other records than those of this index; {mend}")
        if len(found.ids) and int(found.ids[-1]) >= records:
            raise ShardError(f"{target / IDS}: names a record beyond the {records} of the index; {mend}")
        return found
