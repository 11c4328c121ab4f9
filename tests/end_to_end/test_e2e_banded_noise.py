"""Banded noise through real launches: the same noise wherever the weights lie, and after a stop within a block."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from murmuration.accounting.banded import BandedNoise
from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.ledger.history import History
from murmuration.train.storage.checkpoint import Checkpoints
from tests.end_to_end.test_e2e_exact_noise import LAYOUTS
from tests.support.launching import Launch, committed, opened_steps
from tests.support.runs import SMALL_STEPS, different, final_weights
from tests.support.whole_history import steps_of

Make = Callable[..., tuple[Launch, Path]]
BANDS = 4
BANDED = ["--set", f'phases.1.privacy.noise={{"kind": "banded", "bands": {BANDS}}}', "--set", "run.checkpoint_every=5"]


@pytest.fixture
def alone(launch: Make) -> Path:
    """By one process, in plain PyTorch."""
    job, run_dir = launch("alone", launcher="python", arguments=[*BANDED, "--set", 'run.engine="local"'])
    code, output = job.run()
    assert code == 0, output
    return run_dir


@pytest.mark.parametrize("layout", ["ZeRO-1", *(pytest.param(n, marks=pytest.mark.slow) for n in list(LAYOUTS)[1:])])
def test_two_processes_that_stop_in_a_block_add_what_one_adds(launch: Make, alone: Path, layout: str) -> None:
    job, run_dir = launch("two", arguments=[*BANDED, *LAYOUTS[layout]])
    job.stopped(run_dir, 5)
    code, output = job.run()
    assert code == 0, output

    assert committed(run_dir) == committed(alone) and len(committed(run_dir)) == SMALL_STEPS
    history, _ = History.read(run_dir / "ledger.jsonl")
    (plan,) = history.plans.values()
    assert isinstance(plan.noise, BandedNoise) and plan.sampling.parts == BANDS and len(history.segments) == 1
    for step, facts in enumerate(committed(run_dir), 1):
        added = plan.noise_std * plan.noise.spread(step)
        assert facts["noise"]["correlation"] == {"matrix": plan.noise.digest, "added": added}
        assert facts["sampling"]["rule"]["parts"] == BANDS and len(facts["metrics"]) == 2
    assert [event.count for event in history.charged()] == [SMALL_STEPS // BANDS]
    found, expected = final_weights(run_dir), final_weights(alone)
    # The same noise to the last bit; sums of two processes round otherwise than those of one.
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)
    assert verify(run_dir).epsilon == verify(alone).epsilon <= 8.0
    assert "take turns" in json.loads((run_dir / "certificate.json").read_text())["mechanism"]


def saved_steps(run_dir: Path) -> int:
    loaded = Checkpoints.newest(run_dir / "checkpoints")
    return 0 if loaded is None or loaded.position.phase == 0 else loaded.position.step


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ZeRO-1", "ZeRO-3"])
def test_two_processes_killed_in_the_middle_of_a_block_add_the_noise_that_they_would_have(
    launch: Make, layout: str
) -> None:
    """Checkpoints after steps 5 and 10, blocks of 1 to 4, 5 to 8 and 9 to 12. Killed before the first checkpoint, and
    behind step 5 in the middle of its block, whose first draw is of a key that the checkpoint has kept for it."""
    whole, straight = launch("whole", arguments=[*BANDED, *LAYOUTS[layout]])
    code, output = whole.run()
    assert code == 0, output

    job, run_dir = launch("killed", arguments=[*BANDED, *LAYOUTS[layout]])
    for opened in (3, 7):
        job.killed(run_dir, opened)
        assert len(opened_steps(run_dir)) < SMALL_STEPS, "it was over before it could be killed"
    assert saved_steps(run_dir) % BANDS, "it goes on at the beginning of a block"
    code, output = job.run()
    assert code == 0, output

    assert different(final_weights(run_dir), final_weights(straight)) == []
    assert committed(run_dir) == committed(straight) and len(committed(run_dir)) == SMALL_STEPS
    history, _ = History.read(run_dir / "ledger.jsonl")
    assert steps_of(run_dir).opened == steps_of(straight).opened and len(history.segments) == 1 and not history.faults
    assert [event.count for event in history.charged()] == [SMALL_STEPS // BANDS]
    assert verify(run_dir).epsilon == verify(straight).epsilon
