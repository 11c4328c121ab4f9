"""The loop of recipes and of the library: steps of one phase, in the order commit -> checkpoint -> public measurements.

A checkpoint may be written while training continues, for a fixed number of steps: fixed, because how many steps a write
takes would reveal something about their batch sizes. What was measured with its weights is published once it is
durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from murmuration.accounting.epsilon.accountant import epsilon, merge, round_up
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import BudgetSpent
from murmuration.accounting.ledger.history import History
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.distributed.stop import Stopped
from murmuration.train.run.board import WAITING, Board, Pace
from murmuration.train.step import Make, StepSummary
from murmuration.train.storage.saving import Saving


class Watching(Protocol):
    """What is measured on public records with the weights of a checkpoint, and shown once that is durable."""

    def measure(self) -> dict[str, float]: ...

    def publish(self, step: int) -> None: ...


class Ending(Protocol):
    """What ends a phase before its last step; equal on all ranks."""

    def reason(self) -> str | None: ...

    def measured(self, step: int, values: Mapping[str, float]) -> None: ...


class Trainer:
    """Everything that one phase needs is built already; this is only the loop."""

    def __init__(
        self, name: str, steps: int, rates: Callable[[int], float], make: Make, ranks: Ranks, board: Board, pace: Pace,
        saving: Saving, watching: Watching | None = None, ending: Ending | None = None, *, every: int, lag: int = 0,
        log_every: int, clip_bound: float | None = None, public: bool = False, spent: Spent | None = None,
    ) -> None:  # fmt: skip
        """`rates`: the schedule's. `every`: steps between checkpoints. `lag`: how many more are made before the loop
        waits for one that is being written. `public`: whether the phase's own records are."""
        self.name, self.steps, self.rates, self.make = name, steps, rates, make
        self.ranks, self.board, self.pace = ranks, board, pace
        self.saving, self.watching, self.ending = saving, watching, ending
        self.every, self.lag, self.log_every = every, lag, log_every
        self.clip_bound, self.records_are_public, self.spent = clip_bound, public, spent
        self.held_back: dict[int, dict[str, float]] = {}
        """Noised metrics of steps whose weights are not durable yet: a replay after a change must not release twice."""
        self.measured: dict[str, float] = {}
        """What was measured with these weights."""

    def run(self, done: int) -> None:
        """Trains from `done` steps to the end; on a stop request saves what is complete and raises Stopped."""
        self.save(done)
        for _ in self.steps_after(done):
            pass

    def steps_after(self, done: int) -> Iterator[int]:
        """Makes the steps that are left; gives the number of each."""
        self.pace.tick()
        self.ranks.pulse.preparing = False
        for step in range(done + 1, self.steps + 1):
            if self.ending is not None and (why := self.ending.reason()) is not None:
                self.board.say(f"{self.name}  ends after step {step - 1} of {self.steps}: {why}")
                self.save(step - 1)
                return
            rate = self.rates(step)
            try:
                observed = self.make(step, rate)
            except (Stopped, BudgetSpent) as reason:
                # The open step was dropped, and nothing of it may be saved: the weights are those of the one before.
                self.save(step - 1, measure=isinstance(reason, BudgetSpent))
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
            yield step
        self._settle()

    def save(self, step: int, measure: bool = True) -> str:
        """A checkpoint of the last step, durable and told when this returns its digest."""
        self._begin(step, measure)
        return self._settle()

    def _tell(self, step: int, observed: StepSummary) -> None:
        """Writes what was observed on the step's own records to the board where it belongs."""
        timed, public = self.pace.tick(), self.records_are_public
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
        if self.spent is not None:
            spent, left = self.spent, self.steps - step
            values["epsilon"] = self.ranks.on_main(lambda: spent(left))
            line += f"  ε {round_up(values['epsilon'], 3):.3f} of {self.spent.budget:g}"
        known = self.pace.rate()
        if known is not None:
            values["samples_per_second"] = known[0]
        self.board.public(self.name, step, values)
        self.board.progress(f"{line}  {self.pace.line(step, self.steps)}", step, self.steps)

    def _begin(self, step: int, measure: bool = True) -> None:
        """Copies the weights for writing, and measures them; none of the results may leave the job yet."""
        self._settle()
        self.saving.begin(step)
        self.measured = self.watching.measure() if self.watching is not None and measure else {}

    def _settle(self) -> str:
        """Durable first; only then may anything computed from these weights leave the job."""
        if (step := self.saving.writing) is None:
            return ""
        digest = self.saving.settle(self.measured)
        for earlier in [each for each in self.held_back if each <= step]:
            self.board.public(self.name, earlier, self.held_back.pop(earlier))
        if self.ending is not None:
            self.ending.measured(step, self.measured)
        if self.watching is not None:
            self.watching.publish(step)
        return digest


class Spent:
    """The epsilon of a log line: of every step opened so far, without letting the ranks wait for it.

    Composing tens of thousands of steps takes a second or two, in which no rank trains. So the epsilon of the next log
    line is computed in a thread while the steps up to it run, on the assumption that each is charged like the last one.
    Where that turns out wrong, it is computed when it is asked for. Called on the main rank, which holds the ledger.
    """

    def __init__(self, history: Callable[[], History], budget: float, every: int) -> None:
        """`budget`: of the phases so far, like what is spent. `every`: how many steps lie between two log lines."""
        self._history, self.budget, self._every = history, budget, every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="epsilon")
        self._ahead: tuple[list[Event], Future[float]] | None = None

    def __call__(self, left: int) -> float:
        """`left`: how many steps are still to come."""
        history = self._history()
        charged = history.charged()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == charged and ahead[1].exception() is None:
            found = ahead[1].result()
        else:
            found = history.epsilon()
        if (last := history.last_charge()) is not None:
            until_next = history.charges_of_next(min(self._every, left))
            expected = merge([*charged, replace(last, count=until_next)])
            self._ahead = (expected, self._thread.submit(epsilon, expected, history.delta()))
        return found
