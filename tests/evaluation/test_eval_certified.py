"""What an evaluation says of the certificate beside the weights: a claim with its delta, and what refutes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from murmuration.accounting.banded import best_banded
from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.sampling import CyclicPoisson
from murmuration.evaluation.measures.interval import mean, share
from murmuration.evaluation.session.compare import Line, lines_of, plot, table
from murmuration.evaluation.session.result import Outcome, Result, certificate_of, shown, statement, write
from tests.support.acc_world import KEY, PLAN, begin, certified, document_of, train, whole_run

REFUTED: Any = {
    "made": True, "share": 0.1, "one_run": {"made": False, "reason": "no time"},
    "replay": {"made": True, "steps": 1, "refuted": True},
}  # fmt: skip


def test_one_value_has_no_interval() -> None:
    result = Result("few-shot", {}, {}, None, {})
    result.add_draws("once", [0.25])
    result.add_draws("twice", [0.25, 0.5])
    result.add("loss of one", mean([2.0]))
    result.add("share of one", share(1, 1))
    told = {name: shown(number) for name, number in result.numbers.items()}
    assert told["once"] == "0.2500 (no interval, 1 draw)" and told["loss of one"] == "2.0000 (no interval, n = 1)"
    assert told["twice"].startswith("0.3750 ± 0.1768 (") and told["share of one"].endswith("1.0000, n = 1)")


def test_the_batch_of_correlated_noise_is_that_of_a_step(tmp_path: Path) -> None:
    """Its rate is that of the part of the records whose turn it is."""
    plan = replace(PLAN, sampling=CyclicPoisson(2**31, 4), noise=best_banded(4, PLAN.steps))
    certified(begin(tmp_path, plan))
    subject: Any = SimpleNamespace(certified=tmp_path)
    told, _ = certificate_of(subject, certified=True)
    assert told is not None and told["batch"] == 12 and plan.divisor == 12.5


def with_a_late_plan(folder: Path) -> Journal:
    journal = begin(folder)
    train(journal, range(1, 3))
    journal.declare_plan(1, "second", PLAN, {})
    journal.finish()
    return journal


def test_a_plot_says_at_which_delta_an_epsilon_holds(tmp_path: Path) -> None:
    def drawn(*claims: tuple[float, bool]) -> str:
        lines = [
            Line(f"m{number}", "probe", "top-1", {"value": 0.5, "low": 0.4, "high": 0.6}, 2.0, delta, refuted, True, "")
            for number, (delta, refuted) in enumerate(claims)
        ]
        for line in lines:
            line.places["epsilon"] = line.epsilon
        plot(lines, tmp_path / "plot.svg")
        return (tmp_path / "plot.svg").read_text()

    assert "ε at δ = 1e-05" in drawn((1e-5, False), (1e-5, False))
    both = drawn((1e-5, False), (1e-6, True))
    assert "m0, probe, ε = 2 at δ = 1e-05" in both and "m1, probe, ε = 2 at δ = 1e-06, REFUTED" in both
    assert "ε at δ" not in both and "REFUTED" in drawn((1e-5, True))


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
