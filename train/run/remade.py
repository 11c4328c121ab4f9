"""Before steps after the last durable checkpoint are made again: a check that their records have not changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from murmuration.accounting.ledger.facts import Segment
from murmuration.data.draw.node_placement import Placement
from murmuration.data.draw.poisson import Sampler
from murmuration.data.index.contents import forget_cached, require_contents, shards_of, with_sample
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
        ids = None if sampler is None else sampler.draw(step).ids
        drawn.update(shards_of(phase.index, everyone if ids is None else ids))
        _forget_cached(phase, ids, ranks)
    shards = ranks.on_main(lambda: with_sample(phase.index, drawn))
    if not shards:
        return
    run.board.say(
        f"{phase.name}  steps {steps[0]} to {steps[-1]} are made again with the same noise; the shards that they draw "
        "from are compared with the index first"
    )
    own = _share(shards, phase.placement, ranks)
    on_all(ranks, lambda: require_contents(phase.index, own, ranks.pulse.beat), ShardError)


def _forget_cached(phase: ReadyPhase, ids: np.ndarray | None, ranks: Ranks) -> None:
    """On every rank, because each node has a cache of its own."""
    cache = phase.reading.cache_dir
    if cache is not None:
        on_all(ranks, lambda: forget_cached(phase.index, ids, Path(cache), ranks.pulse.beat), ShardError)


def _opened_behind(run: RunContext, phase: ReadyPhase, segment: Segment, done: int) -> list[int]:
    here = (phase.number, segment.number)
    return sorted({at.step for at in run.writer.history.opened if (at.phase, at.segment) == here and at.step > done})


def _share(shards: list[int], placement: Placement | None, ranks: Ranks) -> list[int]:
    """The shards that this rank compares: those that only some nodes hold are left to the ranks that read them."""
    if placement is None:
        return shards[ranks.rank :: ranks.world]
    group = next(number for number, members in enumerate(placement.groups) if ranks.rank in members)
    members = placement.groups[group]
    return [shard for shard in shards if placement.owners[shard] == group][members.index(ranks.rank) :: len(members)]
