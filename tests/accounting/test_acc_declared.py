"""What was declared beside the steps stands in the ledger, and every certificate must state it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from murmuration.accounting.certificate import certificate
from murmuration.accounting.certificate.certificate import CertificateError, compose, verify
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from tests.support.acc_world import whole_run

Declare = Callable[[Journal], None]


def kinds(folder: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (folder / "ledger.jsonl").read_text().splitlines()]


def test_a_run_that_declares_nothing_has_no_such_line(tmp_path: Path) -> None:
    whole_run(tmp_path).ledger.close()
    assert not {"curves"} & set(kinds(tmp_path))
    assert not History.read(tmp_path / "ledger.jsonl")[0].private_curves


@pytest.mark.parametrize(
    ("declare", "kind", "words"),
    [(Journal.declare_private_curves, "curves", "Decisions taken by them are outside the claim")],
)
def test_what_is_declared_is_written_once_and_cannot_be_left_out(
    tmp_path: Path, declare: Declare, kind: str, words: str
) -> None:
    journal = whole_run(tmp_path)
    plain = compose(journal.history, journal.ledger.entries, {})
    assert not any(words in text for text in plain["known_deviations"])
    declare(journal)
    declare(journal)  # at the next start
    document = compose(journal.history, journal.ledger.entries, {})
    journal.ledger.close()
    assert kinds(tmp_path).count(kind) == 1
    assert sum(words in text for text in document["known_deviations"]) == 1
    certificate.write(document, tmp_path)
    assert verify(tmp_path).objection is None
    assert words in (tmp_path / "certificate.md").read_text(encoding="utf-8")
    document["known_deviations"] = [text for text in document["known_deviations"] if words not in text]
    certificate.write(document, tmp_path)
    with pytest.raises(CertificateError, match="leaves out a known deviation"):
        verify(tmp_path)
