"""What is declared after a run has signed and lost its key: charged, told, and bound to what was signed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.certificate.amended import amended
from murmuration.accounting.certificate.certificate import CertificateError, compose, markdown, verify, write
from murmuration.accounting.certificate.composition import Known, composed
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.epsilon.accountant import Event, epsilon
from murmuration.accounting.epsilon.tuning import Declared, Tuning
from murmuration.accounting.ledger.history import History
from murmuration.accounting.strict_json import parse
from tests.accounting.test_acc_signature import KEY, run
from tests.support.acc_world import PLAN, reopen, train

THREE = Declared("three rates", Tuning(3, fixed=True))
DRAWN = Declared("a drawn number of rates", Tuning(3))


def read(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = parse((folder / "certificate.json").read_bytes())
    return document


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Signed, with another run on the same records that claims 3."""
    run(tmp_path)
    history, entries = History.read(tmp_path / "ledger.jsonl")
    document = compose(history, entries, {"siblings": [], "about": {"owner": "the clinic"}})
    other = Known("other", "other-id", True, 3.0, PLAN.delta)
    document["composition"] = composed(history, entries, document["claim"]["epsilon_claimed"], [other])
    write(signed(document, KEY), tmp_path)
    return tmp_path


def declare(folder: Path, declared: Declared) -> dict[str, Any]:
    journal = reopen(folder)
    journal.declare_tuning(declared)
    write(amended(read(folder), journal.history, journal.ledger.entries), folder)
    journal.ledger.close()
    return read(folder)


def test_later_tuning_is_charged_and_the_signed_words_stay(finished: Path) -> None:
    before = read(finished)
    document = declare(finished, THREE)
    three = epsilon([Event(1.0, PLAN.noise_multiplier, 3 * PLAN.steps)], PLAN.delta)
    verdict = verify(finished)
    assert verdict.claimed is not None and three <= verdict.claimed < three + 0.01
    assert document["amends"] == before and document["about"] == before["about"]
    assert document["composition"]["events"] == [{"rate": 1.0, "sigma": PLAN.noise_multiplier, "count": 3 * PLAN.steps}]
    assert document["composition"]["epsilon_together"] == three + 3.0
    assert verdict.attached is not None
    assert any("amends one that is signed" in sentence for sentence in verdict.attached.checked)
    assert any("nobody could sign it" in sentence for sentence in verdict.attached.unchecked)
    assert "amended: the run had signed" in markdown(document)


def test_a_second_declaration_amends_the_signed_one(finished: Path) -> None:
    """One (ε, δ) is known of a drawn number of runs, and no steps that it follows from."""
    before = read(finished)
    declare(finished, THREE)
    document = declare(finished, DRAWN)
    assert document["amends"] == before and len(document["tuned_on_private_data"]) == 2
    assert [each["by"] for each in document["composition"]["runs"]] == ["claim", "claim"]
    assert document["composition"]["events"] == []
    verdict = verify(finished)
    assert verdict.claimed is not None and verdict.claimed > before["claim"]["epsilon_claimed"]


def of_fewer_steps(document: dict[str, Any]) -> None:
    document["composition"]["events"] = document["amends"]["composition"]["events"]


def of_a_cheaper_run(document: dict[str, Any]) -> None:
    document["composition"]["runs"][1]["epsilon"] = 0.1


def without_the_other_runs(document: dict[str, Any]) -> None:
    del document["composition"]


@pytest.mark.parametrize(
    ("forge", "fault"),
    [
        (lambda document: document["about"].update(owner="somebody"), "differs in about from"),
        (lambda document: document.update(hashes={"checkpoint_manifest_sha256": "0"}), "differs in hashes from"),
        (lambda document: document["known_deviations"].append("and a promise"), "differs in known_deviations from"),
        (lambda document: document.pop("amends"), "carries no signature"),
        (lambda document: document["claim"].update(epsilon_of_the_auditor=0.01), "claim contains words that nobody"),
        (lambda document: document["ledger"].update(note="unsigned"), "ledger contains words that nobody"),
        (lambda document: document["limits"]["groups"][0].update(reason="ε = 0.01"), "limits contains words that"),
        (lambda document: document["amends"]["claim"].update(epsilon=0.1), "was changed after it was signed"),
        (lambda document: document["amends"]["about"].update(owner="") or document["about"].update(owner=""),
         "was changed after it was signed"),
        (of_fewer_steps, "adds up different runs or steps"),
        (of_a_cheaper_run, "adds up different runs or steps"),
        (without_the_other_runs, "adds up different runs or steps"),
        (lambda document: document["composition"].update(note="ε = 0.01"), "adds up different runs or steps"),
        (lambda document: document["composition"].update(delta=1e-30), "adds up different runs or steps"),
        (lambda document: document.update(signature=document["amends"]["signature"]), "carries a signature"),
    ],
)  # fmt: skip
def test_an_amendment_changes_nothing_else(finished: Path, forge: Callable[[dict[str, Any]], Any], fault: str) -> None:
    document = declare(finished, THREE)
    forge(document)
    (finished / "certificate.json").write_text(json.dumps(document))
    with pytest.raises(CertificateError, match=fault):
        verify(finished)


def test_the_signed_one_alone_no_longer_covers_the_run(finished: Path) -> None:
    document = declare(finished, THREE)
    (finished / "certificate.json").write_text(json.dumps(document["amends"]))
    with pytest.raises(CertificateError, match="no longer covers the run"):
        verify(finished)


def test_no_steps_can_be_slipped_in_by_an_amendment(tmp_path: Path) -> None:
    """A certificate that was signed in the middle, as a forger with an early copy of one would need it."""
    run(tmp_path, steps=20)
    lines = (tmp_path / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))  # without its end
    history, entries = History.read(tmp_path / "ledger.jsonl")
    early = signed(compose(history, entries, {"siblings": []}), KEY)
    journal = reopen(tmp_path)
    train(journal, range(21, 41))
    journal.declare_tuning(THREE)
    journal.finish()
    write(amended(early, journal.history, journal.ledger.entries), tmp_path)
    journal.ledger.close()
    with pytest.raises(CertificateError, match="amends one after which the run continued"):
        verify(tmp_path)
