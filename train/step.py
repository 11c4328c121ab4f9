"""One private logical step, from the draw to the committed ledger line. The file to read for an audit.

draw -> open in the ledger -> clipped sums of all micro-batches -> one reduction -> noise, divided by q·n ->
optimizer -> commit. Private values (ids, losses, norms) are arguments and locals; they end in `observed` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from accounting.facts import ClippingFact, NoiseFact
from accounting.journal import Journal
from data.batches import MicroBatch
from data.sampler import Draw, Sampler
from train.clip import ClipEngine
from train.clip_adaptive import RELEASED, AdaptiveNorm
from train.engine import ShardedEngine
from train.gradient import NoisyUpdate
from train.metrics import MetricRelease
from train.noise import Noise
from train.observed import Observed
from train.ranks import Ranks
from train.step_record import StepRecord
from train.stop import StopRequest


class PrivateStep:
    def __init__(
        self, phase: int, journal: Journal | None, sampler: Sampler[Draw], clip: ClipEngine, noise: Noise,
        engine: ShardedEngine, ranks: Ranks, stop: StopRequest,
        micro_batches: Callable[[np.ndarray, int], Iterator[MicroBatch]], metrics: MetricRelease | None = None,
        norm: AdaptiveNorm | None = None,
    ) -> None:  # fmt: skip
        self.record, self.ranks, self.stop = StepRecord(phase, journal, ranks, metrics), ranks, stop
        self.sampler, self.clip, self.noise, self.engine, self.norm = sampler, clip, noise, engine, norm
        self.micro_batches, self.metrics = micro_batches, metrics

    def run(self, step: int, learning_rate: float) -> Observed:
        draw = self.sampler.draw(step)
        self.ranks.require_same(f"the records of step {step}", draw.digest)
        announced = NoiseFact(self.noise.std, self.noise.divisor, self.engine.trainable_elements, self.noise.generator)
        self.record.opened(step, draw, self.clip.rule.fact(), announced)

        self.noise.prepare(step)
        observed = Observed(bound=self.clip.rule.bound)
        for micro_batch in self.micro_batches(draw.ids, step):
            self.stop.check(self.ranks)
            self.engine.accumulate(micro_batch)
            seen = self.engine.observe()
            observed.add(micro_batch.present, *seen)
            if self.metrics is not None:
                self.metrics.add(micro_batch.present, seen)

        update = NoisyUpdate(self.noise, step)
        applied = self.engine.update(update, learning_rate)
        # Of the sums as they were made, on every rank, and of the rule as it stands: the largest.
        largest = max(self.clip.rule.sensitivity, *self.ranks.gather(observed.sensitivity))
        summed = ClippingFact(self.clip.rule.kind, largest)
        if self.metrics is not None:
            observed.released = self.metrics.release(step)
        share = observed.released.get(RELEASED)
        written = self.record.committed(step, draw, summed, update.fact(applied.elements), share)
        if self.norm is not None and written is not None:
            observed.released |= self.norm.advance(written)
        return observed
