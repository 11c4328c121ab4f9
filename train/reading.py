"""How a phase's records are fetched and decoded: the config's wishes, completed with what this machine has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from data.batches import MicroBatch
from data.cache import Cache
from data.index import RecordIndex
from data.shards import Reading
from data.tar import UnreadableError
from train.config_data import ReadingSettings
from train.stop import StopRequest

REMOTE_IN_FLIGHT = 64  # hides 25 ms of latency at 1,200 records/s
MOST_WORKERS = 16


def reading_options(settings: ReadingSettings, index: RecordIndex) -> Reading:
    workers = settings.workers if settings.workers is not None else _cores_of_this_rank()
    remote = not isinstance(index.locate(0)[0], Path)
    in_flight = settings.in_flight or (REMOTE_IN_FLIGHT if remote else workers + 2)
    cache = None
    if settings.cache_dir is not None:
        cache = Cache(Path(settings.cache_dir), int(settings.cache_gib * 2**30), settings.cache_keep)
    return Reading(workers, in_flight, settings.timeout_seconds, cache)


def _cores_of_this_rank() -> int:
    """All but one, which the trainer itself needs; ranks of one machine share its cores evenly."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_WORKERS, cores // ranks - 1))


MicroBatches = Callable[[np.ndarray, int], Iterator[MicroBatch]]


def until_unreadable(micro_batches: MicroBatches, stop: StopRequest) -> MicroBatches:
    """The same micro-batches; where one cannot be read, a request to stop, and an empty one in its place.

    Steps look for requests before they use a micro-batch, all ranks together, and every rank has as many. So all of
    them leave the open step at the same place, and the run is saved, instead of waiting for the one that failed.
    """

    def guarded(ids: np.ndarray, step: int) -> Iterator[MicroBatch]:
        try:
            yield from micro_batches(ids, step)
        except UnreadableError as error:
            stop.ask(f"records that cannot be read: {error}")
            yield MicroBatch({}, torch.zeros(0, dtype=torch.bool))

    return guarded
