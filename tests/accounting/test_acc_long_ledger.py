"""A ledger of many steps: what a process keeps of it is bounded, and every reader asks for one line at a time."""

from __future__ import annotations

import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.ledger import chain
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from tests.support.acc_world import PLAN, begin, certified, facts, reopen, train

STEPS = 600


def kept_by(act: Callable[[], object]) -> int:
    """Bytes that are still in use when it has returned, with what it returned."""
    tracemalloc.start()
    try:
        before, kept = tracemalloc.get_traced_memory()[0], act()
        assert kept is not None
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def long(folder: Path, steps: int, saved: bool = True) -> Journal:
    plan = replace(PLAN, steps=4 * STEPS, epsilon_budget=50.0)
    journal = begin(folder, plan)
    for first in range(1, steps, 50):
        train(journal, range(first, first + 50), plan)
        if saved:
            journal.checkpointed(0, first + 49, f"digest-{first}")
    return journal


@pytest.mark.parametrize("saved", [True, False])
def test_a_step_leaves_a_few_bytes_in_memory(tmp_path: Path, saved: bool) -> None:
    """Whoever writes a ledger, goes on with one or reads one: 8.6 kB a step were 8.6 GB for a million. Without a
    checkpoint all steps may be replayed, and are still kept in the file alone."""
    long(tmp_path / "first", 50, saved)  # what stays of the first one whatever its length is no part of the difference

    def per_step(place: Path) -> list[float]:
        short, whole = place / "short", place / "whole"
        written = [kept_by(lambda folder=folder, steps=steps: long(folder, steps, saved)) for folder, steps in (
            (short, STEPS), (whole, 3 * STEPS))]  # fmt: skip
        opened = [kept_by(lambda folder=folder: reopen_apart(folder)) for folder in (short, whole)]
        found = [kept_by(lambda folder=folder: History.read(folder / "ledger.jsonl")) for folder in (short, whole)]
        return [(more - less) / (2 * STEPS) for less, more in (written, opened, found)]

    # What a thread of an earlier test keeps meanwhile is counted, too, but not again each time.
    found = list[list[float]]()
    while len(found) < 3 and (not found or max(found[-1]) >= 120):
        found.append(per_step(tmp_path / str(len(found))))
    assert max(found[-1]) < 120, found


def reopen_apart(folder: Path) -> Journal:
    """A copy, since the file itself is still locked."""
    copy = folder / "copy"
    copy.mkdir()
    (copy / "ledger.jsonl").write_bytes((folder / "ledger.jsonl").read_bytes())
    return reopen(copy)


def test_what_is_kept_of_a_ledger_answers_as_the_whole_one(tmp_path: Path) -> None:
    journal = long(tmp_path, 100)
    entries, raw = journal.ledger.entries, (tmp_path / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    assert len(entries) == len(raw) and [entry.line for entry in entries] == raw
    assert [entries[place].line for place in (0, 7, -1)] == [raw[0], raw[7], raw[-1]]
    assert [entry.line for entry in entries.beginning(5)] == raw[5:] and not list(entries.beginning(len(raw)))
    with pytest.raises(IndexError):
        entries[len(raw)]
    assert journal.ledger.head == entries[-1].hash
    assert [entry.kind for entry in entries.acts] == ["run", "plan", "segment", "checkpoint", "checkpoint"]
    assert History.of(entries) == journal.history


def test_what_a_checkpoint_holds_is_never_replayed(tmp_path: Path) -> None:
    plan = replace(PLAN, steps=4)
    journal = begin(tmp_path, plan)
    train(journal, range(1, 3), plan)
    journal.checkpointed(0, 1, "digest")
    journal.open_step(0, 2, facts(2, plan))  # behind it: a replay, which writes nothing
    with pytest.raises(chain.LedgerError, match="was opened before"):
        journal.open_step(0, 1, facts(1, plan))
    with pytest.raises(chain.LedgerError, match="before it is opened"):
        journal.commit_step(0, 1, facts(1, plan))
    assert journal.history.steps() == (2, 2)


def test_lines_are_encoded_once_and_charges_counted_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification was 1,440 processor seconds for 72,000 steps where every question added up all of them. To read a
    step that differs from the one before in digests and counts alone, nothing is encoded."""
    encoded, charged = [0], [0]
    encode, event = chain._canonical, History._event
    monkeypatch.setattr(chain, "_canonical", lambda value: (encoded.__setitem__(0, encoded[0] + 1), encode(value))[1])
    journal = long(tmp_path, 100)
    journal.finish()
    assert encoded[0] == journal.ledger.length
    certified(journal)
    encoded[0] = 0
    monkeypatch.setattr(chain, "_like", deque(maxlen=2))  # as in a process that has read no other
    monkeypatch.setattr(History, "_event", lambda *given: (charged.__setitem__(0, charged[0] + 1), event(*given))[1])
    assert verify(tmp_path).opened == 100
    # A digest may have 19 decimal digits in a row by chance (one in 400), and is then read as a long integer would be.
    lines = (tmp_path / "ledger.jsonl").read_bytes().splitlines()
    by_chance = sum(chain.LONG in line.translate(chain.AS_ZEROS) for line in lines)
    # Of 200 lines of steps, the first two after each line of another kind.
    assert encoded[0] <= 14 + by_chance and charged[0] <= 2


def test_steps_come_one_after_the_other(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    with pytest.raises(chain.LedgerError, match="while step 1 had not ended"):
        journal.open_step(0, 2, facts(2))
