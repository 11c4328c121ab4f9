"""`run.compile`: the blocks of a public phase run under torch.compile, and those of the private phase after it as code
that is recorded from the isolated pass, whether weights are whole or sharded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.accounting.certificate.verify import verify
from tests.support import forking
from tests.support.launching import ROOT, Launch, ended, environment
from tests.support.runs import final_weights

Make = Callable[..., tuple[Launch, Path]]


def public_losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["phase"] != "private" and "loss" in line]


def notes(run_dir: Path) -> str:
    return (run_dir / "logs" / "private" / "notes.jsonl").read_text()


WITHOUT_A_COMPILER = """
import sys
import torch
from murmuration.train.clip import compiled
from murmuration.train.commands.train import main
from tests.support.recorded_blocks import operation_by_operation
real = torch.compile
def compile(*given, **how):
    print("a public block is traced")
    return real(*given, **how, backend="aot_eager")
torch.compile, compiled.by_inductor = compile, operation_by_operation
sys.exit(main())
"""
"""What is traced and recorded runs operation by operation: the C++ compiler would take a minute."""


def compiled(config: dict[str, Any]) -> None:
    config["run"]["compile"] = "blocks"
    warm = config["phases"][0]  # the monitor differentiates twice, which traced code cannot
    warm["monitor"] = {"path": warm["data"]["path"], "public": True, "records": 16, "probes": 1}


def require_same(run_dir: Path, whole: Path, far: float = 1e-5) -> None:
    assert public_losses(run_dir) == pytest.approx(public_losses(whole), rel=max(far, 1e-5))
    found, expected = final_weights(run_dir), final_weights(whole)
    # Fused operations round otherwise.
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=far) for name in expected)
    assert verify(run_dir).epsilon == verify(whole).epsilon


@pytest.mark.parametrize(("engine", "ranks"), [("deepspeed", 1), ("fsdp2", 2)])
def test_a_compiled_run_trains_the_same_weights(
    launch: Make, finished: tuple[Path, str], engine: str, ranks: int
) -> None:
    """Each rank traces: where weights are whole, one does what two would."""
    job, run_dir = launch("recording", compiled)
    command = [sys.executable, "-c", WITHOUT_A_COMPILER, "--config", str(job.config), "--set", f"run.engine={engine}"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    code, output = ended(forking.start(command, ranks=ranks, cwd=ROOT, env=environment(), **streams))
    assert code == 0 and "a public block is traced" in output, output
    require_same(run_dir, finished[0], far=1e-5 if ranks == 2 else 2e-4)  # one rank adds up in another order
    assert "blocks run as compiled code" in notes(run_dir) and "as written run" not in notes(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_so_does_the_compiler_s_own_code(
    launch: Make, finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    job, run_dir = launch("compiling", compiled, arguments=["--set", f"run.engine={engine}"])
    code, output = job.run()
    assert code == 0, output
    assert list((tmp_path / "compiled").rglob("*.py")), "what the compiler wrote"
    require_same(run_dir, finished[0])
    assert "blocks run as compiled code" in notes(run_dir) and "as written run" not in notes(run_dir)


@pytest.mark.slow
def test_a_killed_compiled_run_goes_on_as_it_was_and_another_setting_is_another_config(
    launch: Make, finished: tuple[Path, str]
) -> None:
    job, run_dir = launch("killed", lambda config: config["run"].update(compile="blocks"))
    job.killed(run_dir, 5)
    job.arguments = ["--set", "run.compile=off"]
    code, output = job.run()
    assert code == 5 and "--new-segment" in output, "a step that is made again may differ by rounding"
    job.arguments = []
    code, output = job.run()
    assert code == 0, output
    found, expected = final_weights(run_dir), final_weights(finished[0])
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)
