"""`run.compile`: the blocks of a public phase run under torch.compile, and those of the private phase after it as code
that is recorded from the isolated pass; but not where weights are sharded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.accounting.certificate.verify import verify
from tests.support.launching import Launch
from tests.support.runs import final_weights

Make = Callable[..., tuple[Launch, Path]]


def public_losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["phase"] != "private" and "loss" in line]


def notes(run_dir: Path) -> str:
    return (run_dir / "logs" / "private" / "notes.jsonl").read_text()


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_compiled_run_trains_the_same_weights(
    launch: Make, finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    # Two thirds of the time would be a C++ compiler's own optimisation, of code that runs for a moment.
    quick = tmp_path / "g++"
    quick.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -O0\n')
    quick.chmod(0o700)
    monkeypatch.setenv("CXX", str(quick))

    def compiled(config: dict[str, Any]) -> None:
        config["run"] |= {"compile": "blocks", "engine": engine}
        warm = config["phases"][0]  # the monitor differentiates twice, which compiled code cannot
        warm["monitor"] = {"path": warm["data"]["path"], "public": True, "records": 16, "probes": 1}

    job, run_dir = launch("compiling", compiled)
    code, output = job.run()
    assert code == 0, output
    assert list((tmp_path / "compiled").rglob("*.py")), "what the compiler wrote"
    whole, _ = finished
    assert public_losses(run_dir) == pytest.approx(public_losses(whole), rel=1e-5)
    found, expected = final_weights(run_dir), final_weights(whole)
    # Fused operations round otherwise.
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)
    assert verify(run_dir).epsilon == verify(whole).epsilon
    told = "blocks run as compiled code" in notes(run_dir)
    assert told == (engine == "deepspeed") and "as written run" not in notes(run_dir)


@pytest.mark.slow
def test_a_killed_compiled_run_goes_on_as_it_was_and_another_setting_is_another_config(
    launch: Make, finished: tuple[Path, str]
) -> None:
    def compiled(config: dict[str, Any]) -> None:
        config["run"]["compile"] = "blocks"

    job, run_dir = launch("killed", compiled)
    job.killed(run_dir, 5)
    job.arguments = ["--set", "run.compile=off"]
    code, output = job.run()
    assert code == 5 and "--new-segment" in output, "a step that is made again may differ by rounding"
    job.arguments = []
    code, output = job.run()
    assert code == 0, output
    found, expected = final_weights(run_dir), final_weights(finished[0])
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)

    job, run_dir = launch("changed", compiled)
    job.killed(run_dir, 5)
    job.arguments = ["--set", "run.compile=off", "--new-segment", "no compiler here"]
    code, output = job.run()
    assert code == 0, output
    assert verify(run_dir).epsilon >= verify(finished[0]).epsilon, "steps that were opened stay charged"
