"""A ledger that is older than it was known to be is refused, and what its lost part charged stays charged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.epsilon.accountant import describe, epsilon
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.facts import Charge, Head
from murmuration.accounting.ledger.heads import NAME, append, contains, lost_charges, read_heads, uncharged
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.train.engines.local import start_ranks
from murmuration.train.storage.checkpoint import Keep
from murmuration.train.storage.open_run import OpenRun, open_run
from murmuration.train.storage.run_dir import RunDir
from tests.support.acc_world import CONFIG, DATA, PLAN, begin, reopen, train


def watched(journal: Journal, folder: Path) -> Journal:
    journal.witnesses["secret"] = lambda head: append(folder / NAME, head.as_dict(), 0o600)
    return journal


def restored(folder: Path, backup: Path) -> Journal:
    """As `cp backup/ledger.jsonl run/ledger.jsonl` does it: the file keeps its inode."""
    (folder / "ledger.jsonl").write_bytes(backup.read_bytes())
    return watched(reopen(folder), folder)


def trained(journal: Journal, first: int, last: int) -> None:
    train(journal, range(first, last + 1))
    journal.checkpointed(0, last, f"at {last}")


def test_a_line_that_the_disk_took_only_a_part_of_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: really(descriptor, content[:-1]))
    with pytest.raises(OSError, match="took only part of a line"):
        append(tmp_path / "log", {"run": "one"}, 0o600)


def test_a_restored_ledger_is_refused_or_charges_what_was_lost(tmp_path: Path) -> None:
    backup = tmp_path / "backup.jsonl"
    journal = watched(begin(tmp_path), tmp_path)
    trained(journal, 1, 4)
    journal.ledger.close()
    shutil.copy(tmp_path / "ledger.jsonl", backup)
    journal = watched(reopen(tmp_path), tmp_path)
    journal.admit_lost(lost_charges(journal.ledger.entries, read_heads(tmp_path / NAME)), None)
    trained(journal, 5, 20)
    journal.admit_lost(lost_charges(journal.ledger.entries, read_heads(tmp_path / NAME)), None)
    journal.ledger.close()

    journal = restored(tmp_path, backup)
    with pytest.raises(LedgerError, match=r"restored from a backup.*--new-segment"):
        journal.admit_lost(lost_charges(journal.ledger.entries, read_heads(tmp_path / NAME)), None)
    assert journal.new_segment_reason(0, 4, CONFIG) is None, "nothing else notices"
    journal.admit_lost(lost_charges(journal.ledger.entries, read_heads(tmp_path / NAME)), "on purpose")
    assert journal.history.charged() == [Event(1.0, PLAN.noise_multiplier, 20)]
    assert "lost" in (journal.new_segment_reason(0, 4, CONFIG) or "")
    journal.begin_segment(0, CONFIG, DATA, 4, "on purpose")
    trained(journal, 5, 10)
    assert journal.history.charged() == [Event(1.0, PLAN.noise_multiplier, 26)]
    head, entries = journal.history.epsilon(), list(journal.ledger.entries)
    assert head == epsilon([Event(1.0, PLAN.noise_multiplier, 26)], PLAN.delta)
    journal.admit_lost(lost_charges(journal.ledger.entries, read_heads(tmp_path / NAME)), None)
    assert list(journal.ledger.entries) == entries, "charged once"
    journal.ledger.close()
    assert History.read(tmp_path / "ledger.jsonl")[0].epsilon() == head

    # Restored once more, to before the first loss was written down: both branches are lost now.
    journal = restored(tmp_path, backup)
    journal.admit_lost(lost_charges(journal.ledger.entries, read_heads(tmp_path / NAME)), "again")
    assert journal.history.charged() == [Event(1.0, PLAN.noise_multiplier, 26)]


def test_two_ledgers_of_one_run_see_each_other_whoever_notes_last(tmp_path: Path) -> None:
    """A machine that was cloned as a whole: nothing tells it from its original, and both write the same log."""
    log, one, two = tmp_path / "log", tmp_path / "one", tmp_path / "two"
    log.mkdir()
    one.mkdir()
    journal = watched(begin(one), log)
    trained(journal, 1, 4)
    journal.ledger.close()
    shutil.copytree(one, two)
    for folder, first, last in ((two, 5, 8), (one, 5, 30), (two, 9, 12), (one, 31, 33)):
        journal = watched(reopen(folder), log)
        journal.begin_segment(0, CONFIG, DATA, first - 1, f"another rate in {folder.name}")
        trained(journal, first, last)
        journal.ledger.close()
    for folder, own, other in ((one, 33, 12), (two, 12, 33)):  # four steps are charged twice
        journal = reopen(folder)
        journal.admit_lost(lost_charges(journal.ledger.entries, read_heads(log / NAME)), "noticed")
        assert journal.history.charged() == [Event(1.0, PLAN.noise_multiplier, own + other)], folder.name
        assert lost_charges(journal.ledger.entries, read_heads(log / NAME)) is None, "once"
        journal.ledger.close()


def test_what_no_note_shares_with_the_ledger_is_charged_whole(tmp_path: Path) -> None:
    journal = watched(begin(tmp_path), tmp_path)
    trained(journal, 1, 3)
    [noted] = read_heads(tmp_path / NAME)
    stranger = Head(noted.ledger_of, noted.length + 7, "f" * 64, noted.charged)
    journal.admit_lost(lost_charges(journal.ledger.entries, [stranger]), "declared")
    assert journal.history.charged() == [Event(1.0, PLAN.noise_multiplier, 6)]


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    journal = watched(begin(tmp_path), tmp_path)
    trained(journal, 1, 3)
    with (tmp_path / NAME).open("a") as file:
        file.write('{"ledger_of": "torn\n{"ledger_of": 3, "length": "x"}\n[1]\n{"id": "a run"}\n')
    trained(journal, 4, 5)
    assert [head.length for head in read_heads(tmp_path / NAME)] == [journal.ledger.length - 5, journal.ledger.length]
    assert read_heads(tmp_path / "absent") == []
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_a_loss_of_an_unknown_phase_is_malformed(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    charge = {"phase": 3, "rate": 1.0, "sigma": 2.0, "count": 1}
    journal.ledger.append(journal.ledger.next("lost", length=9, head="f" * 64, charged=[charge]))
    journal.ledger.close()
    with pytest.raises(LedgerError, match="phase 3 are charged, which has no plan"):
        reopen(tmp_path)


def test_a_copy_has_an_id_of_its_own_and_remembers_its_parents(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    first = journal.history.run_id
    assert first == journal.ledger.entries[0].hash
    journal.note_copied("lies elsewhere")
    journal.note_copied("lies elsewhere again")
    assert len(set(journal.history.ids)) == 3 and journal.history.ids[0] == first
    journal.ledger.close()
    assert History.read(tmp_path / "ledger.jsonl")[0].ids == journal.history.ids


def test_a_note_that_a_kill_prevented_is_made_up_for_at_the_next_start(tmp_path: Path) -> None:
    def opened() -> OpenRun:
        return open_run(RunDir(tmp_path), "run", start_ranks(), Keep(2), {}, record_digests="hmac-sha256")

    run = opened()
    run.writer.declare_plan(0, "private", PLAN, describe("pld"))
    run.writer.begin_segment(0, CONFIG, DATA, 0, "first")
    train(run.writer, range(1, 4))
    run.writer.witnesses.clear()  # killed before it
    run.writer.checkpointed(0, 3, "at 3")
    run.writer.ledger.close()
    assert read_heads(tmp_path / "secret" / NAME) == []
    for _ in range(2):
        run = opened()
        run.writer.ledger.close()
        [head] = read_heads(tmp_path / "secret" / NAME)
        assert head.charged[0].count == 3 and contains(run.writer.ledger.entries, head)


def test_a_declared_loss_of_several_checkpoints_agrees_with_whoever_recorded_them_all(tmp_path: Path) -> None:
    """Only the newest of them is named in the line that takes their charges over."""
    backup = tmp_path / "backup.jsonl"
    journal = watched(begin(tmp_path), tmp_path)
    trained(journal, 1, 4)
    journal.ledger.close()
    shutil.copy(tmp_path / "ledger.jsonl", backup)
    journal = watched(reopen(tmp_path), tmp_path)
    for first, last in ((5, 8), (9, 12), (13, 16)):
        trained(journal, first, last)
    journal.ledger.close()
    journal = restored(tmp_path, backup)
    with pytest.raises(CertificateError, match="is not the one that the witness recorded"):
        verify(tmp_path, witness=tmp_path / NAME)
    journal.admit_lost(lost_charges(journal.ledger.entries, read_heads(tmp_path / NAME)), "the disk failed")
    journal.begin_segment(0, CONFIG, DATA, 4, "the disk failed")
    trained(journal, 5, 7)
    journal.ledger.close()
    assert verify(tmp_path, witness=tmp_path / NAME).opened == 7


@pytest.mark.parametrize("place", ["witness", "secret"])
def test_a_loss_that_charges_less_than_was_recorded_is_found(tmp_path: Path, place: str) -> None:
    """Whoever has the run's key can rewrite its ledger, and say of everything after step 4 that it was lost."""
    run = tmp_path / "run"
    (run / "secret").mkdir(parents=True)
    log = run / "secret" if place == "secret" else tmp_path
    journal = watched(begin(run), log)
    trained(journal, 1, 4)
    backup = (run / "ledger.jsonl").read_bytes()
    trained(journal, 5, 16)
    journal.ledger.close()
    noted = read_heads(log / NAME)[-1]
    for count in (0, 11, 12):
        (run / "ledger.jsonl").write_bytes(backup)
        journal = reopen(run)
        charged = [Charge(0, 1.0, PLAN.noise_multiplier, count)] if count else []
        journal.admit_lost((noted, charged), "the disk failed, they say")
        journal.ledger.close()
        witness = log / NAME if place == "witness" else None
        if count == 12:
            assert verify(run, witness=witness).epsilon == epsilon([Event(1.0, PLAN.noise_multiplier, 16)], PLAN.delta)
        else:
            with pytest.raises(CertificateError, match=r"(more had been charged by|charged more by its) line"):
                verify(run, witness=witness)


def test_a_step_whose_noise_turned_out_weaker_still_counts_as_charged() -> None:
    head = Head("run", 9, "f" * 64, (Charge(0, 0.5, 2.0, 7), Charge(1, 0.5, 3.0, 2)))
    weaker = (Charge(0, 0.5, 1.5, 1), Charge(0, 0.5, 2.0, 6), Charge(1, 0.5, 3.0, 2))
    assert uncharged(weaker, [head]) is None and uncharged(head.charged, [head]) is None
    for less in (
        (Charge(0, 0.5, 2.5, 1), *weaker[1:]), weaker[1:], weaker[:2], (*weaker[:2], Charge(1, 0.25, 3.0, 2)), (),
    ):  # fmt: skip
        assert uncharged(less, [Head("run", 1, "e" * 64, ()), head]) == head
