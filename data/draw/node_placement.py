"""The layout of records over ranks when each node has only its own shards: records are read where they are stored.

The draw is the same, to the last record, as with the ordinary layout; only which rank computes what differs. So the
accounting does not change. The price is the load of the fullest node: |S_t| is spread over the nodes at random.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from murmuration.data.draw.micro_batch import EMPTY, row_count, slots
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.index.unit_table import UnitTable
from murmuration.data.store.place import RecordIndex, ShardError

_AT_ONCE = 1 << 22  # records


@dataclass(frozen=True, eq=False)
class Placement:
    """Ranges of records and the ranks that compute them: each range (a shard) belongs to one group of ranks (a node).

    `ends[i]` is where range i ends and i + 1 begins; `owners[i]` is the number of its group. The same on every rank.
    """

    ends: np.ndarray
    owners: np.ndarray
    groups: tuple[tuple[int, ...], ...]

    def rows(self, ids: np.ndarray, rank: int, micro_batch: int) -> np.ndarray:
        """This rank's rows, int64 [count, micro_batch], padded with -1; `count` is the same on every rank."""
        if len(ids) and not 0 <= ids[0] <= ids[-1] < self.ends[-1]:
            raise ValueError("ids beyond the last range; a record without an owner is lost")
        owner = self.owners[np.searchsorted(self.ends, ids, side="right")]
        loads = np.bincount(owner, minlength=len(self.groups)).tolist()
        count = max(row_count(load, len(ranks), micro_batch) for load, ranks in zip(loads, self.groups, strict=True))
        mine = next(number for number, ranks in enumerate(self.groups) if rank in ranks)
        ranks = self.groups[mine]
        own = slots(ids[owner == mine], ranks.index(rank), len(ranks), micro_batch)
        rows = np.full((count, micro_batch), EMPTY, dtype=np.int64)
        rows[: len(own)] = own
        return rows


def place(names: Sequence[str], ends: np.ndarray, holdings: Sequence[np.ndarray]) -> Placement:
    """Distributes the shards over the ranks that have them; `holdings[rank]` says for each shard whether it is there.

    Ranks that have the same shards are one group (the ranks of a node). A shard that several groups have goes to the
    least loaded one, so that every record is computed exactly once.
    """
    held = np.array(holdings, dtype=bool)
    if np.any(np.diff(ends, prepend=0) < 0) or held.shape[1] != len(ends) or len(names) != len(ends):
        raise ValueError("ends must rise, one for each shard")
    if len(lost := np.flatnonzero(~held.any(axis=0))):
        more = f", nor do {len(lost) - 1} more shards" if len(lost) > 1 else ""
        raise ShardError(
            f"{names[lost[0]]} lies on no node{more}; their records could not be read, so copy them to one"
        )
    groups: dict[bytes, list[int]] = {}
    for rank, row in enumerate(held):
        groups.setdefault(row.tobytes(), []).append(rank)
    ranks = [tuple(group) for group in groups.values()]
    holders = held[[group[0] for group in ranks]]
    sizes = np.diff(ends, prepend=0)
    owners, loads = np.full(len(ends), -1, dtype=np.int64), [0] * len(ranks)
    # Shards with one holder first: they leave no choice, and the others then even out the load.
    for shard in np.argsort(holders.sum(axis=0), kind="stable").tolist():
        able = np.flatnonzero(holders[:, shard]).tolist()
        owner = min(able, key=lambda group: ((loads[group] + int(sizes[shard])) / len(ranks[group]), group))
        owners[shard], loads[owner] = owner, loads[owner] + int(sizes[shard])
    return Placement(np.asarray(ends, dtype=np.int64), owners, tuple(ranks))


def place_units(
    names: Sequence[str], ends: np.ndarray, holdings: Sequence[np.ndarray], units: UnitTable
) -> Placement:  # fmt: skip
    """The same for units of several records: a unit is computed where its first record lies, so all of its other
    records must lie there, too. Nothing is read from another node."""
    first = units.first_records()
    own = place(names, np.searchsorted(first, ends), holdings)
    held = np.array(holdings, dtype=bool)[[group[0] for group in own.groups]]
    shards = np.searchsorted(ends, np.arange(units.records), side="right")
    begun = shards[first]
    for start in range(0, units.records, _AT_ONCE):
        there = shards[start : start + _AT_ONCE]
        at_home = own.owners[begun[units.units_at(start, len(there))]]
        if len(lost := np.flatnonzero(~held[at_home, there])):
            raise ShardError(
                f"{names[int(there[lost[0]])]} holds records of a unit that begins in a shard of another node, and a "
                "unit is computed on one node; copy the shards so that a node has all records of its units, or pack "
                "the records in the order of their units"
            )
    return own


def on_this_node(index: RecordIndex, folder: str) -> ShardIndex:
    """The index with its shards in this node's own folder, whose name may contain environment variables."""
    if not isinstance(index, ShardIndex):
        raise ShardError(f"{index.folder}: not an index of whole tar shards, so its records have no nodes; use one")
    own = Path(os.path.expandvars(folder))
    if "$" in str(own) or not own.is_absolute():
        raise ShardError(f"{folder}: here this is {own}; give an absolute path whose $VARIABLES are set on every node")
    moved = index.moved(own)
    if not moved.held().any():
        raise ShardError(f"{own}: holds none of the {len(index.shards)} shards of {index.folder}; copy this node's")
    return moved
