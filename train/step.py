"""One private logical step, from the draw to the committed ledger line: the file that an auditor reads first.

draw -> open in the ledger -> clipped sums of all micro-batches -> one reduction -> noise, divided by q·n ->
optimizer -> commit. Private values (ids, losses, norms) are arguments and locals; only `observed` keeps any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.facts import ClippingFact, NoiseFact, SamplingFact, StepFacts
from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.data.draw.poisson import Draw, Ids
from murmuration.train.clip.engine import ClipEngine, Observation
from murmuration.train.distributed.ranks import Ranks, results_of_all
from murmuration.train.distributed.stop import Stopped, StopRequest
from murmuration.train.engines.base import Engine
from murmuration.train.noise.adaptive_norm import RELEASED, AdaptiveNorm, next_rule
from murmuration.train.noise.update import Noise, NoisyUpdate, PlainUpdate

if TYPE_CHECKING:
    from murmuration.train.noise.metrics import MetricRelease

D = TypeVar("D", bound=Ids)
MicroBatches = Callable[[np.ndarray, int], Iterator[MicroBatch]]


@dataclass(frozen=True)
class Records(Generic[D]):
    """Where a step's records come from: the draw says which take part, `micro_batches` reads this rank's share."""

    draw: Callable[[int], D]
    micro_batches: MicroBatches


class StepLedger(Protocol):
    """What a step asks of the ledger (`accounting/ledger/journal.py`)."""

    def open_step(self, phase: int, step: int, facts: StepFacts) -> None: ...

    def settle(self) -> None:
        """Waits until the disk has what was opened."""

    def commit_step(self, phase: int, step: int, facts: StepFacts, share: float | None = None) -> float | None: ...


Make = Callable[[int, float], "StepSummary"]
"""Makes the step of a number, at a learning rate."""


class PrivateStep:
    def __init__(
        self, phase: int, journal: StepLedger | None, records: Records[Draw], clip: ClipEngine, noise: Noise,
        engine: Engine, ranks: Ranks, stop: StopRequest, metrics: MetricRelease | None = None,
        norm: AdaptiveNorm | None = None,
    ) -> None:  # fmt: skip
        self.record, self.ranks, self.stop = StepRecord(phase, journal, ranks, metrics), ranks, stop
        self.records, self.clip, self.noise, self.engine, self.norm = records, clip, noise, engine, norm
        self.metrics = metrics

    def run(self, step: int, learning_rate: float) -> StepSummary:
        draw = self.records.draw(step)
        # Ranks that drew different records would add up a sum whose sampling no proof describes.
        self.ranks.require_same(f"the records of step {step}", draw.digest)
        # Where C adapts, that of this step was fixed by what earlier steps released: this draw has no part in it.
        rule = next_rule(self.clip, self.norm)
        # The noise grows and shrinks with it, so that σ, and with it what the step costs, stays the plan's.
        noise = self.noise if self.norm is None else self.norm.noise(self.noise)
        update = NoisyUpdate(noise, step)
        announced = update.fact(self.engine.trainable_elements)
        # Charged before anything is computed, so that no kill can leave a step that was done and not charged. An empty
        # draw is a step like any other: that nobody was drawn must not show.
        self.record.opened(step, draw, rule.fact(), announced)

        noise.prepare(step)  # threads draw it while the micro-batches compute
        observed = StepSummary(bound=rule.bound)
        seen: list[tuple[Tensor, Observation]] = []
        micro_batches = self.records.micro_batches(draw.ids, step)
        for micro_batch in self.stop.until_asked(micro_batches, self.ranks, each=self.engine.partitioned):
            self.engine.accumulate(micro_batch, rule)
            seen.append((micro_batch.present, self.engine.observe()))
            observed.add(micro_batch.present, *seen[-1][1])

        # The weights are the step's first release: the ledger's line is on the disk before they move.
        sensitivities = self.record.durable(observed.sensitivity)
        # One reduction, one noise, one move of the weights, however many micro-batches there were, if any.
        applied = self.engine.update(update, learning_rate)
        if self.metrics is not None:
            # Released from the same draw as the gradient, and charged with it as one event.
            for present, each in seen:
                self.metrics.add(present, each, rule.bound)
        # The largest of what all ranks' sums were made with and what the rule states now: a rank without a record this
        # time has made no sum, and its sensitivity of 0 must not stand for the step's.
        largest = max(rule.sensitivity, *sensitivities)
        summed = ClippingFact(rule.kind, largest)
        if self.metrics is not None:
            observed.released = self.metrics.release(step)
        share = observed.released.get(RELEASED)
        # What the parts did, not what they were told: had they done less, the ledger charges the weaker of the two.
        written = self.record.committed(step, draw, summed, update.fact(applied.elements), share)
        if self.norm is not None and written is not None:
            # The ledger's share, which on a replay is that of the first time: C must be the one that was recorded.
            observed.released |= self.norm.advance(written)
        return observed


# What a step saw of its records. In a private phase this is private, and only `Board.private` may show it.


@dataclass
class StepSummary:
    """What was seen stays on the device until it is asked for: fetching it would make the host wait for each
    micro-batch."""

    released: dict[str, float] = field(default_factory=dict)
    """Public once a checkpoint is durable: noised, and charged with the step."""
    sensitivity: float = 0.0
    """The largest sensitivity of any micro-batch's sum. Public: it depends on the rule alone."""
    bound: float | None = None
    """The norm to which gradients were clipped, where a step clips."""
    _seen: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = field(default_factory=list)
    """For each micro-batch: which slots hold a record, losses, norms, and whose gradients were written out."""

    def add(
        self, present: Tensor, losses: Tensor, norms: Tensor | None, sensitivity: float = 0.0,
        doubtful: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.sensitivity = max(self.sensitivity, sensitivity)
        self._seen.append((present, losses.detach(), None if norms is None else norms.detach(), doubtful))

    @property
    def present(self) -> Tensor:
        return _fetched([present for present, *_ in self._seen]).bool()

    @property
    def records(self) -> int:
        return int(self.present.sum())

    @property
    def loss_sum(self) -> float:
        losses = _fetched([losses for _, losses, *_ in self._seen])
        return float(torch.nan_to_num(losses[self.present].float()).double().sum())

    @property
    def norms(self) -> Tensor | None:
        """Gradient norms of the records that were present; None where nothing was clipped."""
        found = [norms for _, _, norms, _ in self._seen if norms is not None]
        return _fetched(found)[self.present] if found else None

    def over_ranks(self, ranks: Ranks, bound: float | None) -> dict[str, float]:
        """Summarises the whole logical batch."""
        measured = self.norms
        norms = torch.zeros(0) if measured is None else measured
        slow = sum(int(doubtful.sum()) for *_, doubtful in self._seen if doubtful is not None)
        bound = self.bound or bound
        over = float((norms > bound).sum()) if bound is not None else 0.0
        parts = ranks.gather((self.records, self.loss_sum, float(torch.nan_to_num(norms).sum()), over, slow))
        records, loss, norm, clipped, doubtful = (sum(part[i] for part in parts) for i in range(5))
        summary = {"records": float(records), "loss": loss / max(1, records)}
        if measured is not None:
            summary |= {"gradient_norm": norm / max(1, records), "clipped_fraction": clipped / max(1, records)}
            summary |= {"written_out": float(doubtful)}
        return summary


def _fetched(parts: list[Tensor]) -> Tensor:
    """Copies all of it to the host in one transfer."""
    return torch.cat(parts).cpu() if parts else torch.zeros(0)


# What a step writes into the ledger. Each part states what it did, and the main rank writes it; if the ledger refuses,
# all ranks fail.


class StepRecord:
    def __init__(self, phase: int, journal: StepLedger | None, ranks: Ranks, metrics: MetricRelease | None) -> None:
        self.phase, self.ranks, self.metrics = phase, ranks, metrics
        self.journal = journal

    def opened(self, step: int, draw: Draw, clipping: ClippingFact, noise: NoiseFact) -> None:
        """Called before anything is computed; refused if the step would exceed the budget. The line goes to the disk
        while the sums are computed: see `durable`."""
        facts = self._facts(draw, clipping, noise)
        self.ranks.on_main(lambda: self._ledger.open_step(self.phase, step, facts))

    def durable(self, sensitivity: float) -> list[float]:
        """What every rank states, once the step's line is on the disk: nothing of the step may be released before."""

        def stated() -> float:
            if self.ranks.main:
                self._ledger.settle()
            return sensitivity

        return results_of_all(self.ranks, stated, LedgerError, OSError)

    def committed(
        self, step: int, draw: Draw, clipping: ClippingFact, noise: NoiseFact, share: float | None
    ) -> float | None:  # fmt: skip
        """Returns the share that the ledger states; for a replayed step, that is the share released the first time."""
        facts = self._facts(draw, clipping, noise)
        return self.ranks.on_main(lambda: self._ledger.commit_step(self.phase, step, facts, share))

    @property
    def _ledger(self) -> StepLedger:
        assert self.journal is not None, "the main rank holds the ledger"
        return self.journal

    def _facts(self, draw: Draw, clipping: ClippingFact, noise: NoiseFact) -> StepFacts:
        metrics = self.metrics.facts() if self.metrics else ()
        sampling = SamplingFact(draw.rule, draw.records, draw.digest)
        return StepFacts(sampling, clipping, noise, metrics)


# One logical step of a non-private phase: the same engine and data path, without clipping, noise or promise.


class PlainStep:
    def __init__(
        self, records: Records[Any], batch: int, engine: Engine, ranks: Ranks, stop: StopRequest
    ) -> None:  # fmt: skip
        self.records, self.batch, self.engine, self.ranks, self.stop = records, batch, engine, ranks, stop

    def run(self, step: int, learning_rate: float) -> StepSummary:
        observed = StepSummary()
        # Without privacy, engines reduce gradients during the backward pass, so ranks meet at every micro-batch.
        micro_batches = self.records.micro_batches(self.records.draw(step).ids, step)
        try:
            for micro_batch in self.stop.until_asked(micro_batches, self.ranks, each=True):
                self.engine.accumulate(micro_batch)
                observed.add(micro_batch.present, *self.engine.observe())
        except Stopped:
            self.engine.discard()
            raise
        self.engine.update(PlainUpdate(self.batch, step), learning_rate)
        return observed
