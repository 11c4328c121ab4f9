"""A program's own records: how they are read, what is protected as one, and what the self-test takes in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from murmuration.accounting.errors import InputError, PlanError
from murmuration.accounting.unit import Unit
from murmuration.data.batch.function_reader import FunctionReader, Read, as_inputs, as_read, is_dataset, repeated
from murmuration.data.batch.slot_rows import SlotRows, UnitReduce
from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.data.draw.poisson import StepKey
from murmuration.train.distributed.ranks import Disagreement, Ranks, on_all, raised_on_all_ranks
from murmuration.train.self_test.probes import SyntheticRecords

if TYPE_CHECKING:
    from murmuration.data.index.unit_table import UnitTable

Data = Any
"""A torch.utils.data.Dataset or anything with len() and []; or a function `read`, given `records`."""
SAME = 1e-3
"""Of the length of what two ranks read of a record: less is rounding."""


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
        if units is None and type(data) in (Subset, ConcatDataset) and (again := repeated(data)):
            raise PlanError(
                f"{again} of the {n} records are another one again, and a step would take each for somebody else's; "
                "leave them out, or say with units= which records are one"
            )
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

    def require_readable(self, ranks: Ranks) -> None:
        """Before a run begins, on all ranks together: some records can be read, and ranks number them alike. A list
        that each rank shuffled, split or took from a set by itself has the same record under other numbers, and two
        ranks would take it into one step."""
        ranks.require_same("the number of records", self.n)
        reader = self.reader(bytes(32))
        batch = on_all(ranks, lambda: reader.try_first(self.n), Exception)
        if ranks.world == 1:
            return
        ours = [_traces(batch), _traces(reader.try_first(self.n))]
        of_ranks = np.stack(ranks.gather(np.stack(ours)))  # [ranks, times, records, inputs, 2]
        # What is drawn from elsewhere than the seeded generators differs on one rank, too, and shows nothing.
        steady = _alike(of_ranks[:, 0], of_ranks[:, 1]).all(0)
        differ = steady & ~_alike(of_ranks[:, 0], of_ranks[:1, 0]).all(0)
        if 2 * differ.sum() > steady.sum():  # which no single record decides
            raise raised_on_all_ranks(
                Disagreement(
                    "the ranks read different records under the same numbers, so that one record could enter a step "
                    "twice; give data= in the same order on all of them: sort it, or shuffle and split it by a seed"
                )
            )

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


def _traces(batch: MicroBatch) -> np.ndarray:
    """[records, inputs, 2] by which two ranks compare what they read, without sending it: of each input its product
    with random numbers, and its length. NaN where a record is absent."""
    count, found = len(batch.present), list[Tensor]()
    for tensor in batch.inputs.values():
        rows = tensor.detach().cpu().double().reshape(count, -1)
        mixed = rows @ torch.randn(rows.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        found.append(torch.stack([mixed, rows.norm(dim=1)], 1))
    absent = ~batch.present.reshape(-1, 1, 1)
    return torch.stack(found, 1).masked_fill(absent, torch.nan).numpy()


def _alike(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """For each record, whether all its inputs are the same but for the rounding of another processor."""
    apart = np.abs(one[..., 0] - other[..., 0])
    return np.all(apart <= SAME * np.maximum(one[..., 1], other[..., 1]), axis=-1)
