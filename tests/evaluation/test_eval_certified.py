"""What an evaluation says of the certificate beside the weights: a claim with its delta, and what refutes it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.ledger.journal import Journal
from murmuration.evaluation.measures.interval import share
from murmuration.evaluation.session.compare import lines_of, table
from murmuration.evaluation.session.result import Outcome, Result, certificate_of, statement, write
from tests.support.acc_world import KEY, PLAN, begin, document_of, train, whole_run

REFUTED: Any = {
    "made": True, "share": 0.1, "one_run": {"made": False, "reason": "no time"},
    "replay": {"made": True, "steps": 1, "refuted": True},
}  # fmt: skip


def with_a_late_plan(folder: Path) -> Journal:
    journal = begin(folder)
    train(journal, range(1, 3))
    journal.declare_plan(1, "second", PLAN, {})
    journal.finish()
    return journal


@pytest.mark.parametrize(
    ("make", "more", "told", "listed"),
    [
        (whole_run, {}, "Certified: ε = 0.1659 at δ = 0.001.", "ε = 0.1659 at δ = 0.001 "),
        (with_a_late_plan, {}, "Certified: ε = 4 at δ = 0.002.", "ε = 4 at δ = 0.002 "),
        (whole_run, {"audit": REFUTED}, "REFUTED by the run's own audit: two trainings", "at δ = 0.001, REFUTED "),
    ],
)
def test_the_claim_beside_the_weights(tmp_path: Path, make: Any, more: dict[str, Any], told: str, listed: str) -> None:
    journal = make(tmp_path / "run")
    pages.write(signed(document_of(journal) | more, KEY), tmp_path / "run")
    journal.ledger.close()
    subject: Any = SimpleNamespace(certified=tmp_path / "run")
    certificate, _ = certificate_of(subject, certified=True)
    result = Result("probe", {}, {"what": "run"}, json.loads(json.dumps(certificate)), {"test": {"digest": "x"}})
    result.add("top-1", share(3, 4))
    assert statement(result).startswith(told)
    write(Outcome(result), tmp_path)
    assert listed in table(lines_of([tmp_path]))
