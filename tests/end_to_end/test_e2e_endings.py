"""How real runs end: whole, without budget, without privacy, and certified once more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.conftest import Launch, opened_steps
from tests.end_to_end.runs import SMALL_STEPS, account, state_of

Make = Callable[..., tuple[Launch, Path]]


def test_a_finished_run_says_so_and_changes_nothing(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    before = (run_dir / "ledger.jsonl").read_bytes()
    config = run_dir.parents[1] / "whole.json"
    code, output = Launch(config, run_dir.parents[1], launcher="python").run()
    assert code == 0 and "is finished" in output, output
    assert (run_dir / "ledger.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_finished_run_is_certified_with_its_own_config_only_and_later_declared_tuning_is_charged(
    launch: Make,
) -> None:
    job, run_dir = launch("closed", launcher="python")
    assert job.run()[0] == 0
    job.arguments = ["--set", "phases.1.schedule.peak=1e-5"]
    code, output = job.run()
    assert code == 5 and "trained with another config" in output, output
    tuning = '{"statement": "three learning rates", "mean": 3, "fixed": true}'
    job.arguments = ["--set", f"run.tuned_on_private_data={tuning}"]
    code, output = job.run()
    assert code == 0 and "will be claimed for the planned steps" in output, output
    job.arguments = []
    assert job.run()[0] == 0
    certificate = json.loads((run_dir / "certificate.json").read_text())
    assert certificate["tuned_on_private_data"][0]["statement"] == "three learning rates"
    assert certificate["claim"]["epsilon_claimed"] > certificate["claim"]["epsilon_rounded_up"]


@pytest.mark.slow
def test_the_budget_ends_a_run_before_it_is_passed(launch: Make) -> None:
    def tight(config: dict[str, Any]) -> None:
        config["phases"][1]["privacy"]["epsilon"] = 0.25
        config["phases"][1]["privacy"]["release"] = []

    job, run_dir = launch("tight", tight)
    code, output = job.run()
    assert code == 3, output
    done = opened_steps(run_dir)
    assert 3 < len(done) < SMALL_STEPS
    assert (run_dir / "checkpoints" / f"phase01-step{len(done):08d}").is_dir(), "the last paid step was not kept"
    assert state_of(run_dir) == "budget spent"
    verdict = json.loads(account("verify", str(run_dir), "--json").stdout)
    assert verdict["epsilon"] <= 0.25 and verdict["committed"] == len(done)
    assert job.run()[0] == 3, "the same command says the same again"


@pytest.mark.slow
def test_the_non_private_twin_says_so_everywhere_and_keeps_private_losses_private(launch: Make) -> None:
    job, run_dir = launch("twin", lambda config: config["run"].pop("debug_seed"), launcher="python")
    job.arguments = ["--set", "phases.1.privacy=null"]
    code, output = job.run()
    assert code == 0 and "NOT PRIVATE" in output, output
    certificate = json.loads((run_dir / "certificate.json").read_text())
    assert certificate["claim"]["private"] is False and certificate["claim"]["epsilon"] is None
    assert "NOT PRIVATE" in (run_dir / "report.html").read_text()
    public = EventAccumulator(str(run_dir / "tb" / "public")).Reload().Tags()["scalars"]
    assert "private/public_loss" in public and "private/loss" not in public
    assert not opened_steps(run_dir)
    assert account("verify", str(run_dir)).returncode == 0
