"""What one unit of the promise is: a record, or all the records that belong to one patient, person or place.

The words of a plan, a ledger and a certificate follow from it here and nowhere else, so that none of them can name
another unit than the one whose contribution was clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from murmuration.accounting.strict_json import CLOSED

RECORD = "one record (what the data set has as one: an image, an image with its caption, a text, a row)"
SINGLE = "record"
"""The word for protecting single records where an index knows units."""
KEY = "key:"
"""How the name of a unit begins that is read from the records' keys; a pattern follows."""
LONGEST_NAME = 200
Reduce = Literal["mean", "sum"]


@dataclass(frozen=True)
class Unit:
    """A unit of several records. `by` is the field that they have in common, or `key:` and a pattern of their keys;
    `rows` the most of them that one step takes; `reduce` what becomes of their losses."""

    __pydantic_config__ = CLOSED
    by: str
    rows: int = 1
    reduce: Reduce = "mean"
    table: str = ""
    """The keyed digest of which records belong to which unit."""

    def __post_init__(self) -> None:
        if (fault := fault_of_name(self.by)) is not None:
            raise ValueError(f"the unit {self.by!r} {fault}")
        if self.rows < 1 or self.reduce not in ("mean", "sum"):
            raise ValueError(f"a unit contributes the mean or the sum of at least 1 record, not {self.reduce!r} of "
                             f"{self.rows}")  # fmt: skip


def fault_of_name(by: str) -> str | None:
    """Why this cannot name a unit; None if it can."""
    if not by or not by.isprintable() or len(by) > LONGEST_NAME or by == KEY:
        return f"is no name: 1 to {LONGEST_NAME} printable characters, a field or {KEY}PATTERN"
    return "is the word for single records; rename the field" if by == SINGLE else None


def unit_in_words(unit: Unit | None) -> str:
    if unit is None:
        return RECORD
    same = f"that have the same {unit.by!r}"
    if unit.by.startswith(KEY):
        same = f"in whose keys the pattern {unit.by.removeprefix(KEY)!r} finds the same"
    return f"one unit (all records {same}; a record without one is a unit of its own)"


def adjacency_in_words(unit: Unit | None) -> str:
    one = noun(unit)
    return f"zero-out: one {one} is replaced by a {one} that is drawn alike and contributes exactly zero"


def noun(unit: Unit | None) -> str:
    return "record" if unit is None else "unit"


def noun_of(in_words: str) -> str:
    """The noun for a unit that is known by a certificate's words."""
    return "record" if in_words == RECORD else "unit"


def contribution_in_words(unit: Unit) -> str:
    """What one unit adds to a step, before it is clipped."""
    if unit.rows == 1:
        return "one of its records, chosen anew by key at each step"
    return f"the {unit.reduce} over at most {unit.rows} of its records, chosen anew by key at each step"
