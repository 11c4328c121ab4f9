"""One private phase: plan, model, keys, records and step, put together once.

Recipes (`run/phase.py`), the library (`library/training.py`), the audit and its replay all train by it:

    with PrivatePhase(plan, model, rule, optimizer, keys, ranks, engine) as phase:
        phase.prove(synthetic)              # before anything else touches the engine
        phase.feed(reader)                  # or begin(..., records=...)
        phase.begin(journal, stop)
        for number in range(1, plan.steps + 1):
            phase.step(number, learning_rate)
        saving = phase.saving(run, header, list_unusable)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from murmuration.accounting.keys import Derive
from murmuration.accounting.ledger.chain import BudgetSpent, LedgerError
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.batch.loader import Loader, Reader
from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.data.draw.poisson import Draw
from murmuration.data.draw.samplers import SHARED_FROM, SharedSampler
from murmuration.data.store.place import UnreadableError
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import ClipEngine
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.core import Computation, PrivateCore, clipping_engine
from murmuration.train.distributed.process import forbid_dumps, keep_from_swap
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.stop import Stopped, StopRequest
from murmuration.train.engines.base import Engine
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.noise.adaptive_norm import next_rule
from murmuration.train.noise.update import Noise
from murmuration.train.optim.torch_optimizer import MakeOptimizer
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.self_test.self_test import SelfTestError, SelfTestReport
from murmuration.train.step import Make, MicroBatches, PrivateStep, Records, StepLedger, StepSummary
from murmuration.train.storage.saving import Saving

if TYPE_CHECKING:
    from murmuration.train.config.privacy import LossProbes
    from murmuration.train.optim.probed_rate import ProbedRate
    from murmuration.train.storage.open_run import OpenRun


class PrivatePhase:
    def __init__(
        self, plan: PrivacyPlan, model: nn.Module, rule: ClipRule, optimizer: Optimizer | MakeOptimizer, keys: Derive,
        ranks: Ranks, engine: EngineSettings, computation: Computation | None = None, *, number: int = 0,
        begun_after: int = 0, around_clip: Callable[[ClipEngine], ClipEngine] | None = None,
        around_engine: Callable[[Engine], Engine] | None = None, probes: LossProbes | None = None,
        manifest: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`number`: of the phase within its run. `begun_after`: the step after which the segment of the keys begins.
        `around_clip`, `around_engine`: what an audit puts around them. `probes`: of the loss along the weights' last
        move, which the learning rate follows, from where the `manifest` of the phase's checkpoint left it."""
        self.ranks, self.number = ranks, number
        self.rate: ProbedRate | None = None
        if probes is not None:
            from murmuration.train.optim.probed_rate import ProbedRate  # few phases probe

            self.rate = ProbedRate.of(probes, plan, manifest)
        self._settings, self._computation = engine, computation or Computation()
        built = clipping_engine(
            model, rule, optimizer, engine, ranks, self._computation, around_clip,
            keeps_before=probes is not None,
        )  # fmt: skip
        self.clip, self.forward = built.clip, built.forward
        self.engine: Engine = built.engine if around_engine is None else around_engine(built.engine)
        self._at_end = ExitStack()
        self._at_end.callback(self.engine.close)
        self._under(plan, keys, begun_after)

    def _under(self, plan: PrivacyPlan, keys: Derive, begun_after: int) -> None:
        self.plan = plan
        self.core = PrivateCore(
            plan, self.clip, self.engine, keys, self.ranks, self._computation.noise, begun_after
        )  # fmt: skip
        self.loader: Loader[Draw] | None = None
        self.made: PrivateStep | None = None
        """The step of this phase, once `begin` has put it together."""
        self._make: Make | None = None
        self._after: Callable[[int], None] | None = None
        self._failed: int | None = None

    def again(self, plan: PrivacyPlan, keys: Derive, begun_after: int = 0) -> PrivatePhase:
        """The same model in the same engine, under another plan or other keys; this phase still owns the engine."""
        other = copy.copy(self)
        other._at_end = ExitStack()
        other._under(plan, keys, begun_after)
        return other

    def prove(self, synthetic: SyntheticRecords) -> SelfTestReport:
        """The self-test. It comes before anything else touches the engine."""
        return self.core.prove(synthetic, self._settings.ranks_per_copy, self._settings.micro_batch)

    def notes(self, run_key: bytes) -> list[str]:
        """For the owner: what is kept out of swap and core dumps, and how micro-batches are computed. A failure ends
        nothing: the limit on locked memory is the administrator's."""
        key, dumps, totals = keep_from_swap(run_key), forbid_dumps(), self.forward.kept_from_swap
        advice = " (raise the limit: ulimit -l unlimited; or encrypt the swap, or switch it off)"
        told = [
            f"core dumps of this process are {'impossible' if dumps else 'left to RLIMIT_CORE = 0'}; in memory that is "
            f"never swapped: the run key {'yes' if key else 'no'}, the totals {'yes' if totals else 'no'}"
            + ("" if key and totals else advice)
        ]
        if self.ranks.device.type == "cuda":
            told.append(self.forward.about_graph())
        if isinstance(self.clip, BookKeepingClip) and self.clip.blocks is not None:
            told.append(self.clip.blocks.about())
        return told

    def feed(self, reader: Reader, share: Callable[[np.ndarray], np.ndarray] | None = None) -> Loader[Draw]:
        """Reads the records of each draw ahead; all ranks call this together. `share`: which of a draw's records this
        rank computes, where not every rank can read all of them."""
        sampler, ranks = self.core.sampler(), self.ranks
        if ranks.world > 1 and self.plan.records >= SHARED_FROM:  # the same draws, of which each rank draws a part
            sampler = SharedSampler(sampler, ranks.rank, ranks.world, ranks.gather_apart())
        if self.plan.held_out:
            from murmuration.data.batch.held_out import HeldOutReader  # few plans hold records out

            reader = HeldOutReader(reader, self.plan.held_out)
        self.loader = Loader(
            reader, sampler, ranks.rank, ranks.world, self._settings.micro_batch,
            last=self.plan.steps, plan=share, device=ranks.device,
        )  # fmt: skip
        self._at_end.callback(self.loader.close)
        return self.loader

    def begin(
        self, journal: StepLedger | None, stop: StopRequest, records: Records[Draw] | None = None, *,
        mixing: Engine | None = None, first_norm: float | None = None, noise: Noise | None = None,
        around_step: Callable[[Make], Make] | None = None, after: Callable[[int], None] | None = None,
    ) -> PrivateStep:  # fmt: skip
        """Puts the step together. `records`: where they come from instead of what was fed. `mixing`: the engine with
        what is mixed into its updates. `first_norm`: C of the next step, where C adapts. `noise`, `around_step`: an
        audit's own. `after`: what belongs to a step before its weights may be seen."""
        if records is None:
            assert self.loader is not None, "feed() comes first"
            records = Records(self.loader.draw, until_unreadable(self.loader.micro_batches, stop))
        self._at_end.callback(self.core.close)
        self.made = self.core.step(
            self.number, journal, records, stop, stepping=mixing, first_norm=first_norm, noise=noise,
            probes=None if self.rate is None else self.rate.probes,
        )  # fmt: skip
        make = self.made.run if around_step is None else around_step(self.made.run)
        self._make, self._after = make if self.rate is None else probed(make, self.rate), after
        return self.made

    @property
    def rule(self) -> ClipRule:
        """That of the next step."""
        return next_rule(self.clip, None if self.made is None else self.made.norm)

    def drawn(self, number: int) -> np.ndarray:
        """PRIVATE: the records of a step."""
        assert self.made is not None, "begin() comes first"
        return self.made.records.draw(number).ids

    def step(self, number: int, learning_rate: float) -> StepSummary:
        """One private step. What it returns is PRIVATE: losses and norms of the drawn records, without noise.

        Whatever ends a step in its middle, its clipped sum is dropped. Unless nothing can have reached the weights, no
        other step is made: its noise would be added to a second gradient.
        """
        if self._make is None:
            raise SelfTestError("no step is taken before prove() has passed; call it first")
        self.require_whole()
        self._failed = number  # until the step is whole: an error of any kind, anywhere in it, leaves this set
        try:
            summary = self._make(number, learning_rate)
            if self._after is not None:
                self._after(number)
        except (Stopped, BudgetSpent):  # raised before any weight moves, so the same step may be made again
            self.engine.discard()
            self._failed = None
            raise
        except BaseException:
            with suppress(Exception):  # what ended the step must be seen
                self.engine.discard()
            raise
        self._failed = None
        return summary

    def require_whole(self) -> None:
        """Refused after a step that ended in its middle."""
        if self._failed is not None:
            raise LedgerError(
                f"step {self._failed} failed, and its noise must not be used again; close this training and open it "
                "anew: it continues from its last checkpoint, under new keys"
            )

    def saving(
        self, run: OpenRun, header: Callable[[], dict[str, Any]], list_unusable: Callable[[], None],
        require: Callable[[], None] = lambda: None,
    ) -> Saving:  # fmt: skip
        """What saves this phase. `header`: what a manifest says of the run, on the main rank. `list_unusable`: lists
        the unusable records that this rank has met, for the owner. `require`: refuses to save."""

        def whole() -> None:
            self.require_whole()
            require()

        def manifest() -> dict[str, Any]:
            return header() | ({} if self.rate is None else self.rate.state())

        copies = self._settings.ranks_per_copy
        return Saving(run, self.number, self.engine, copies, manifest, list_unusable, whole)

    def close(self) -> None:
        self._at_end.close()

    def __enter__(self) -> PrivatePhase:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def probed(make: Make, rate: ProbedRate) -> Make:
    """Makes steps whose learning rate follows probes of the loss (`privacy.loss_probes`)."""

    def made(step: int, learning_rate: float) -> StepSummary:
        """`learning_rate`: the schedule's."""
        followed = learning_rate * rate.factor
        summary = make(step, followed)
        summary.released = rate.advance(step, followed, summary.released)
        return summary

    return made


def until_unreadable(micro_batches: MicroBatches, stop: StopRequest) -> MicroBatches:
    """The same micro-batches, but one that cannot be read is replaced by an empty one and a request to stop.

    Steps look for such requests before they use a micro-batch. So all ranks leave the open step and the run is saved;
    otherwise they would wait for the rank that failed.
    """

    def guarded(ids: np.ndarray, step: int) -> Iterator[MicroBatch]:
        try:
            yield from micro_batches(ids, step)
        except UnreadableError as error:
            stop.ask(f"records that cannot be read: {error}")
            yield MicroBatch({}, torch.zeros(0, dtype=torch.bool))

    return guarded
