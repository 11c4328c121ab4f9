"""The loop: steps of one phase, in the order commit -> checkpoint -> public measurements.

A checkpoint is written while training goes on for a fixed number of steps: fixed, because how many steps a write takes
would tell of the sizes of their batches. What was measured with its weights is told once it is durable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from accounting.journal import BudgetSpent
from train.board import Board, Pace
from train.checkpoint import Checkpoints, Position
from train.engine import ShardedEngine
from train.monitor import LossMonitor, Reading
from train.observed import Observed
from train.public_eval import PublicEvaluator
from train.ranks import Ranks
from train.stop import Stopped
from train.stop_rules import Ending


class Step(Protocol):
    def run(self, step: int, learning_rate: float) -> Observed: ...


@dataclass
class Trainer:
    """Everything that one phase needs, already built; `run` does nothing but the loop."""

    number: int
    name: str
    steps: int
    step: Step
    engine: ShardedEngine
    learning_rate: Callable[[int], float]
    ranks: Ranks
    board: Board
    pace: Pace
    checkpoints: Checkpoints
    checkpoint_every: int
    checkpoint_lag: int
    log_every: int
    replicated: bool
    evaluator: PublicEvaluator | None
    monitor: LossMonitor | None
    clip_bound: float | None
    header: Callable[[], dict[str, Any]]
    checkpointed: Callable[[int, str], None]
    spent: Callable[[], float | None]
    budget: float | None
    public_records: bool
    ending: Ending
    held_back: dict[int, dict[str, float]] = field(default_factory=dict)
    """Noised metrics of steps whose weights are not durable yet: a replay after a change must not release twice."""
    saving: int | None = None
    """The step whose weights are being written, and what was measured with them."""
    measured: dict[str, float] = field(default_factory=dict)
    watched: Reading | None = None

    def run(self, done: int) -> None:
        """Trains from `done` steps to the end; on a stop request saves what is complete and raises Stopped."""
        self._begin(done)
        self._settle()
        self.pace.tick()
        for step in range(done + 1, self.steps + 1):
            if (why := self.ending.reason()) is not None:
                self.board.say(f"{self.name}  ends after step {step - 1} of {self.steps}: {why}")
                self._begin(step - 1)
                break
            rate = self.learning_rate(step)
            try:
                observed = self.step.run(step, rate)
            except (Stopped, BudgetSpent) as reason:
                self.engine.discard()
                self._begin(step - 1, measure=isinstance(reason, BudgetSpent))
                self._settle()
                raise
            self.pace.tick()
            summary = observed.over_ranks(self.ranks, self.clip_bound)
            (self.board.public if self.public_records else self.board.private)(self.name, step, summary)
            if observed.released:
                self.held_back[step] = observed.released
            if step % self.log_every == 0 or step == self.steps:
                self._progress(step, rate)
            if step % self.checkpoint_every == 0 or step == self.steps:
                self._begin(step)
            if self.saving is not None and step - self.saving >= self.checkpoint_lag:
                self._settle()
        self._settle()

    def _progress(self, step: int, rate: float) -> None:
        """Nothing here depends on the weights or on a single step's data: it may be shown before a checkpoint."""
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
        self.board.say(f"{line}  {self.pace.line(step, self.steps)}")

    def _begin(self, step: int, measure: bool = True) -> None:
        """Copies the weights for writing, and measures them; nothing of it may leave yet."""
        self._settle()
        header = self.ranks.on_main(self.header)
        self.checkpoints.begin(Position(self.number, step), self.engine, self.replicated, header)
        self.saving = step
        self.measured = self.evaluator.measure() if self.evaluator is not None and measure else {}
        self.watched = self.monitor.measure() if self.monitor is not None and measure else None

    def _settle(self) -> None:
        """Durable first; only then may anything computed from these weights leave the job."""
        step, self.saving = self.saving, None
        if step is None:
            return
        self.checkpoints.settle(lambda digest: self.checkpointed(step, digest), self.measured)
        for earlier in [each for each in self.held_back if each <= step]:
            self.board.public(self.name, earlier, self.held_back.pop(earlier))
        self.ending.measured(step, self.measured)
        if self.measured:
            self.board.public(self.name, step, self.measured)
            shown = "  ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in self.measured.items())
            self.board.say(f"{self.name}  checkpoint at step {step}  {shown}")
        if self.watched is not None:
            self.board.public(self.name, step, self.watched.values)
            for text in self.watched.lines:
                self.board.say(f"{self.name}  {text}")
