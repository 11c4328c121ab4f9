"""The days of a run: its first start is in the ledger, its last one beside it; nothing tells how long steps took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.days import day, day_of
from murmuration.accounting.ledger.chain import Ledger, LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from tests.support.acc_world import KEY, PLAN, SIGNER, begin, certified, rewritten, train


def dated(folder: Path, started: str | None, dates: dict[str, str] | None) -> dict[str, Any]:
    journal = Journal(Ledger.open(folder / "ledger.jsonl"))
    journal.start_run("dated", "check", False, {}, "hmac-sha256", SIGNER, started)
    journal.declare_plan(0, "private", PLAN, {})
    journal.begin_segment(0, "config", "data", 0, "first")
    train(journal, range(1, 3))
    journal.finish()
    return certified(journal, {} if dates is None else {"dates": dates})


def test_the_first_start_comes_from_the_ledger_and_pages_tell_both(tmp_path: Path) -> None:
    document = dated(tmp_path, "2026-02-28", {"last_start": "2026-03-01"})
    assert document["dates"] == {"first_start": "2026-02-28", "last_start": "2026-03-01"}
    verify(tmp_path)
    for name in ("certificate.md", "certificate.html"):
        assert "first started on 2026-02-28, last started on 2026-03-01 (UTC)" in (tmp_path / name).read_text()


@pytest.mark.parametrize(
    "dates",
    [
        {"first_start": "2026-02-27", "last_start": "2026-03-01"}, {"last_start": "2026-03-01"}, {}, None, [],
        {"first_start": "2026-02-28", "last_start": "2026-02-27"},
        {"first_start": "2026-02-28", "last_start": "2026-02-30"},
        {"first_start": "2026-02-28", "last_start": "20260301"},
        {"first_start": "2026-02-28", "last_start": "2026-03-01T12:00:00"},
        {"first_start": "2026-02-28", "last_start": 20260301},
        {"first_start": "2026-02-28", "last_start": "2026-03-01", "ended": "2026-03-02"},
    ],
    ids=str,
)  # fmt: skip
def test_days_that_the_ledger_contradicts_are_refused(tmp_path: Path, dates: Any) -> None:
    """Whoever holds the key may not state them either."""
    document = dated(tmp_path, "2026-02-28", {"last_start": "2026-03-01"}) | {"dates": dates}
    (tmp_path / "certificate.json").write_text(json.dumps(signed(document, KEY)))
    with pytest.raises(CertificateError, match="dates"):
        verify(tmp_path)


def test_a_clock_that_was_set_back_costs_no_certificate(tmp_path: Path) -> None:
    document = dated(tmp_path, "2026-02-28", {"last_start": "2026-02-27"})
    assert document["dates"] == {"first_start": "2026-02-28", "last_start": "2026-02-28"}
    verify(tmp_path)


def test_a_signed_day_cannot_be_moved_even_where_the_ledger_says_nothing(tmp_path: Path) -> None:
    document = dated(tmp_path, "2026-02-28", {"last_start": "2026-03-01"})
    document["dates"]["last_start"] = "2026-03-02"
    (tmp_path / "certificate.json").write_text(json.dumps(document))
    with pytest.raises(CertificateError, match="changed after it was signed"):
        verify(tmp_path)


@pytest.mark.parametrize("dates", [None, {"last_start": "2026-03-01"}])
def test_runs_that_recorded_no_day_still_verify(tmp_path: Path, dates: dict[str, str] | None) -> None:
    document = dated(tmp_path, None, dates)
    assert document.get("dates") == dates
    verify(tmp_path)


def test_a_day_cannot_be_added_to_a_run_that_recorded_none(tmp_path: Path) -> None:
    document = dated(tmp_path, None, None) | {"dates": {"first_start": "2026-02-28"}}
    (tmp_path / "certificate.json").write_text(json.dumps(document))
    with pytest.raises(CertificateError, match="2026-02-28, but the ledger gives None"):
        verify(tmp_path)


@pytest.mark.parametrize("text", ["2026-2-1", "2026-02-30", "20260228", "2026-W09-6", "2026-02-28T00:00", ""])
def test_a_ledger_takes_calendar_days_alone(tmp_path: Path, text: str) -> None:
    journal = Journal(Ledger.open(tmp_path / "ledger.jsonl"))
    with pytest.raises(LedgerError, match="malformed 'run' entry"):
        journal.start_run("dated", "check", False, {}, "hmac-sha256", SIGNER, text)
    journal.ledger.close()
    begin(tmp_path).ledger.close()
    rewritten(tmp_path, lambda line: line.update(started=text) if line["kind"] == "run" else None)
    with pytest.raises(LedgerError, match="malformed 'run' entry"):
        History.read(tmp_path / "ledger.jsonl")


def test_days_are_utc() -> None:
    assert (day_of(0), day_of(86399.9), day_of(86400)) == ("1970-01-01", "1970-01-01", "1970-01-02")
    assert day("2024-02-29").isoformat() == "2024-02-29"
