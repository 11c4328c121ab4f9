"""`run.audit`: the audit of a finished run stands in its certificate as evidence, and costs neither run nor claim."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.attached import CertificateError
from murmuration.accounting.certificate.evidence import DIFFERS, PENDING
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.cli.main import main as account
from murmuration.accounting.errors import DONE, NOT_ALL_CHECKED, REFUTED
from murmuration.accounting.keys import load
from murmuration.accounting.ledger.history import History
from murmuration.train.audit import attach as module
from murmuration.train.audit.replay import ReplayReport
from murmuration.train.config.load import load as load_config
from murmuration.train.distributed.stop import Stopped
from murmuration.train.engines.local import start_ranks
from murmuration.train.storage.certify import _audit_before
from murmuration.train.storage.run_dir import RunDir
from tests.support.launching import Launch
from tests.support.runs import toy

Ran = tuple[Path, Path]
"""The run directory and the config."""


def asked(config: dict[str, Any]) -> None:
    toy(config)
    config["train_micro_batch_size_per_gpu"] = 64
    config["run"] |= {"audit": True, "debug_seed": None}


@pytest.fixture(scope="module")
def audited(small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    launch, run_dir = Launch.written(small_config, tmp_path_factory.mktemp("audited"), "audited", asked)
    code, output = launch.run()
    assert code == DONE, output[-2000:]
    return run_dir, launch.config


def evidence(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "certificate.json").read_text())["audit"]


def test_two_processes_train_and_one_audits_what_they_did(audited: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, _ = audited
    found = evidence(run_dir)
    assert (
        found["made"] and found["one_run"]["made"] and found["replay"] == {"made": True, "steps": 1, "refuted": False}
    )
    one = found["one_run"]
    assert (one["canaries"], one["confidence"], one["refuted"], one["ranks"]) == (2000, 0.95, [], 1)
    assert 0 < one["proven"] <= one["best"] and one["claim"] <= 2
    claim = json.loads((run_dir / "certificate.json").read_text())["claim"]
    assert claim["epsilon"] == pytest.approx(History.read(run_dir / "ledger.jsonl")[0].epsilon(), rel=1e-9)
    assert account(["verify", str(run_dir)]) == DONE
    told = capsys.readouterr().out
    assert "the numbers of the run's own audit agree" in told and told.endswith("other runs is its signer's word\n")
    page = (run_dir / "certificate.html").read_text()
    assert "Audit of the recipe after the run" in page and "not refuted" in page and "REFUTED by" not in page
    private = run_dir / "logs" / "private" / "replay.json"
    assert private.stat().st_mode & 0o077 == 0 and json.loads(private.read_text())["moves"]
    assert "moves" not in (run_dir / "certificate.json").read_text()


def test_what_the_run_does_is_that_of_a_run_without_it(audited: Ran) -> None:
    """The digest stands for all that shapes a step; a run with another one is another segment."""
    _, config = audited
    with_it, without = load_config(config, []), load_config(config, ["run.audit=false"])
    assert with_it.digest(1, {}) == without.digest(1, {})


@pytest.fixture
def pending(audited: Ran, tmp_path: Path) -> Ran:
    """A copy of the run as it is when the audit begins: certified, with its key."""
    run_dir, config = audited
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    document = json.loads((copy / "certificate.json").read_text())
    pages.write(signed({**document, "audit": PENDING}, load(copy / "secret" / "run.key")), copy)
    return copy, config


def attach(ran: Ran, *changes: str) -> int:
    return module.attach(load_config(ran[1], ["run.engine=local", *changes]), ran[0], start_ranks())


def planted(monkeypatch: pytest.MonkeyPatch, one_run: Any, replayed: ReplayReport | None = None) -> None:
    """The audits' results, or an error of the first."""

    def result(*_: Any) -> Any:
        if isinstance(one_run, BaseException):
            raise one_run
        return one_run

    monkeypatch.setattr(module, "audit", result)
    monkeypatch.setattr(module, "_of_report", dict)
    monkeypatch.setattr(module, "replay", lambda *_: replayed or ReplayReport("private", 3, 1, 1, 1.0))


def refuted(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "p_value": 1e-9, "refuted": ["epsilon is at least 3.000, and 2.000 is claimed"]}


@pytest.mark.parametrize("which", ["one_run", "replay"])
def test_a_violation_is_red_and_no_command_ends_with_0(
    audited: Ran, pending: Ran, which: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = {key: value for key, value in evidence(audited[0])["one_run"].items() if key != "made"}
    broken = ReplayReport("private", 3, 1, 1, 1.0, refuted=["noise: not equal, record 3 says PRIVATE THINGS"])
    planted(monkeypatch, refuted(honest) if which == "one_run" else honest, broken if which == "replay" else None)
    assert attach(pending) == REFUTED
    run_dir = pending[0]
    why = "epsilon is at least 3.000, and 2.000 is claimed" if which == "one_run" else DIFFERS
    page = (run_dir / "certificate.html").read_text()
    assert f"color: #b3261e; border-color: #b3261e'>REFUTED by this run&#x27;s own audit: {why}" in page
    assert page.index("REFUTED by") < page.index("differential privacy for"), "before the claim"
    assert f"**REFUTED by this run's own audit: {why}" in (run_dir / "certificate.md").read_text()
    assert f">REFUTED by this run&#x27;s own audit: {why}" in (run_dir / "report.html").read_text()
    assert "  refuted: " in page and "PRIVATE THINGS" not in page + (run_dir / "certificate.json").read_text()
    capsys.readouterr()
    assert account(["verify", str(run_dir)]) == REFUTED
    assert f"REFUTED by the run's own audit: {why}" in capsys.readouterr().out
    assert account(["statement", str(run_dir), "--records", "1"]) == 2
    assert "refutes its claim" in capsys.readouterr().err
    planted(monkeypatch, AssertionError("an audit is not repeated until it pleases"))
    assert attach(pending) == REFUTED


def test_an_audit_that_fails_is_certified_as_not_made(
    pending: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(monkeypatch, RuntimeError("CUDA out of memory, caption 'a private one'"))
    assert attach(pending, "run.keep_key=false") == DONE
    run_dir = pending[0]
    assert evidence(run_dir)["one_run"] == {
        "made": False,
        "reason": "it failed with RuntimeError; logs/private tells more",
    }
    assert evidence(run_dir)["replay"]["made"] and not (run_dir / "secret" / "run.key").exists()
    assert account(["verify", str(run_dir)]) == NOT_ALL_CHECKED
    assert "the audit with canaries that run.audit asks for: not made" in capsys.readouterr().out
    assert "not made: it failed with RuntimeError" in (run_dir / "certificate.html").read_text()


def test_an_interrupted_one_leaves_the_certificate_and_is_made_later(
    audited: Ran, pending: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = pending[0]
    before = (run_dir / "certificate.json").read_bytes()
    planted(monkeypatch, Stopped("SIGTERM"))
    with pytest.raises(Stopped):
        attach(pending, "run.keep_key=false")
    assert (run_dir / "certificate.json").read_bytes() == before and (run_dir / "secret" / "run.key").exists()
    assert account(["verify", str(run_dir)]) == NOT_ALL_CHECKED
    assert "the audit that run.audit asks for: not made" in capsys.readouterr().out
    planted(monkeypatch, {key: value for key, value in evidence(audited[0])["one_run"].items() if key != "made"})
    assert attach(pending, "run.keep_key=false") == DONE
    assert evidence(run_dir)["made"] and not (run_dir / "secret" / "run.key").exists()


def test_forged_evidence_is_found(pending: Ran, audited: Ran) -> None:
    """By its signature, and from the owner of the key as far as its numbers go."""
    run_dir, found = pending[0], evidence(audited[0])
    found["one_run"]["tried"][0]["epsilon"] = 0.0
    document = json.loads((run_dir / "certificate.json").read_text()) | {"audit": found}
    pages.write(document, run_dir)
    with pytest.raises(CertificateError, match="was changed after it was signed"):
        verify(run_dir)
    pages.write(signed(document, load(run_dir / "secret" / "run.key")), run_dir)
    with pytest.raises(CertificateError, match="the certificate's audit"):
        verify(run_dir)


def test_a_certificate_that_is_written_again_keeps_signed_evidence_alone(audited: Ran, tmp_path: Path) -> None:
    history, _ = History.read(audited[0] / "ledger.jsonl")
    assert _audit_before(RunDir(audited[0]), history) == evidence(audited[0])
    document = json.loads((audited[0] / "certificate.json").read_text())
    document["audit"]["replay"]["steps"] = 4
    (tmp_path / "certificate.json").write_text(json.dumps(document))
    assert _audit_before(RunDir(tmp_path), history) == PENDING
    assert _audit_before(RunDir(tmp_path / "nowhere"), history) == PENDING
