"""The loop: what is told, saved and measured, and in which order."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmuration.accounting.epsilon import accountant
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import BudgetSpent, LedgerError
from murmuration.accounting.sampling import Poisson
from murmuration.train.distributed.stop import Stopped
from murmuration.train.public.monitor import MonitorReading
from murmuration.train.run import trainer as module
from murmuration.train.run.public_mixing import PublicRecords
from murmuration.train.run.trainer import Spent, Trainer
from murmuration.train.step import StepSummary
from murmuration.train.storage.saving import Saving
from tests.support.acc_world import PLAN, begin, facts, train
from tests.support.train_helpers import alone


class Loop:
    """A trainer whose parts do nothing but write down what is asked of them."""

    def __init__(self, stop: Exception | None = None, ends_after: int = 99, lag: int = 1) -> None:
        self.said: list[Any] = []
        self.at, self.stop, self.ends_after = 0, stop, ends_after
        run: Any = SimpleNamespace(
            ranks=alone(), checkpoints=SimpleNamespace(begin=self.begin, settle=self.settle), forget=lambda done: None,
            writer=SimpleNamespace(checkpointed=lambda phase, *told: self.said.append(("ledger", *told))),
        )  # fmt: skip
        parts: Any = {
            "name": "private", "steps": 5, "rates": lambda step: 0.5, "make": self.one,
            "saving": Saving(run, 0, None, True, dict),  # pyright: ignore
            "board": SimpleNamespace(
                public=self.public, measured=lambda phase, step, values, unusable: self.said.append((step, values)),
                signals=lambda name, step, layers: self.said.append(("signals", step, layers)),
                private=lambda *_: None, keeps_private=True, say=lambda text: None, progress=lambda *_: None,
            ),
            "pace": SimpleNamespace(tick=dict, rate=lambda: None, line=lambda *_: ""),
            "ending": SimpleNamespace(reason=self.reason, measured=lambda *given: self.said.append(("ending", *given))),
        }  # fmt: skip
        self.evaluator: Any = SimpleNamespace(measure=self.measure, signals={}, news_of_unusable=lambda: None)
        monitor: Any = SimpleNamespace(measure=lambda: MonitorReading({"monitored": float(self.at)}, []))
        named: Any = SimpleNamespace(name="private")
        watching = PublicRecords(named, parts["board"], self.evaluator, monitor)
        self.trainer = Trainer(ranks=alone(), watching=watching, every=2, lag=lag, log_every=99, **parts)

    def one(self, step: int, rate: float) -> StepSummary:
        if self.stop is not None and step == 4:
            raise self.stop
        self.at = step
        self.said.append(("step", step))
        return StepSummary(released={"noised_loss": float(step)})

    def measure(self) -> dict[str, float]:
        self.evaluator.signals = {"block": float(self.at)}
        return {"public_loss": float(self.at)}

    def begin(self, position: Any, *rest: Any) -> None:
        self.said.append(("copy", position.step))

    def settle(self, mark: Any, public: dict[str, float]) -> None:
        self.said.append(("durable", public))
        mark("digest")

    def public(self, phase: str, step: int, values: dict[str, float]) -> None:
        self.said.append((step, values))

    def reason(self) -> str | None:
        return "asked" if self.at == self.ends_after else None


def told(step: int, released: tuple[int, ...] = (), measured: bool = True) -> list[Any]:
    """A checkpoint is settled: durable, named by the ledger, and only then whatever depends on its weights."""
    values = {"public_loss": float(step)} if measured else {}
    found = [("durable", values), ("ledger", step, "digest")]
    found += [(earlier, {"noised_loss": float(earlier)}) for earlier in released]
    found += [("ending", step, values)]
    if not measured:
        return found
    return [*found, (step, values), ("signals", step, {"block": float(step)}), (step, {"monitored": float(step)})]


def test_nothing_that_depends_on_weights_leaves_before_they_are_durable() -> None:
    loop = Loop()
    loop.trainer.run(0)
    assert loop.said == [
        ("copy", 0), *told(0), ("step", 1), ("step", 2), ("copy", 2), ("step", 3), *told(2, (1, 2)), ("step", 4),
        ("copy", 4), ("step", 5), (5, {"lr": 0.5}), *told(4, (3, 4)), ("copy", 5), *told(5, (5,)),
    ]  # fmt: skip


@pytest.mark.parametrize(("stop", "measured"), [(Stopped("told"), False), (BudgetSpent("spent"), True)])
def test_where_a_step_is_not_made_what_came_before_is_saved(stop: Exception, measured: bool) -> None:
    loop = Loop(stop=stop, lag=9)
    with pytest.raises(type(stop)):
        loop.trainer.run(0)
    assert loop.said == [
        ("copy", 0), *told(0), ("step", 1), ("step", 2), ("copy", 2), ("step", 3),
        *told(2, (1, 2)), ("copy", 3), *told(3, (3,), measured),
    ]  # fmt: skip


def test_a_phase_that_ends_early_saves_and_measures_its_last_step() -> None:
    loop = Loop(ends_after=3)
    loop.trainer.run(0)
    assert ("step", 4) not in loop.said and loop.said[-8:] == [("copy", 3), *told(3, (3,))]


# The epsilon of log lines: computed ahead, and never another number than the ledger's own.


EVERY = 5
# Sampled, so that composing takes the accountant and not a closed form.
SAMPLED = replace(PLAN, sampling=Poisson(2**28), noise_multiplier=1.0, epsilon_budget=50.0)


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    accountant._pld_epsilon.cache_clear()


def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The thread and the number of steps of each computation."""
    seen: list[tuple[str, int]] = []
    own = accountant._pld_epsilon

    def watched(events: tuple[Event, ...], delta: float) -> float:
        seen.append((threading.current_thread().name, sum(event.count for event in events)))
        return own(events, delta)

    monkeypatch.setattr(accountant, "_pld_epsilon", watched)
    return seen


def test_a_log_line_finds_its_epsilon_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = begin(tmp_path, SAMPLED)
    train(journal, range(1, 1 + EVERY), SAMPLED)  # the ledger computes what the first steps may spend
    seen, spent = computed(monkeypatch), Spent(lambda: journal.history, EVERY)
    end = 4 * EVERY - 1
    found = [spent(end - EVERY)]
    for first in range(1 + EVERY, end, EVERY):
        last = min(first + EVERY - 1, end)
        train(journal, range(first, last + 1), SAMPLED)
        found.append(spent(end - last))
    main = threading.current_thread().name
    assert [steps for thread, steps in seen if thread == main] == [EVERY], "only before the first line"
    assert [steps for thread, steps in seen if thread != main] == [2 * EVERY, 3 * EVERY, end], (
        "no line follows the last"
    )
    monkeypatch.undo()
    events = [Event(SAMPLED.sampling_rate, 1.0, count) for count in (EVERY, 2 * EVERY, 3 * EVERY, end)]
    assert found == [accountant.epsilon([event], SAMPLED.delta) for event in events]


LEFT = 100


def test_a_log_line_compares_what_all_phases_spent_with_all_that_they_may(tmp_path: Path) -> None:
    """A second phase with a budget of 2 told of "3.014 of 2"."""
    journal = begin(tmp_path, replace(PLAN, epsilon_budget=3.0))
    spent = Spent(lambda: journal.history, EVERY)
    assert spent.budget == 3.0
    journal.declare_plan(1, "second", replace(PLAN, epsilon_budget=2.0), describe("pld"))
    assert spent.budget == 5.0


def test_what_was_not_foreseen_is_computed_anew(tmp_path: Path) -> None:
    """A line sooner than the others, a step with less noise, a new segment."""
    journal = begin(tmp_path, PLAN)
    spent = Spent(lambda: journal.history, EVERY)
    assert spent(LEFT) == 0.0, "nothing was opened"
    train(journal, range(1, 4))
    assert spent(LEFT) == journal.history.epsilon()
    train(journal, range(4, 6))
    assert spent(LEFT) == journal.history.epsilon()
    train(journal, range(6, 5 + EVERY))
    journal.open_step(0, 5 + EVERY, facts(5 + EVERY))
    with pytest.raises(LedgerError, match="had announced"):
        journal.commit_step(0, 5 + EVERY, facts(5 + EVERY, std=PLAN.noise_std / 2))
    foreseen = accountant.epsilon([Event(1.0, PLAN.noise_multiplier, 5 + EVERY)], PLAN.delta)
    assert spent(LEFT) == journal.history.epsilon() > foreseen


def test_a_fault_in_the_thread_is_that_of_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = begin(tmp_path, PLAN)
    spent = Spent(lambda: journal.history, 1)

    def broken(events: object, delta: float) -> float:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(module, "epsilon", broken)
        train(journal, range(1, 2))
        spent(LEFT)
        train(journal, range(2, 3))
        assert spent(LEFT) == journal.history.epsilon()
