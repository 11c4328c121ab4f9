"""The GPU benchmark runs at toy shapes on a processor, continues where it stopped, and sees what does not hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.fixture
def modules(benchmark: Callable[[str], ModuleType]) -> Any:
    return tuple(benchmark(name) for name in ("gpu_cases", "gpu_truth", "gpu_speed"))


@pytest.mark.slow
def test_the_truth_holds_here_and_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    first = run("truth", "report", "--smoke", "--out", str(tmp_path))
    assert first.returncode == 0, first.stdout + first.stderr
    cases = json.loads((tmp_path / "truth.json").read_text())["cases"]
    assert all(found["holds"] for found in cases.values() if "skipped" not in found) and len(cases) > 20
    assert {name.split()[0] for name in cases} >= {"norms", "brute", "order", "doubtful", "repeated", "noise"}
    assert "## truth" in first.stdout and "## truth" in (tmp_path / "report.md").read_text()
    known = json.loads((tmp_path / "truth.json").read_text())
    known["cases"]["noise"] = {"holds": False, "planted": True}
    (tmp_path / "truth.json").write_text(json.dumps(known))
    again = run("truth", "--smoke", "--out", str(tmp_path))
    assert again.returncode == 1 and "DOES NOT HOLD: noise" in again.stderr and again.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_shows_what_was_counted() -> None:
    done = run()
    assert done.returncode == 0 and "There is no GPU here" in done.stdout
    counted = json.loads((ROOT / "tests" / "gpu" / "counted.json").read_text())
    for model, each in counted.items():
        assert f"| {model} | {each['plain']['kernels']:,} → {each['private']['kernels']:,} |" in done.stdout


def test_a_case_that_fails_is_kept_tried_again_and_stops_no_other(modules: Any, tmp_path: Path) -> None:
    cases, *_ = modules
    tries: list[str] = []

    def fails() -> dict[str, Any]:
        tries.append("fails")
        raise RuntimeError("no such kernel")

    def works() -> dict[str, Any]:
        tries.append("works")
        return {"holds": True}

    def results(here: dict[str, Any]) -> Any:
        return cases.Results.at(tmp_path / "truth.json", "truth", here)

    both = [cases.Case("fails", fails), cases.Case("works", works)]
    first = results({"device": "a"})
    assert first.run(both, 1.0, False) == 0 and len(first.broken) == 1 and "no such kernel" in first.broken[0]
    assert results({"device": "a"}).run(both, 1.0, False) == 0 and tries == ["fails", "works", "fails"]
    assert results({"device": "a"}).run([both[0]], -1.0, False) == 1, "its time is over"
    results({"device": "b"}).run(both, 1.0, False)
    assert tries.count("works") == 2, "another device has its own results"


def test_clipping_that_does_not_hold_is_seen(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, truth, _ = modules
    setting = cases.Setting(torch.device("cpu"), True)
    assert truth.order_of_rows("captioner/toy", setting)["holds"]
    honest = truth.clip_of

    def twice(records: int, precision: str = "bf16") -> Any:
        clip = honest(records, precision)
        clip.rule = replace(clip.rule, bound=2.0)
        return clip

    monkeypatch.setattr(truth, "clip_of", twice)
    found = truth.order_of_rows("captioner/toy", setting)
    assert not found["holds"] and found["one_record"] > 1
    monkeypatch.setattr(truth, "SIGMA", 1.0)
    assert truth.noise_is_what_is_planned(setting)["holds"]
    draw = truth.AESNoise.draw
    monkeypatch.setattr(truth.AESNoise, "draw", lambda self, *where: 0.9 * draw(self, *where))
    assert not truth.noise_is_what_is_planned(setting)["holds"]


def test_speed_is_measured_through_the_engine_of_a_run(modules: Any) -> None:
    cases, _, speed = modules
    setting = cases.Setting(torch.device("cpu"), True)
    found = speed.micro_batch("classifier/toy", 4, setting)
    assert found["private_over_plain"] > 0 and found["records_per_second"] > 0
    updates = dict((case.name, case.act()) for case in list(speed.once_per_step(setting))[:2])
    assert {name.split()[1] for name in updates} == {"chacha20", "aes-256-ctr"}
    assert all(found["elements"] > 0 and found["noise_milliseconds"] > 0 for found in updates.values())
