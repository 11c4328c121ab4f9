"""The rows of a slot: which records of a drawn unit are read, how often each is seen, and with what share.

A unit is a record unless a table says which records it has. Every slot has the same number of rows, whatever its unit
holds, so that shapes tell nothing: rows that are left over have share 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from murmuration.data.draw.micro_batch import EMPTY
from murmuration.data.draw.poisson import StepKey, by_step

UnitReduce = Literal["mean", "sum"]


class UnitRecords(Protocol):
    """Which records belong to a unit."""

    def chosen(self, unit: int, step_key: bytes, step: int, at_most: int) -> np.ndarray:
        """Record numbers, at most that many, by key: the same on any rank, and all of them if they fit."""
        ...


@dataclass(frozen=True)
class SlotRows:
    """`key` decides which records of a unit take part where not all fit: one key for all steps, or one by step."""

    units: UnitRecords | None = None
    records: int = 1
    """The most records of a unit that take part in a step."""
    reduce: UnitReduce = "mean"
    """How the losses of a unit's records become its loss; those of a record's views are always averaged."""
    views: int = 1
    key: bytes | StepKey = b""

    def __post_init__(self) -> None:
        if self.records < 1 or self.views < 1:
            raise ValueError(f"{self.records} records in {self.views} views: a slot has at least one row")
        if self.units is None and self.records != 1:
            raise ValueError(f"{self.records} records of a unit, but without units each record is its own")
        if self.units is not None and not self.key:
            raise ValueError("which records of a unit take part needs a key; derive one from the run key")

    @property
    def count(self) -> int:
        """R, the rows of every slot; row = place of the record · views + view."""
        return self.records * self.views

    def records_of(self, ids_row: np.ndarray, step: int) -> np.ndarray:
        """Record numbers [B, records] for the drawn numbers, int64, EMPTY where a place stays free."""
        if self.units is None:
            return ids_row.astype(np.int64).reshape(-1, 1)
        found = np.full((len(ids_row), self.records), EMPTY, dtype=np.int64)
        key = by_step(self.key)(step)
        for slot in np.flatnonzero(ids_row != EMPTY):
            chosen = self.units.chosen(int(ids_row[slot]), key, step, self.records)
            found[slot, : len(chosen)] = chosen
        return found

    def shares(self, usable: np.ndarray) -> np.ndarray:
        """fp32 [B·R] from which records can be used, [B, records]: of 1/views each, or of an equal part of that."""
        together = usable.sum(1, keepdims=True) if self.reduce == "mean" else 1
        share = np.where(usable, 1.0 / (self.views * np.maximum(together, 1)), 0.0)
        return share.astype(np.float32).repeat(self.views, axis=1).reshape(-1)
