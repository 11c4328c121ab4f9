"""What was declared beside the steps stands in the ledger, and every certificate must state it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.statement import FOREIGN_WEIGHTS
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.ledger.lines import PUBLIC_USES
from tests.support.acc_world import PLAN, begin, certified, document_of, train, whole_run

Declare = Callable[[Journal], None]


def trained(folder: Path) -> Journal:
    plan = replace(PLAN, steps=3)
    journal = begin(folder, plan)
    train(journal, range(1, 4), plan)
    return journal


def kinds(folder: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (folder / "ledger.jsonl").read_text().splitlines()]


def test_a_run_that_declares_nothing_has_no_such_line(tmp_path: Path) -> None:
    whole_run(tmp_path).ledger.close()
    assert not {"word", "public", "store"} & set(kinds(tmp_path))
    assert not History.read(tmp_path / "ledger.jsonl")[0].words


@pytest.mark.parametrize(
    ("declare", "kind", "words"),
    [
        *(
            (partial(Journal.declare_word, what=what), "word", words)
            for what, words in (
                ("private_curves", "Decisions taken by them are outside the claim"),
                ("keep_key", "whoever has it can sign another certificate"),
                ("witness", "knows when checkpoints were made, and so roughly how long the private steps"),
            )
        ),
        (partial(Journal.declare_store, phase=0, host="https://store.example"), "store",
         "as they were drawn. Whoever runs that store, or sees its access log, knows which records took part"),
        *(
            (partial(Journal.declare_public, phase=0, use=use, digest="ab" * 32), "public",
             f"{words} phase 'private' (digest {'ab' * 8}) are public by the word of the run's owner")
            for use, words in PUBLIC_USES.items()
        ),
        *(
            (partial(Journal.declare_public, phase=0, use=use, digest="one"), "public",
             "may have been trained on the very records")
            for use in ("weights", "unknown-weights")
        ),
        (partial(Journal.declare_public, phase=0, use="unknown-weights", digest="ab" * 32), "public",
         f"FOREIGN WEIGHTS: phase 'private' began with weights (digest {'ab' * 8})"),
    ],
)  # fmt: skip
def test_what_is_declared_is_written_once_and_cannot_be_left_out(
    tmp_path: Path, declare: Declare, kind: str, words: str
) -> None:
    journal = trained(tmp_path)
    plain = document_of(journal)
    assert not any(words in text for text in plain["known_deviations"])
    declare(journal)
    declare(journal)  # at the next start
    journal.finish()
    document = certified(journal)
    assert kinds(tmp_path).count(kind) == 1
    assert sum(words in text for text in document["known_deviations"]) == 1
    assert verify(tmp_path).objection is None
    assert words in (tmp_path / "certificate.md").read_text(encoding="utf-8")
    document["known_deviations"] = [text for text in document["known_deviations"] if words not in text]
    pages.write(document, tmp_path)
    with pytest.raises(CertificateError, match="leaves out a known deviation"):
        verify(tmp_path)


def test_the_word_for_other_records_is_another_line(tmp_path: Path) -> None:
    journal = trained(tmp_path)
    for digest in ("one", "two", "one"):
        journal.declare_public(0, "evaluation", digest)
    assert FOREIGN_WEIGHTS not in document_of(journal)["known_deviations"], "that is said of weights alone"
    assert [line.digest for line in journal.history.public_uses] == ["one", "two"]
    journal.ledger.close()


@pytest.mark.parametrize("declare", [lambda j: j.declare_public(7, "evaluation", "one"), lambda j: j.finish()])
def test_nothing_is_declared_for_a_phase_that_is_unknown_or_a_run_that_is_over(
    tmp_path: Path, declare: Declare
) -> None:
    journal = trained(tmp_path)
    with pytest.raises(LedgerError, match=r"declared before|finished before"):
        declare(journal)
        journal.declare_public(0, "evaluation", "one")
    journal.ledger.close()
