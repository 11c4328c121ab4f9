"""`account.py retire`: the key of a run that will not go on is destroyed, and what it spent is certified."""

from __future__ import annotations

from pathlib import Path

import pytest

from murmuration.accounting.certificate.certificate import verify
from murmuration.accounting.certificate.signature import public_key
from murmuration.accounting.cli.main import main
from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.keys import RunKey, store
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.heads import NAME, append
from murmuration.accounting.ledger.history import History
from tests.support.acc_world import PLAN, begin, reopen, train


def test_a_retired_run_is_closed_certified_and_without_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = RunKey.fresh()
    store(key, tmp_path / "secret" / "run.key")
    journal = begin(tmp_path, key=key)
    train(journal, range(1, 4))
    assert main(["retire", str(tmp_path)]) == 5, "while a process writes the ledger"
    assert "in use by another process" in capsys.readouterr().err
    journal.ledger.close()

    assert main(["retire", str(tmp_path)]) == 0
    assert "its key is destroyed" in capsys.readouterr().out
    assert not (tmp_path / "secret" / "run.key").exists()
    verdict = verify(tmp_path)
    assert verdict.claimed == PLAN.epsilon_budget and "ended after 3 of 40" in (verdict.claimed_because or "")
    assert verdict.attached is not None and verdict.attached.signed_by == public_key(key)
    journal = reopen(tmp_path)
    with pytest.raises(LedgerError, match="finished before"):
        train(journal, range(4, 5))
    journal.ledger.close()

    assert main(["retire", str(tmp_path)]) == 0
    assert "no key left" in capsys.readouterr().out
    assert main(["retire", str(tmp_path / "absent")]) == 5


def test_a_ledger_that_was_restored_is_retired_with_what_its_lost_part_charged(tmp_path: Path) -> None:
    """Its key is destroyed with it, so what is signed now is the last word."""
    key, ledger = RunKey.fresh(), tmp_path / "ledger.jsonl"
    store(key, tmp_path / "secret" / "run.key")
    journal = begin(tmp_path, key=key)
    journal.witnesses["secret"] = lambda head: append(tmp_path / "secret" / NAME, head.as_dict(), 0o600)
    train(journal, range(1, 6))
    journal.checkpointed(0, 5, "five")
    backup = ledger.read_bytes()
    train(journal, range(6, 41))
    journal.checkpointed(0, 40, "forty")
    journal.ledger.close()
    ledger.write_bytes(backup)

    assert main(["retire", str(tmp_path)]) == 0
    history, _ = History.read(ledger)
    assert sum(event.count for event in history.charged()) == 40, "5 in the ledger and 35 that are known to be lost"
    assert verify(tmp_path).epsilon == pytest.approx(epsilon(history.planned(), PLAN.delta))
