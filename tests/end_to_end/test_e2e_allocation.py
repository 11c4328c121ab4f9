"""Random allocation through real launches: the same draws by one process and by two that are killed within an epoch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.history import History
from murmuration.accounting.sampling import RandomAllocation
from tests.support import forking
from tests.support.launching import ROOT, TIMEOUT, Launch, committed, environment, ledger_lines
from tests.support.runs import SMALL_STEPS, account, final_weights

Make = Callable[..., tuple[Launch, Path]]
SLOTS, SAVED = 6, 4
ALLOCATED = [
    "--set", 'phases.1.privacy.sampling="allocation"', "--set", "phases.1.privacy.expected_batch=100",
    "--set", f"run.checkpoint_every={SAVED}",
]  # fmt: skip


@pytest.mark.slow
def test_two_processes_killed_within_an_epoch_draw_what_one_draws_and_pay_once(launch: Make) -> None:
    alone_job, alone = launch("alone", launcher="python", arguments=[*ALLOCATED, "--set", 'run.engine="local"'])
    code, output = alone_job.run()
    assert code == 0, output
    job, run_dir = launch("two", arguments=ALLOCATED)
    job.killed(run_dir, SAVED + 1)
    code, output = job.run()
    assert code == 0, output

    assert committed(run_dir) == committed(alone) and len(committed(run_dir)) == SMALL_STEPS
    history, _ = History.read(run_dir / "ledger.jsonl")
    (plan,) = history.plans.values()
    assert (
        plan.sampling == RandomAllocation(SLOTS)
        and len(history.segments) == 1
        and any(x["kind"] == "resume" for x in ledger_lines(run_dir))
    )
    assert all(
        facts["sampling"]["rule"]["slots"] == SLOTS and len(facts["metrics"]) == 2 for facts in committed(run_dir)
    )
    assert all(facts["noise"]["divisor"] == plan.records / SLOTS for facts in committed(run_dir))
    epochs = [Event(1 / SLOTS, plan.effective_noise_multiplier, SMALL_STEPS // SLOTS, slots=SLOTS)]
    assert history.charged() == epochs
    found, expected = final_weights(run_dir), final_weights(alone)
    # The same noise to the last bit; sums of two processes round otherwise than those of one.
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)
    assert verify(run_dir).epsilon == verify(alone).epsilon == epsilon(epochs, plan.delta) <= 8.0
    told = account("verify", str(run_dir))
    assert told.returncode == 0, told.stdout + told.stderr
    assert "every record takes part in one step" in json.loads((run_dir / "certificate.json").read_text())["mechanism"]


@pytest.mark.slow
def test_a_new_segment_within_an_epoch_pays_for_that_epoch_again(launch: Make) -> None:
    job, run_dir = launch("changed", launcher="python", arguments=[*ALLOCATED, "--set", 'run.engine="local"'])
    job.stopped(run_dir, SAVED + 1)
    job.arguments += ["--set", "phases.1.schedule.peak=1e-4", "--new-segment", "another rate"]
    code, output = job.run()
    assert code == 0, output
    history, _ = History.read(run_dir / "ledger.jsonl")
    first, second = history.segments
    assert 0 < second.from_step < SLOTS and first.from_step == 0
    assert sum(event.count for event in history.charged()) == 3
    assert verify(run_dir).epsilon == history.epsilon()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"), [(["--rate", "1"], "--rate 1 is not 1 over"), (["--replay"], "a replay counts on Poisson")]
)
def test_what_an_audit_cannot_do_is_refused_in_a_sentence(launch: Make, kind: list[str], words: str) -> None:
    job, _ = launch("audited")
    command = [sys.executable, str(ROOT / "launch" / "audit.py"), *kind, "--config", str(job.config), *ALLOCATED[:4]]
    done = forking.run(command, cwd=job.cwd, capture_output=True, text=True, env=environment(), timeout=TIMEOUT)
    assert done.returncode == 2 and words in done.stderr, done.stdout + done.stderr
