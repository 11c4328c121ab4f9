"""A program's own records: how they are read, what is protected as one, and what the self-test takes in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from murmuration.accounting.errors import InputError, PlanError
from murmuration.accounting.unit import Unit
from murmuration.data.batch.function_reader import FunctionReader, Read, as_inputs, as_read, is_dataset
from murmuration.data.batch.slot_rows import SlotRows, UnitReduce
from murmuration.data.draw.poisson import StepKey
from murmuration.train.self_test.probes import SyntheticRecords

if TYPE_CHECKING:
    from murmuration.data.index.unit_table import UnitTable

Data = Any
"""A torch.utils.data.Dataset or anything with len() and []; or a function `read`, given `records`."""


@dataclass(frozen=True)
class Units:
    """The protected unit, where it is not a record: all records for which `of` has the same value.

    >>> Units("patient", of=["anna", "ben", "anna"], rows=2)
    Units(by='patient', rows=2, reduce='mean')
    """

    by: str
    """The kind of unit, in a word: "patient"."""
    of: Sequence[object] | np.ndarray = field(repr=False)
    """The unit of each record, in the order of their numbers. Private."""
    rows: int = 1
    """The most records of a unit that a step takes."""
    reduce: UnitReduce = "mean"


@dataclass(frozen=True)
class OwnRecords:
    read: Read
    n: int
    """How many units there are, each of them a record unless `units` says otherwise."""
    views: int
    synthetic: SyntheticRecords
    units: Units | None
    table: UnitTable | None

    @staticmethod
    def of(
        data: Data, records: int | None, units: Units | None, views: int, example: Any,
        synthetic: Callable[[int, int], dict[str, Tensor]] | None,
    ) -> OwnRecords:  # fmt: skip
        read, n = as_read(data, records, views)
        table = None
        if units is not None:
            from murmuration.data.index.unit_table import UnitTable  # the unit is most often a record

            table = UnitTable.of_names(units.by, units.of)
            if len(units.of) != n:
                raise PlanError(f"units.of has {len(units.of)} values for {n} records; give the unit of each record")
        if (synthetic is None) == (example is None):
            raise PlanError("the self-test needs to know what records look like; give either synthetic= or example=")
        rows = views * (1 if units is None else units.rows)
        if synthetic is not None:
            like = SyntheticRecords(synthetic, rows=rows)
        elif is_dataset(data) or isinstance(example, Mapping):
            like = SyntheticRecords.like(as_inputs(example) if is_dataset(data) else example, rows)
        else:
            raise InputError(f"example= must be what read() returns, a dict, but is a {type(example).__name__}")
        return OwnRecords(read, n if table is None else table.count, views, like, units, table)

    @property
    def digest_of_units(self) -> str:
        """Private."""
        return "" if self.table is None else self.table.digest

    def unit(self, table: str) -> Unit | None:
        """As a plan names it; `table` is a keyed digest of who belongs together."""
        if self.units is None:
            return None
        try:
            return Unit(self.units.by, self.units.rows, self.units.reduce, table)
        except ValueError as error:
            raise PlanError(f"units: {error}") from None

    def reader(self, key: bytes | StepKey, workers: int = 0) -> FunctionReader:
        """`key` decides which records of a large unit take part in a step, and what random transforms draw."""
        slots = SlotRows(views=self.views)
        if self.units is not None:
            slots = SlotRows(self.table, self.units.rows, self.units.reduce, self.views, key)
        return FunctionReader(self.read, self.synthetic.make(1, 0), slots, key, workers)
