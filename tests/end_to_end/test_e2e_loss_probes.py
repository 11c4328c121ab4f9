"""Probes of the loss through real launches: two processes, killed before a probe, find the rates that one finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from murmuration.accounting.certificate.verify import verify
from murmuration.train.optim.probed_rate import RELEASED
from murmuration.train.storage.checkpoint import Checkpoints
from tests.support.launching import Launch, committed, opened_steps
from tests.support.runs import SMALL_STEPS, final_weights

Make = Callable[..., tuple[Launch, Path]]
EVERY = 3
SETTINGS = ["--set", f"phases.1.privacy.loss_probes={json.dumps({'every': EVERY, 'bound': 1.0})}"]
SETTINGS += ["--set", "phases.1.schedule.shape=constant", "--set", "phases.1.schedule.warmup=0"]
SETTINGS += ["--set", "run.checkpoint_every=5"]


def told(run_dir: Path) -> dict[int, dict[str, float]]:
    """What the run published of its probes, by step."""
    lines = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    names = ("learning_rate_factor", *RELEASED)
    return {line["step"]: {name: line[name] for name in names} for line in lines if RELEASED[0] in line}


def test_two_processes_killed_before_a_probe_find_what_one_finds(launch: Make) -> None:
    alone, alone_dir = launch("alone", launcher="python", arguments=[*SETTINGS, "--set", 'run.engine="local"'])
    code, output = alone.run()
    assert code == 0, output

    job, run_dir = launch("two", arguments=[*SETTINGS, "--set", "zero_optimization.stage=1"])
    job.killed(run_dir, 7)
    newest = Checkpoints.newest(run_dir / "checkpoints")
    assert newest is not None and newest.position.step == 5, "the next step probes the move that the fifth made"
    assert len(opened_steps(run_dir)) < SMALL_STEPS, "it was over before it could be killed"
    code, output = job.run()
    assert code == 0, output

    found, expected = told(run_dir), told(alone_dir)
    assert list(found) == list(expected) == list(range(EVERY, SMALL_STEPS + 1, EVERY))
    for step, values in expected.items():
        # The same noise; sums of two processes round otherwise than those of one.
        assert found[step] == pytest.approx(values, rel=1e-3, abs=1e-4)
    assert len({values["learning_rate_factor"] for values in expected.values()}) > 1, "the rate moves"
    weights, others = final_weights(run_dir), final_weights(alone_dir)
    assert all(torch.allclose(weights[name], others[name], rtol=1e-3, atol=1e-4) for name in others)
    assert len(committed(run_dir)[0]["metrics"]) == 4, "every step is charged with both sums"
    assert verify(run_dir).epsilon == verify(alone_dir).epsilon <= 8.0
