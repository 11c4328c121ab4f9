"""Evidence of a run's own audit: numbers that contradict each other are found, and what it refutes is said."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.evidence import DIFFERS, PENDING, fault_of, refutations, rows
from murmuration.accounting.certificate.pages import nist, registry_entry
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.cli.main import main
from murmuration.accounting.epsilon.audit_bound import p_value
from murmuration.accounting.epsilon.audit_evidence import Claim, Count, Evidence
from murmuration.accounting.event import Event
from tests.support.acc_world import KEY, document_of, whole_run


def audit_of(*right: int, refuted: list[str] | None = None) -> dict[str, Any]:
    """As a trainer writes it, of 200 canaries: so many of 100 and of 60 guesses are right."""
    claim = Claim((Event(1.0, 20.0, 4),), 0.5, 1e-5)
    evidence = Evidence(200, 100, tuple(Count(of, count) for of, count in zip((100, 60), right, strict=True)))
    bound = evidence.bound(claim)
    one = {
        "made": True, "phase": 0, "engine": "local", "ranks": 1, "steps": 4, "claim": claim.epsilon,
        "delta": bound.delta, "canaries": bound.canaries, "included": bound.included, "confidence": bound.confidence,
        "looks": bound.looks, "tried": [asdict(each) for each in bound.tried], "proven": bound.proven.epsilon,
        "best": bound.best.epsilon, "assumes": bound.best.assumes, "p_value": evidence.p_value(claim),
        "refuted": refuted or [],
    }  # fmt: skip
    replay = {"made": True, "steps": 3, "refuted": False}
    return {"made": True, "share": 0.125, "one_run": one, "replay": replay}


@pytest.fixture(scope="module")
def mild() -> dict[str, Any]:
    return audit_of(70, 45)


ANOTHER, WEAKER = "states another bound than its guesses give", "states weaker evidence than its guesses are"
FORGED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "no bound": (ANOTHER, lambda one: one["tried"][0].update(epsilon=0.0)),
    "another bound of the last guesses": (ANOTHER, lambda one: one["tried"][2].update(epsilon=0.3)),
    "a bound with less error": (ANOTHER, lambda one: one.update(confidence=0.9)),
    "more guesses right": (ANOTHER, lambda one: one["tried"][0].update(correct=90)),
    "weaker evidence": (WEAKER, lambda one: one.update(p_value=1.0)),
    "not the best": ("does not state the best of its bounds", lambda one: one.update(proven=0.01)),
    "the best of those that assume": (
        "does not state the best of its bounds", lambda one: one["tried"].append(one["tried"][0] | {
            "method": "new", "epsilon": 9.0}),
    ),
    "refutes and does not say so": ("does not say that it refutes", lambda one: one.update(p_value=1e-9)),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
def test_numbers_that_contradict_each_other_are_found(mild: dict[str, Any], what: str) -> None:
    assert mild["one_run"]["proven"] > 0 and fault_of(mild) is None
    fault, forge = FORGED[what]
    forged = copy.deepcopy(mild)
    forge(forged["one_run"])
    assert fault_of(forged) == fault


def test_what_was_not_made_or_says_that_it_refutes_has_no_fault() -> None:
    assert fault_of(PENDING) is None and fault_of({"made": True, "one_run": {"made": False}}) is None
    strong = audit_of(100, 60)
    assert fault_of(strong) == "does not say that it refutes"
    assert fault_of(audit_of(100, 60, refuted=["ε is more"])) is None
    coins = audit_of(50, 30)
    assert fault_of(coins) is None and coins["one_run"]["p_value"] == 1.0, "no better than coins"
    coins["one_run"]["p_value"] = 1.5
    assert fault_of(coins) == WEAKER


def test_evidence_may_be_as_weak_as_the_formula_says_of_its_guesses(mild: dict[str, Any]) -> None:
    """Another method may find more in them."""
    least = copy.deepcopy(mild)
    by_formula = 2 * min(p_value(200, *of, 0.5, 1e-5) for of in ((100, 70), (60, 45)))
    least["one_run"]["p_value"] = by_formula
    assert mild["one_run"]["p_value"] <= by_formula < 1 and fault_of(least) is None


def test_what_is_refuted_is_said_first_in_the_table_and_of_the_claim(mild: dict[str, Any]) -> None:
    shown = dict(rows(mild))
    told = "two trainings" in json.dumps(shown)
    assert not told and shown["one run with canaries"] == "not refuted" and shown["cost"].startswith("about 12.5 %")
    assert shown["the first steps twice, once without one record"] == "not refuted; steps: 3"
    assert (
        "with 200 canaries and a claim of ε = 0.5, δ = 1e-05" in shown["of"]
        and "95% confidence" in shown["lower bound"]
    )
    assert f"ε ≥ {mild['one_run']['proven']:.2f}"[:-1] in shown["lower bound"] and refutations({"audit": mild}) == []
    lower = copy.deepcopy(mild)
    lower["one_run"]["proven"] = 3.9999
    assert dict(rows(lower))["lower bound"].startswith("ε ≥ 3.999 whatever"), "rounded down"
    bad = copy.deepcopy(mild) | {"replay": {"made": True, "steps": 3, "refuted": True}}
    bad["one_run"]["refuted"] = ["ε is more"]
    shown = dict(rows(bad))
    assert shown["one run with canaries"] == "REFUTED: ε is more" and refutations({"audit": bad}) == [
        "ε is more",
        DIFFERS,
    ]
    assert shown["the first steps twice, once without one record"].startswith(f"REFUTED: {DIFFERS}")
    none = {"made": False, "reason": "why not"}
    shown = dict(rows(bad | {"one_run": none, "replay": none}))
    assert list(shown.values()).count("not made: why not") == 2 and dict(rows(none))["run.audit"] == "why not"


def test_no_reader_believes_evidence_that_is_forged_and_no_statement_is_made_of_a_refuted_run(
    tmp_path: Path, mild: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    journal = whole_run(tmp_path)
    document = document_of(journal)
    journal.ledger.close()
    pages.write(signed(document | {"audit": mild}, KEY), tmp_path)
    assert "the numbers of the run's own audit agree" in verify(tmp_path).attached.checked  # type: ignore[union-attr]
    none = {"made": False, "reason": "no time"}
    for missing, told in (
        (PENDING, "the audit"), (mild | {"one_run": none}, "the audit with canaries"),
        (mild | {"replay": none}, "the replay"),
    ):  # fmt: skip
        pages.write(signed(document | {"audit": missing}, KEY), tmp_path)
        assert f"{told} that run.audit asks for: not made" in verify(tmp_path).attached.unchecked  # type: ignore[union-attr]
    forged = mild | {"one_run": mild["one_run"] | {"proven": 0.01}}
    pages.write(signed(document | {"audit": forged}, KEY), tmp_path)
    with pytest.raises(CertificateError, match="the certificate's audit does not state the best"):
        verify(tmp_path)
    refuted = mild | {"one_run": mild["one_run"] | {"refuted": ["ε is more"]}}
    pages.write(signed(document | {"audit": refuted}, KEY), tmp_path)
    assert main(["statement", str(tmp_path), "--records", "1"]) == 2
    assert "the run's own audit refutes its claim (ε is more)" in capsys.readouterr().err
    # Wherever the claim is.
    assert main(["explain", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("REFUTED by the run's own audit: ε is more")
    loss = registry_entry(document | {"audit": refuted})["deployment"]["privacy_loss"]
    assert "privacy_parameters" not in loss and loss["privacy_parameters_description"].endswith("audit: ε is more")
    assert "δ = 0.001; REFUTED by this run's own audit" in str(nist(document | {"audit": refuted}))
