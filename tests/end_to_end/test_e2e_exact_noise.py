"""`run.noise: "exact"` through real launches: the same whole numbers wherever the weights lie, and after a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.ledger.history import History
from murmuration.accounting.noise import ExactGrid
from tests.support.launching import Launch, committed
from tests.support.runs import SMALL_STEPS, final_weights

Make = Callable[..., tuple[Launch, Path]]
EXACT = ["--set", 'run.noise="exact"']


def noise_lines(run_dir: Path) -> list[dict[str, Any]]:
    """What the ledger says of the noise on gradients and metrics at each commit."""
    return [{"noise": each["noise"], "metrics": each["metrics"]} for each in committed(run_dir)]


@pytest.fixture
def alone(launch: Make) -> Path:
    """By one process, in plain PyTorch."""
    job, run_dir = launch("alone", launcher="python", arguments=[*EXACT, "--set", 'run.engine="local"'])
    code, output = job.run()
    assert code == 0, output
    return run_dir


LAYOUTS = {
    "ZeRO-1": ["--set", "zero_optimization.stage=1"],
    "ZeRO-0": ["--set", "zero_optimization.stage=0"],
    "ZeRO-2": ["--set", "zero_optimization.stage=2"],
    "ZeRO-3": ["--set", "zero_optimization.stage=3"],
    "FSDP2": ["--set", 'run.engine="fsdp2"'],
}


@pytest.mark.parametrize("layout", ["ZeRO-1", *(pytest.param(n, marks=pytest.mark.slow) for n in list(LAYOUTS)[1:])])
def test_two_processes_draw_what_one_draws_and_the_certificate_says_exact(
    launch: Make, alone: Path, layout: str
) -> None:
    job, run_dir = launch("two", arguments=[*EXACT, *LAYOUTS[layout]])
    job.stopped(run_dir, 5)
    code, output = job.run()
    assert code == 0, output

    assert noise_lines(run_dir) == noise_lines(alone) and len(noise_lines(run_dir)) == SMALL_STEPS
    for facts in noise_lines(run_dir):
        assert facts["noise"]["generator"] == "aes-256-ctr-exact"
        assert all(part["grid"] > 0 for part in (facts["noise"], *facts["metrics"])) and len(facts["metrics"]) == 2
    found, expected = final_weights(run_dir), final_weights(alone)
    # The same noise to the last bit; sums of two processes round otherwise than those of one.
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)

    verdict = verify(run_dir)
    plan = next(iter(History.read(run_dir / "ledger.jsonl")[0].plans.values()))
    assert verdict.epsilon == verify(alone).epsilon <= 8.0 and plan.noise == ExactGrid(1e-6)
    told = json.loads((run_dir / "certificate.json").read_text())
    assert "rounded to a grid" in told["mechanism"]
    assert not any("floating-point" in text for text in told["known_deviations"])


@pytest.mark.slow
def test_norms_that_adapt_take_their_grid_along(launch: Make) -> None:
    def adaptive(config: dict[str, Any]) -> None:
        clip = {"kind": "flat", "norm": 3.0, "adaptive": {"quantile": 0.7, "learning_rate": 0.5}}
        config["phases"][1]["privacy"] |= {"clip": clip, "noise_multiplier": 2.0, "release": []}

    job, run_dir = launch("adaptive", adaptive, launcher="python", arguments=[*EXACT, "--set", 'run.engine="local"'])
    code, output = job.run()
    assert code == 0, output
    for facts in noise_lines(run_dir):
        noise = facts["noise"]
        assert 0.49e-6 < noise["grid"] * noise["elements"] ** 0.5 / (noise["std"] / 2.0) <= 1e-6
    assert len({facts["noise"]["std"] for facts in noise_lines(run_dir)}) == SMALL_STEPS
    assert verify(run_dir).epsilon > 0
