"""Probes find each fault planted into a plain loop, nothing in an honest one, and in libraries what the report says."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from conformance import modules
from conformance.__main__ import LIBRARIES, main, report
from conformance.probes import HOLDS, NOT_APPLICABLE, PROBES, REFUSES, VIOLATES, Verdict, verdicts
from conformance.worker import Job, Run, run
from tests.support.plain_loop import FAULTS, loop

ROOT = Path(__file__).resolve().parents[2]


def ask(adapter: object, *names: str) -> dict[str, Verdict]:
    return verdicts(list(names), lambda jobs: [run(adapter, job) for job in jobs])


def test_an_honest_plain_loop_passes_every_probe() -> None:
    # Given a batch of one, a BatchNorm refuses, and a running mean is a record's own.
    found = ask(
        loop(), *(name for name in PROBES if name not in ("sensitivity: BatchNorm", "sensitivity: running mean"))
    )
    assert {name: verdict for name, verdict in found.items() if verdict.answer != HOLDS} == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_its_probe(fault: str) -> None:
    assert ask(loop(fault), FAULTS[fault])[FAULTS[fault]].answer == VIOLATES


def test_every_probe_that_can_fail_has_a_fault() -> None:
    others = {f"sensitivity: {name}" for name in modules.MODULES}
    assert set(PROBES) - others == set(FAULTS.values()) - others


def test_opacus_answers_as_its_report_says() -> None:
    kept = json.loads((ROOT / "conformance" / "results" / "opacus.json").read_text())["verdicts"]
    found = ask(import_module("conformance.adapters.opacus"), *PROBES)
    assert {name: verdict.answer for name, verdict in found.items()} == {name: v["answer"] for name, v in kept.items()}


def test_ours_holds(tmp_path: Path) -> None:
    """The probes that cost little; the report has all."""
    names = ["seed", "noise after a restart", "LoRA", "sensitivity: batch mean", "sensitivity: infinite input"]
    found = ask(import_module("conformance.adapters.murmuration"), *names)
    assert {verdict.answer for verdict in found.values()} <= {HOLDS, REFUSES}, found


@pytest.mark.slow
def test_ours_answers_as_its_report_says() -> None:
    kept = json.loads((ROOT / "conformance" / "results" / "murmuration.json").read_text())["verdicts"]
    found = ask(import_module("conformance.adapters.murmuration"), *PROBES)
    assert {name: verdict.answer for name, verdict in found.items()} == {name: v["answer"] for name, v in kept.items()}
    assert {verdict.answer for verdict in found.values()} == {HOLDS, REFUSES}


def test_a_refusal_is_no_answer_to_whether_noise_is_right() -> None:
    refused = {name: Run([], refused="ValueError: no") for name in PROBES["noise"].jobs}
    assert PROBES["noise"].verdict(refused) == Verdict(NOT_APPLICABLE, "ValueError: no")
    refused = {name: Run([], refused="ValueError: no") for name in PROBES["sensitivity: BatchNorm"].jobs}
    assert PROBES["sensitivity: BatchNorm"].verdict(refused).answer == REFUSES


def test_the_report_is_that_of_the_answers() -> None:
    assert (ROOT / "conformance" / "report.md").read_text() == report()


def test_an_adapter_is_short() -> None:
    lengths = {
        name: len((ROOT / "conformance" / "adapters" / f"{name}.py").read_text().splitlines()) for name in LIBRARIES
    }
    assert max(lengths.values()) <= 60, lengths


def test_a_python_without_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["conformance", "opake", "--probe", "LoRA"])
    with pytest.raises(SystemExit) as left:
        main()
    told = str(left.value.code)
    assert "--python" in told and "\n" not in told, told


def test_a_run_of_the_command_prints_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a library in a process of its own."""
    monkeypatch.setattr(sys, "argv", ["conformance", "opacus", "--probe", "sensitivity: batch mean"])
    main()
    told = capsys.readouterr().out
    assert told.startswith("sensitivity: batch mean      violates       one record moves the sum by 13.9"), told


def test_the_brute_force_sum_is_bounded() -> None:
    sums = modules.clipped_sum("LoRA", 16)
    assert set(sums) == {"down.weight", "up.weight"}
    assert float(sums["down.weight"].abs().max()) == 0  # `up` begins at 0
    assert 1 < float(sums["up.weight"].norm()) <= 16


def test_a_job_is_what_json_carries() -> None:
    for probe in PROBES.values():
        for job in probe.jobs.values():
            assert Job(**json.loads(json.dumps(vars(job)))) == job
