"""How real runs end: whole, without budget, without privacy, and certified once more."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from murmuration.train.storage.checkpoint import Checkpoints, Loaded
from tests.support import forking
from tests.support.launching import ROOT, Launch, opened_steps
from tests.support.runs import SMALL_STEPS, account, different, state_of

Make = Callable[..., tuple[Launch, Path]]


def test_a_finished_run_says_so_and_changes_nothing(finished: tuple[Path, str], tmp_path: Path) -> None:
    """A copy of it, since a start stamps what it writes with its own time."""
    run_dir, config = finished[0], finished[0].parents[1] / "whole.json"
    copied = tmp_path / run_dir.relative_to(run_dir.parents[1])
    shutil.copytree(run_dir, copied)
    before = (copied / "ledger.jsonl").read_bytes()
    code, output = Launch(config, tmp_path, launcher="python").run()
    assert code == 0 and "is finished" in output, output
    assert (copied / "ledger.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_finished_run_is_certified_with_its_own_config_only_and_later_declared_tuning_is_charged(
    launch: Make,
) -> None:
    job, run_dir = launch("closed", lambda config: config["run"].update(keep_key=True), launcher="python")
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
    assert "without-dp/public_loss" in public and "without-dp/loss" not in public
    assert not opened_steps(run_dir)
    assert account("verify", str(run_dir)).returncode == 0


@pytest.mark.slow
def test_the_best_checkpoint_is_exported_and_claims_what_was_planned(launch: Make, tmp_path: Path) -> None:
    def choosy(config: dict[str, Any]) -> None:
        config["run"] |= {"keep_best": "public_loss", "keep_checkpoints": 1}
        # So fast that the loss on public records rises again.
        config["phases"][1]["schedule"] |= {"peak": 0.5, "warmup": 0}

    job, run_dir = launch("choosy", choosy)
    ended = job.end()
    assert ended.codes == [0, 0], ended.output
    losses = {entry.step: entry.public["public_loss"] for entry in Checkpoints.listed(run_dir / "checkpoints")}
    best = min(losses, key=lambda step: losses[step])
    assert best != max(losses), f"the test needs a best one that is not the last: {losses}"
    script = [sys.executable, str(ROOT / "launch" / "export.py"), str(run_dir)]
    for name, options, step in (("best", ["--best"], best), ("last", [], max(losses))):
        done = forking.run([*script, str(tmp_path / name), *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        kept = load_file(tmp_path / name / "model.safetensors")
        stored = Loaded.open(
            run_dir / "checkpoints" / f"phase01-step{step:08d}",
            next(entry.manifest_sha256 for entry in Checkpoints.listed(run_dir / "checkpoints") if entry.step == step),
        ).weights()
        assert different(kept, stored) == []
        verdict = json.loads(account("verify", str(tmp_path / name), "--json").stdout)
        assert verdict["claimed"] == 8.0 and "one may be chosen by outputs" in verdict["claimed_because"]
