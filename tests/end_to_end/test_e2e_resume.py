"""Real runs that are stopped, copied, changed or started twice, and go on: the same, or charged, or refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.accounting.certificate.verify import verify
from tests.support.launching import TIMEOUT, Launch, ledger_lines, opened_steps
from tests.support.runs import SMALL_STEPS, TOY_STEPS, ZERO_3, account, final_weights, state_of, toy

Make = Callable[..., tuple[Launch, Path]]


WAYS: dict[str, dict[str, Any]] = {
    "stop file, from one process to ZeRO-3": {"launcher": "python", "arguments": ["--set", 'run.engine="local"']},
    "SIGTERM to the launcher": {"launcher": "deepspeed"},
    "SIGKILL": {},
}  # fmt: skip


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] * how.startswith("SIG")) for how in WAYS])
def test_stopped_and_resumed_ends_where_it_would_have(whole: Path, launch: Make, how: str) -> None:
    job, run_dir = launch("broken", toy, **WAYS[how])
    process = job.held(run_dir, 3)
    if how == "SIGTERM to the launcher":
        os.kill(process.pid, signal.SIGTERM)
    elif how == "SIGKILL":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        (run_dir / "stop").touch()
    output, _ = process.communicate(timeout=TIMEOUT)
    if how == "SIGKILL":
        assert state_of(run_dir) == "training; resume me if killed"
    other_engine = how.startswith("stop file")
    if other_engine:
        assert process.returncode == 75 and "start the same command again" in output, output
        assert state_of(run_dir) == "stopped, resume me"
        # By the real launcher: of the tests that are not slow, this one alone trains a run with it.
        sharded = [word for setting in ZERO_3 for word in ("--set", setting)]
        job = Launch(job.config, job.cwd, launcher="deepspeed", arguments=sharded)
    broken_at = len(opened_steps(run_dir))
    assert 3 <= broken_at < TOY_STEPS, "it was over before it could be stopped"

    code, output = job.run()
    assert code == 0, output
    lines = ledger_lines(run_dir)
    assert opened_steps(run_dir) == list(range(1, TOY_STEPS + 1)), "a step is missing or was charged twice"
    assert sum(line["kind"] == "commit" for line in lines) == TOY_STEPS
    assert any(line["kind"] == "resume" for line in lines)
    expected, got = final_weights(whole), final_weights(run_dir)
    # The same draws and the same noise; engines add gradients up in orders of their own.
    far = 2e-4 if other_engine else 0.0
    different = [name for name in expected if not torch.allclose(expected[name], got[name], rtol=0, atol=far)]
    assert not different, different
    assert account("verify", str(run_dir)).returncode == 0
    assert verify(run_dir).epsilon == verify(whole).epsilon


@pytest.mark.slow
def test_changed_config_is_refused_until_declared_and_then_charged(launch: Make) -> None:
    job, run_dir = launch("changed")
    job.killed(run_dir, 5)
    before = opened_steps(run_dir)

    job.arguments = ["--set", "phases.1.schedule.peak=0.0005"]
    code, output = job.run()
    assert code == 5 and "--new-segment" in output, output
    assert opened_steps(run_dir) == before

    job.arguments += ["--new-segment", "a lower learning rate"]
    code, output = job.run()
    assert code == 0, output
    segments = [line for line in ledger_lines(run_dir) if line["kind"] == "segment"]
    assert len(segments) == 2 and segments[1]["reason"] == "a lower learning rate"
    verdict = json.loads(account("verify", str(run_dir), "--json").stdout)
    again = segments[1]["from_step"]
    assert verdict["opened"] == len(before) + SMALL_STEPS - again, "a step of the old segment was not charged"


@pytest.mark.slow
def test_resume_must_and_never_are_obeyed(launch: Make) -> None:
    job, run_dir = launch("modes", launcher="python")
    job.arguments = ["--resume", "must"]
    code, output = job.run()
    assert code == 5 and "there is no run" in output, output
    (run_dir).mkdir(parents=True)
    (run_dir / "ledger.jsonl").touch()
    job.arguments = ["--resume", "never"]
    code, output = job.run()
    assert code == 5 and "has a run already" in output, output
