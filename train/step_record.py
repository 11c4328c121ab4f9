"""What a step writes into the ledger: each part states what it did, the main rank writes, its refusal reaches all."""

from __future__ import annotations

from accounting.facts import ClippingFact, NoiseFact, SamplingFact, StepFacts
from accounting.journal import Journal
from data.sampler import Draw
from train.metrics import MetricRelease
from train.ranks import Ranks


class StepRecord:
    def __init__(self, phase: int, journal: Journal | None, ranks: Ranks, metrics: MetricRelease | None) -> None:
        self.phase, self.ranks, self.metrics = phase, ranks, metrics
        self.journal = journal

    def opened(self, step: int, draw: Draw, clipping: ClippingFact, noise: NoiseFact) -> None:
        """Before anything is computed; refused if the budget would be passed."""
        facts = self._facts(draw, clipping, noise)
        self.ranks.on_main(lambda: self._ledger.open_step(self.phase, step, facts))

    def committed(
        self, step: int, draw: Draw, clipping: ClippingFact, noise: NoiseFact, share: float | None
    ) -> float | None:  # fmt: skip
        """Gives the share that stands in the ledger: of a replayed step, the one that was told before."""
        facts = self._facts(draw, clipping, noise)
        return self.ranks.on_main(lambda: self._ledger.commit_step(self.phase, step, facts, share))

    @property
    def _ledger(self) -> Journal:
        assert self.journal is not None, "the main rank holds the ledger"
        return self.journal

    def _facts(self, draw: Draw, clipping: ClippingFact, noise: NoiseFact) -> StepFacts:
        metrics = self.metrics.facts() if self.metrics else ()
        return StepFacts(SamplingFact(draw.threshold, draw.records, draw.digest), clipping, noise, metrics)
