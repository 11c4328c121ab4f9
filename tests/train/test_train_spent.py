"""The epsilon of log lines: computed ahead, and never another number than the ledger's own."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from murmuration.accounting.epsilon import accountant
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.train.run import spent as module
from murmuration.train.run.spent import Spent
from tests.support.acc_world import PLAN, begin, facts, train

EVERY = 5
# Sampled, so that composing takes the accountant and not a closed form.
SAMPLED = replace(PLAN, threshold=2**28, noise_multiplier=1.0, epsilon_budget=50.0)


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    accountant._pld_epsilon.cache_clear()


def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The thread and the number of steps of each computation."""
    seen: list[tuple[str, int]] = []
    own = accountant._pld_epsilon

    def watched(events: tuple[accountant.Event, ...], delta: float) -> float:
        seen.append((threading.current_thread().name, sum(event.count for event in events)))
        return own(events, delta)

    monkeypatch.setattr(accountant, "_pld_epsilon", watched)
    return seen


def test_a_log_line_finds_its_epsilon_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = begin(tmp_path, SAMPLED)
    train(journal, range(1, 1 + EVERY), SAMPLED)  # the ledger computes what the first steps may spend
    seen, spent = computed(monkeypatch), Spent(lambda: journal.history, EVERY)
    found = [spent()]
    for first in range(1 + EVERY, 4 * EVERY, EVERY):
        train(journal, range(first, first + EVERY), SAMPLED)
        found.append(spent())
    main = threading.current_thread().name
    assert [steps for thread, steps in seen if thread == main] == [EVERY], "only before the first line"
    assert [steps for thread, steps in seen if thread != main][:3] == [2 * EVERY, 3 * EVERY, 4 * EVERY]
    monkeypatch.undo()
    events = [accountant.Event(SAMPLED.sampling_rate, 1.0, count) for count in range(EVERY, 4 * EVERY + 1, EVERY)]
    assert found == [accountant.epsilon([event], SAMPLED.delta) for event in events]


def test_what_was_not_foreseen_is_computed_anew(tmp_path: Path) -> None:
    """A last line sooner than the others, a step with less noise, a new segment."""
    journal = begin(tmp_path, PLAN)
    spent = Spent(lambda: journal.history, EVERY)
    assert spent() == 0.0, "nothing was opened"
    train(journal, range(1, 4))
    assert spent() == journal.history.epsilon()
    train(journal, range(4, 6))
    assert spent() == journal.history.epsilon()
    train(journal, range(6, 5 + EVERY))
    journal.open_step(0, 5 + EVERY, facts(5 + EVERY))
    with pytest.raises(LedgerError, match="had announced"):
        journal.commit_step(0, 5 + EVERY, facts(5 + EVERY, std=PLAN.noise_std / 2))
    foreseen = accountant.epsilon([accountant.Event(1.0, PLAN.noise_multiplier, 5 + EVERY)], PLAN.delta)
    assert spent() == journal.history.epsilon() > foreseen


def test_a_fault_in_the_thread_is_that_of_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = begin(tmp_path, PLAN)
    spent = Spent(lambda: journal.history, 1)

    def broken(events: object, delta: float) -> float:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(module, "epsilon", broken)
        train(journal, range(1, 2))
        spent()
        train(journal, range(2, 3))
        assert spent() == journal.history.epsilon()


def test_charges_follow_what_was_done_after_they_were_asked_for(tmp_path: Path) -> None:
    """They are remembered, but only for the facts that they follow from."""
    journal = begin(tmp_path, PLAN)
    journal.open_step(0, 1, facts(1))
    assert journal.history.charged() == [accountant.Event(1.0, PLAN.noise_multiplier, 1)]
    with pytest.raises(LedgerError, match="had announced"):
        journal.commit_step(0, 1, facts(1, std=PLAN.noise_std / 2))
    assert journal.history.charged() == [accountant.Event(1.0, PLAN.noise_multiplier / 2, 1)]
    assert journal.history.last_charge() == accountant.Event(1.0, PLAN.noise_multiplier / 2, 1)
