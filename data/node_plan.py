"""The rank plan where each node holds only its own shards: records are read where they lie.

The draw is the same, to the last record, as with the ordinary plan; only who computes what differs. So the
accounting does not change. The price is the load of the fullest node: |S_t| scatters over nodes by chance.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from data.batches import EMPTY, slots


def node_slots(ids: np.ndarray, borders: np.ndarray, rank: int, world: int, micro_batch: int) -> np.ndarray:
    """This rank's rows, int64 [count, micro_batch], padded with -1; `count` is the same on every rank.

    Node k owns the records borders[k] <= id < borders[k + 1] (whole shards, in the index's order) and the ranks
    k * world / nodes, ... as launchers number them.
    """
    nodes = len(borders) - 1
    if nodes < 1 or world % nodes:
        raise ValueError(f"{world} ranks on {nodes} nodes: every node needs the same number of ranks")
    outside = len(ids) and not borders[0] <= ids[0] <= ids[-1] < borders[-1]
    if np.any(np.diff(borders) < 0) or outside:
        raise ValueError("the nodes' borders must rise and cover every record; a record without a node is lost")
    local = world // nodes
    cuts = np.searchsorted(ids, borders)
    parts = [ids[start:end] for start, end in pairwise(cuts)]
    fullest = max(parts, key=len)
    count = len(slots(fullest, 0, local, micro_batch))
    own = slots(parts[rank // local], rank % local, local, micro_batch)
    rows = np.full((count, micro_batch), EMPTY, dtype=np.int64)
    rows[: len(own)] = own
    return rows
