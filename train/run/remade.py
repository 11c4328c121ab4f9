"""Before steps are made again, behind the last durable checkpoint: their records are still the ones that were read."""

from __future__ import annotations

from typing import Any

import numpy as np

from murmuration.accounting.ledger.facts import Segment
from murmuration.data.draw.node_placement import Placement
from murmuration.data.draw.poisson import Sampler
from murmuration.data.index.contents import require_contents, shards_of, with_sample
from murmuration.data.store.place import ShardError
from murmuration.train.distributed.ranks import Ranks, on_all
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.context import RunContext


def require_same_records(
    run: RunContext, phase: ReadyPhase, segment: Segment, done: int, sampler: Sampler[Any] | None
) -> None:
    """ShardError on all ranks where one of the shards is another one. How many they are depends on who was drawn, so
    nobody is told. Without a sampler, all are compared: features that are missing would be computed anew from any."""
    ranks = run.ranks
    steps = ranks.on_main(lambda: _opened_behind(run, phase, segment, done))
    everyone = np.arange(phase.index.records if sampler is None else 0)
    drawn = {
        shard
        for step in steps
        for shard in shards_of(phase.index, everyone if sampler is None else sampler.draw(step).ids)
    }
    shards = ranks.on_main(lambda: with_sample(phase.index, drawn))
    if not shards:
        return
    run.board.say(
        f"{phase.name}  steps {steps[0]} to {steps[-1]} are made again with the same noise; the shards that they draw "
        "from are compared with the index first"
    )
    own = _share(shards, phase.placement, ranks)
    on_all(ranks, lambda: require_contents(phase.index, own, ranks.pulse.beat), ShardError)


def _opened_behind(run: RunContext, phase: ReadyPhase, segment: Segment, done: int) -> list[int]:
    here = (phase.number, segment.number)
    return sorted({at.step for at in run.writer.history.opened if (at.phase, at.segment) == here and at.step > done})


def _share(shards: list[int], placement: Placement | None, ranks: Ranks) -> list[int]:
    """What this rank compares: shards that lie on some nodes alone are for the ranks that read them."""
    if placement is None:
        return shards[ranks.rank :: ranks.world]
    group = next(number for number, members in enumerate(placement.groups) if ranks.rank in members)
    members = placement.groups[group]
    return [shard for shard in shards if placement.owners[shard] == group][members.index(ranks.rank) :: len(members)]
