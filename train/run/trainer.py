"""The loop: steps of one phase, in the order commit -> checkpoint -> public measurements.

A checkpoint is written while training continues for a fixed number of steps: fixed, because how many steps a write
takes would reveal something about their batch sizes. What was measured with its weights is published once it is
durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from murmuration.accounting.ledger.journal import BudgetSpent
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.stop import Stopped
from murmuration.train.engines.base import Engine
from murmuration.train.optim.schedule import learning_rate
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.public.monitor import LossMonitor, MonitorReading
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.board import WAITING, Board, Pace
from murmuration.train.run.early_end import Ending
from murmuration.train.step import StepSummary
from murmuration.train.storage.saving import Saving


class Step(Protocol):
    def run(self, step: int, learning_rate: float) -> StepSummary: ...


@dataclass(frozen=True)
class Watching:
    """What is measured on public records with the weights of a checkpoint."""

    evaluator: PublicEvaluator | None
    monitor: LossMonitor | None


class Trainer:
    """Everything that one phase needs is built already; `run` is only the loop."""

    def __init__(
        self, phase: ReadyPhase, step: Step, engine: Engine, ranks: Ranks, board: Board, pace: Pace,
        saving: Saving, watching: Watching, ending: Ending, *, every: int, lag: int, log_every: int,
        clip_bound: float | None, budget: float | None, spent: Callable[[], float | None],
    ) -> None:  # fmt: skip
        """`every`: steps between checkpoints. `lag`: how many more are made before the loop waits for one that is being
        written."""
        self.phase, self.name, self.steps = phase, phase.name, phase.settings.steps
        self.step, self.engine, self.ranks, self.board, self.pace = step, engine, ranks, board, pace
        self.saving, self.watching, self.ending = saving, watching, ending
        self.every, self.lag = every, lag
        self.log_every, self.clip_bound, self.budget, self.spent = log_every, clip_bound, budget, spent
        self.held_back: dict[int, dict[str, float]] = {}
        """Noised metrics of steps whose weights are not durable yet: a replay after a change must not release twice."""
        self.measured: dict[str, float] = {}
        """What was measured with these weights."""
        self.signals: dict[str, float] = {}
        self.unusable: str | None = None
        self.monitored: MonitorReading | None = None

    def run(self, done: int) -> None:
        """Trains from `done` steps to the end; on a stop request saves what is complete and raises Stopped."""
        for _ in self.pausing(done):
            pass

    def pausing(self, done: int) -> Iterator[int]:
        """The same, with a pause before each step, so that an audit can keep another run in step with this one."""
        self._begin(done)
        self._settle()
        self.pace.tick()
        self.ranks.pulse.preparing = False
        for step in range(done + 1, self.steps + 1):
            if (why := self.ending.reason()) is not None:
                self.board.say(f"{self.name}  ends after step {step - 1} of {self.steps}: {why}")
                self._begin(step - 1)
                break
            yield step
            rate = learning_rate(self.phase.settings.schedule, self.steps, step)
            try:
                observed = self.step.run(step, rate)
            except (Stopped, BudgetSpent) as reason:
                self.engine.discard()
                self._begin(step - 1, measure=isinstance(reason, BudgetSpent))
                self._settle()
                raise
            self._tell(step, observed)
            if observed.released:
                self.held_back[step] = observed.released
            if step % self.log_every == 0 or step == self.steps:
                self._progress(step, rate)
            if step % self.every == 0 or step == self.steps:
                self._begin(step)
            if self.saving.writing is not None and step - self.saving.writing >= self.lag:
                self._settle()
        self._settle()

    def _tell(self, step: int, observed: StepSummary) -> None:
        """Writes what was observed on the step's own records to the board where it belongs."""
        timed, public = self.pace.tick(), self.phase.settings.data.public
        if public or self.board.keeps_private:
            summary = observed.over_ranks(self.ranks, self.clip_bound)
            if WAITING in timed and self.board.keeps_private:  # a step is as slow as the rank that waits longest
                timed[WAITING] = max(self.ranks.gather(timed[WAITING]))
            if public:
                self.board.public(self.name, step, summary)
                self.board.private(self.name, step, timed)
            else:
                self.board.private(self.name, step, summary | timed)

    def _progress(self, step: int, rate: float) -> None:
        """Nothing here depends on the weights or on a single step's data, so it may be shown before a checkpoint."""
        values: dict[str, float] = {"lr": rate}
        line = f"{self.name}  step {step}/{self.steps}  lr {rate:.2e}"
        epsilon = self.ranks.on_main(self.spent)
        if epsilon is not None and self.budget is not None:
            values["epsilon"] = epsilon
            line += f"  ε {epsilon:.3f} of {self.budget:g}"
        known = self.pace.rate()
        if known is not None:
            values["samples_per_second"] = known[0]
        self.board.public(self.name, step, values)
        self.board.progress(f"{line}  {self.pace.line(step, self.steps)}", step, self.steps)

    def _begin(self, step: int, measure: bool = True) -> None:
        """Copies the weights for writing, and measures them; none of the results may leave the job yet."""
        self._settle()
        self.saving.begin(step)
        evaluator, monitor = self.watching.evaluator, self.watching.monitor
        self.measured = evaluator.measure() if evaluator is not None and measure else {}
        self.signals = evaluator.signals if evaluator is not None and measure else {}
        self.unusable = evaluator.news_of_unusable() if evaluator is not None else None
        self.monitored = monitor.measure() if monitor is not None and measure else None

    def _settle(self) -> None:
        """Durable first; only then may anything computed from these weights leave the job."""
        if (step := self.saving.writing) is None:
            return
        self.saving.settle(self.measured)
        for earlier in [each for each in self.held_back if each <= step]:
            self.board.public(self.name, earlier, self.held_back.pop(earlier))
        self.ending.measured(step, self.measured)
        if self.measured:
            self.board.measured(self.phase.settings, step, self.measured, self.unusable)
            self.board.signals(self.name, step, self.signals)
        if self.monitored is not None:
            self.board.public(self.name, step, self.monitored.values)
            for text in self.monitored.lines:
                self.board.say(f"{self.name}  {text}")
