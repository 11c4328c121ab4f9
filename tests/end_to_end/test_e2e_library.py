"""The library's torch optimizers on DeepSpeed and FSDP2 engines of two processes, against one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.accounting.certificate.verify import verify
from tests.end_to_end.library_worker import OPTIMIZERS, PAIRS, trained
from tests.support import forking
from tests.support.launching import ROOT, environment, printed, run_worker


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_worker("library_worker.py", str(folder)) | {"folder": folder}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_engine_moves_the_weights_as_one_process_does(tmp_path: Path, results: dict[str, Any], name: str) -> None:
    """Under the same promise."""
    expected = trained(tmp_path, stops=(4,), optimizer=OPTIMIZERS[name])
    alone = verify(tmp_path)
    for engine in (engine for engine, kind in PAIRS if kind == name):
        verdict = verify(results["folder"] / f"{engine}-{name}")
        assert verdict.epsilon == alone.epsilon and verdict.opened == verdict.committed == 4, engine
        for parameter, weights in results["weights"][f"{engine} {name}"].items():
            close = torch.allclose(torch.tensor(weights), torch.tensor(expected[parameter]), rtol=1e-5, atol=1e-6)
            assert close, (engine, parameter)


def test_an_optimizer_of_whole_parameters_is_refused_where_ranks_hold_parts(results: dict[str, Any]) -> None:
    refused = results["refused"]
    assert refused.pop("zero0") == "", "every rank holds all of them"
    assert all("Whitened may look at whole parameters, of which ranks hold parts" in said for said in refused.values())


def test_ranks_that_began_with_other_weights_train_those_of_the_first(results: dict[str, Any]) -> None:
    for engine, (one, other) in results["apart"].items():
        assert one == other, engine


@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_the_example_runs_on_two_ranks(tmp_path: Path, engine: str) -> None:
    command = [sys.executable, "-m", "docs.own_model", str(tmp_path / "run"), engine]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    output, errors = printed(forking.start(command, ranks=2, cwd=ROOT, env=environment(), **streams))
    assert "step 60/60" in output, output + errors
    verdict = verify(tmp_path / "run")
    assert verdict.opened == verdict.committed == 60 and 2.9 < verdict.epsilon <= 3
