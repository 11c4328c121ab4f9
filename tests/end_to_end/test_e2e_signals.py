"""Real runs that are told to stop, or that must: saved, in agreement, with a reason; bitwise the same afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from murmuration.train.storage.checkpoint import Checkpoints
from tests.support.launching import Ended, Launch, alive, opened_steps, wait_for
from tests.support.runs import TOY_STEPS, final_weights, nothing_lost_and_nothing_twice, state_of, toy

Make = Callable[..., tuple[Launch, Path]]


def finish(job: Launch) -> None:
    ended = job.end()
    assert ended.codes == [0, 0], ended.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_any_one_rank_stops_all_and_saves(whole: Path, launch: Make, number: signal.Signals) -> None:
    job, run_dir = launch("told", toy)
    running = job.held(run_dir, 3)
    os.kill(running.pids[1], number)
    ended = Ended.of(running)
    assert ended.codes == [75, 75] and f"stopped by {number.name}" in ended.output, ended.output
    assert state_of(run_dir) == "stopped, resume me"
    done = opened_steps(run_dir)
    assert done[-1] < TOY_STEPS
    loaded = Checkpoints.newest(run_dir / "checkpoints")
    assert loaded is not None and loaded.position.step in (done[-1] - 1, done[-1]), "what was done is saved"
    finish(job)
    nothing_lost_and_nothing_twice(run_dir, whole)


@pytest.mark.slow
def test_a_deadline_stops_and_saves(whole: Path, launch: Make) -> None:
    job, run_dir = launch("late", toy)
    ended = job.end(arguments=["--set", "run.stop_after_minutes=0.0001"])
    assert ended.codes == [75, 75] and "stopped by run.stop_after_minutes" in ended.output, ended.output
    assert state_of(run_dir) == "stopped, resume me"
    finish(job)
    nothing_lost_and_nothing_twice(run_dir, whole)


@pytest.mark.slow
def test_a_frozen_rank_ends_the_job_with_its_number_and_not_in_a_hang(whole: Path, launch: Make) -> None:
    job, run_dir = launch("frozen", toy)
    job.arguments = ["--set", "run.stall_seconds=20"]
    running = job.held(run_dir, 3, together=False)
    os.kill(running.pids[1], signal.SIGSTOP)
    os.kill(running.pids[0], signal.SIGCONT)
    try:
        wait_for(lambda: not alive(running.pids[0]), running)
    finally:
        os.kill(running.pids[1], signal.SIGKILL)
    ended = Ended.of(running)
    assert ended.codes == [75, -9], ended.output
    assert "rank 1 gave no sign of life" in ended.output and "run.stall_seconds" in ended.output, ended.output
    assert state_of(run_dir) == "stopped, resume me"
    job.arguments = []
    finish(job)
    nothing_lost_and_nothing_twice(run_dir, whole)


@pytest.mark.slow
def test_weights_that_stop_being_numbers_end_the_run_before_a_good_checkpoint_is_overwritten(launch: Make) -> None:
    job, run_dir = launch("diverged", toy)
    ended = job.end(arguments=["--set", "phases.1.schedule.peak=3e38"])
    assert 4 in ended.codes and "the weights are no longer finite; resume with a lower" in ended.output, ended.output
    loaded = Checkpoints.newest(run_dir / "checkpoints")
    assert loaded is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in loaded.weights().values())
    ended = job.end(arguments=["--new-segment", "a lower learning rate"])
    assert ended.codes == [0, 0], ended.output
    assert all(bool(torch.isfinite(tensor).all()) for tensor in final_weights(run_dir).values())
