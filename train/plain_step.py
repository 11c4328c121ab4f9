"""One logical step of a non-private phase: same engine, same data path, no clipping, no noise, no promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from data.batches import MicroBatch
from data.public import Epochs
from train.engine import ShardedEngine
from train.gradient import PlainUpdate
from train.observed import Observed
from train.ranks import Ranks
from train.stop import StopRequest


class PlainStep:
    def __init__(
        self, epochs: Epochs, engine: ShardedEngine, ranks: Ranks, stop: StopRequest,
        micro_batches: Callable[[np.ndarray, int], Iterator[MicroBatch]],
    ) -> None:  # fmt: skip
        self.epochs, self.engine, self.ranks, self.stop = epochs, engine, ranks, stop
        self.micro_batches = micro_batches

    def run(self, step: int, learning_rate: float) -> Observed:
        observed = Observed()
        for micro_batch in self.micro_batches(self.epochs.ids(step - 1), step):
            self.stop.check(self.ranks)
            self.engine.accumulate(micro_batch)
            observed.add(micro_batch.present, *self.engine.observe())
        self.engine.update(PlainUpdate(self.epochs.batch, step), learning_rate)
        return observed
