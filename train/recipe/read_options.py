"""How a phase's records are shared out, fetched and decoded: the config's settings, completed for this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from murmuration.data.batch.shard_reader import ReadOptions
from murmuration.data.decode.resize import DECODER
from murmuration.data.draw.node_placement import Placement, place, place_units
from murmuration.data.draw.stream import StreamEpochs, StreamIndex, lane_placement
from murmuration.data.index.epochs import Epochs, PublicEpochs
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.store.cache import Cache
from murmuration.data.store.place import RecordIndex, ShardError
from murmuration.train.config.data import ReadingSettings
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.cores import own_cores
from murmuration.train.distributed.ranks import Ranks, raised_on_all_ranks
from murmuration.train.recipe.ready_phase import ReadyPhase

REMOTE_IN_FLIGHT = 64  # hides latency: benchmarks/data.py


def reading_options(settings: ReadingSettings, index: RecordIndex, ranks: Ranks) -> ReadOptions:
    """Called on all ranks together."""
    # One core is left to the trainer.
    workers = settings.workers if settings.workers is not None else max(1, own_cores(ranks) - 1)
    remote = not isinstance(index.locate(0)[0], Path)
    in_flight = REMOTE_IN_FLIGHT if remote else workers + 2
    cache = None
    if settings.cache_dir is not None:
        cache = Cache(Path(settings.cache_dir), int(settings.cache_gib * 2**30), settings.cache_keep)
    return ReadOptions(workers, in_flight, settings.timeout_seconds, cache)


def agree(phases: list[ReadyPhase], ranks: Ranks) -> list[ReadyPhase]:
    """The phases once all ranks know which rank holds which shards; refused on all ranks alike, before anything is
    written.

    Equal draws are not enough: if the same numbers meant different shards on two ranks, both could read one record.
    """
    made_by = "what makes pixels of pictures (Pillow, simplejpeg and cykooz-resizer, with their versions)"
    ranks.require_same(made_by, DECODER)
    for phase in phases:
        seen = f"{phase.index.manifest_digest} {phase.index.excluded_digest}"
        if phase.units is not None:
            seen += f" {phase.units.digest}"
        ranks.require_same(f"the index of phase {phase.name!r}, with its list of excluded records", seen)
        if phase.held_out is not None:
            seen = f"{phase.held_out.manifest_digest} {phase.captioned}"
            ranks.require_same(f"the records that phase {phase.name!r} is evaluated on", seen)
    return [replace(phase, placement=_placement(phase, ranks)) for phase in phases]


def _placement(phase: ReadyPhase, ranks: Ranks) -> Placement | None:
    index = phase.index
    if isinstance(index, StreamIndex):
        try:
            return lane_placement(index.lanes, ranks.world)
        except ShardError as error:
            raise raised_on_all_ranks(RecipeError(f"{phase.where}.data.lanes: {error}")) from None
    if phase.reading.node_shards is None:
        return None
    assert isinstance(index, ShardIndex), "opening it refused any other"
    holdings = ranks.gather(np.packbits(index.held()))
    held = [np.unpackbits(each, count=len(index.shards)).astype(bool) for each in holdings]
    names = [shard.name for shard in index.shards]
    try:
        if phase.units is None:
            return place(names, index.shard_ends, held)
        return place_units(names, index.shard_ends, held, phase.units)
    except ShardError as error:
        where = f"{phase.where}.data.reading.node_shards"
        raise raised_on_all_ranks(RecipeError(f"{where}: {error}")) from None


def rank_plan(phase: ReadyPhase, ranks: Ranks, micro_batch: int) -> Callable[[np.ndarray], np.ndarray] | None:
    """Which of a step's records this rank computes, if the phase's placement overrides the loader's own rule."""
    placement = phase.placement
    return None if placement is None else lambda ids: placement.rows(ids, ranks.rank, micro_batch)


def with_stream_order(phase: ReadyPhase, order_key: bytes) -> ReadyPhase:
    """The phase ready to be read; a stream has to know its order first."""
    index = phase.index
    return (
        replace(phase, index=index.begin(order_key, phase.settings.batch or 0))
        if isinstance(index, StreamIndex)
        else phase
    )


def public_epochs(phase: ReadyPhase, batch: int, order_key: bytes) -> Epochs:
    if isinstance(phase.index, StreamIndex):
        return StreamEpochs(phase.index.lanes, batch)
    return PublicEpochs(phase.n, batch, order_key)
