"""Before steps after the last durable checkpoint are made again: a check that their records have not changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from murmuration.accounting.ledger.facts import Segment
from murmuration.data.draw.poisson import Sampler
from murmuration.data.index.contents import forget_cached, require_contents, shards_of, with_sample
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.place import ShardError
from murmuration.train.distributed.ranks import Ranks, on_all
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.context import RunContext


def require_same_records(
    run: RunContext, phase: ReadyPhase, segment: Segment, done: int, sampler: Sampler[Any] | None
) -> None:
    """Raises ShardError on all ranks if one of the shards has changed. How many shards are compared depends on which
    records were drawn, so that number is not shown. Without a sampler, all shards are compared: missing features may
    have to be computed from any of them."""
    ranks = run.ranks
    steps = ranks.on_main(lambda: _opened_behind(run, phase, segment, done))
    everyone = np.arange(phase.index.records if sampler is None else 0)
    drawn: set[int] = set()
    for step in steps:
        ids = None if sampler is None else _records(phase, sampler.draw(step).ids)
        drawn.update(shards_of(phase.index, everyone if ids is None else ids))
        _forget_cached(phase, ids, ranks)
    shards = ranks.on_main(lambda: with_sample(phase.index, drawn))
    if not shards:
        return
    run.board.say(
        f"{phase.name}  steps {steps[0]} to {steps[-1]} are made again with the same noise; the shards that they draw "
        "from are compared with the index first"
    )
    own = _share(phase, shards, ranks)
    on_all(ranks, lambda: require_contents(phase.index, own, ranks.pulse.beat), ShardError)


def _records(phase: ReadyPhase, drawn: np.ndarray) -> np.ndarray:
    """All records of what was drawn; also those of a unit that the step did not choose, so that the number of shards
    tells no more than which units were drawn."""
    return drawn if phase.units is None else phase.units.records_of_all(drawn)


def _forget_cached(phase: ReadyPhase, ids: np.ndarray | None, ranks: Ranks) -> None:
    """On every rank, because each node has a cache of its own."""
    cache = phase.reading.cache_dir
    if cache is not None:
        on_all(ranks, lambda: forget_cached(phase.index, ids, Path(cache), ranks.pulse.beat), ShardError)


def _opened_behind(run: RunContext, phase: ReadyPhase, segment: Segment, done: int) -> list[int]:
    here = (phase.number, segment.number)
    return sorted({at.step for at in run.writer.history.opened if (at.phase, at.segment) == here and at.step > done})


def _share(phase: ReadyPhase, shards: list[int], ranks: Ranks) -> list[int]:
    """The shards that this rank compares: those that only some nodes hold are left to the ranks that read them. A unit
    is read on one node, from that node's own copies, so every node compares all of the shards that it holds."""
    placement, index = phase.placement, phase.index
    if placement is None:
        return shards[ranks.rank :: ranks.world]
    group = next(number for number, members in enumerate(placement.groups) if ranks.rank in members)
    members = placement.groups[group]
    read = placement.owners == group if phase.units is None or not isinstance(index, ShardIndex) else index.held()
    return [shard for shard in shards if read[shard]][members.index(ranks.rank) :: len(members)]
