"""A real run with the monitor on: what is measured when, and what is promised of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.certificate.verify import verify
from murmuration.train.commands.dry_run import as_text, meaning
from murmuration.train.config.load import load
from tests.support import forking
from tests.support.launching import TIMEOUT, Launch, environment, ledger_lines

pytestmark = pytest.mark.slow
Make = Callable[..., tuple[Launch, Path]]


def watched(config: dict[str, Any]) -> None:
    private = config["phases"][1]
    private["privacy"] |= {"release": [], "noise_multiplier": 0.6, "epsilon": 100.0}
    private["monitor"] = {"path": private["evaluation"]["path"], "public": True, "records": 24, "probes": 2, "every": 2}
    private["steps"] = 6
    del config["run"]["debug_seed"]
    config["run"]["checkpoint_every"] = 2


def test_the_monitor_speaks_at_durable_checkpoints(launch: Make) -> None:
    started, run_dir = launch("watched", watched)
    code, output = started.run()
    assert code == 0, output
    lines = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    found = {line["step"]: line for line in lines if "monitor_hessian_trace" in line}
    # Checkpoints lie at 0, 2, 4 and 6; every second one is measured.
    assert sorted(found) == [0, 4]
    for line in found.values():
        assert line["monitor_gradient_norm_squared"] > 0
        assert line["monitor_sigma"] == pytest.approx(0.6) and line["monitor_batch"] == pytest.approx(48, rel=1e-3)
        assert line["monitor_clip_factor"] > 0 and -1 <= line["monitor_clip_alignment"] <= 1.001
    assert "monitor on 24 public records" in output and "gain/record" in output
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run_dir / "tb" / "public"))
    board.Reload()
    assert [point.step for point in board.Scalars("dp/monitor_hessian_trace")] == [0, 4]
    assert not [tag for tag in board.Tags()["scalars"] if "gradient_norm" in tag and "monitor" not in tag]

    verdict = verify(run_dir)
    assert verdict.opened == 6 and verdict.epsilon <= 100


def test_private_records_are_no_data_for_the_monitor(launch: Make) -> None:
    def peeking(config: dict[str, Any]) -> None:
        watched(config)
        config["phases"][1]["monitor"]["path"] = config["phases"][1]["data"]["path"]

    started, run_dir = launch("peeking", peeking, ranks=1, launcher="python")
    code, output = started.run()
    assert code == 2 and "phases.1.monitor.path" in output and "belongs to the private records" in output
    assert not run_dir.exists()


def test_the_four_way_study_as_a_launched_command(launch: Make, tmp_path: Path) -> None:
    started, _ = launch("studied")
    folder = tmp_path / "study"
    options = ["--noise-multiplier", "0.5", "--steps", "4", "--rates", "1e-3", "4e-3", "--records", "32"]
    script = [sys.executable, "-m", "murmuration.contrib.four_way", "--config", str(started.config)]
    command = [*script, "--out", str(folder), *options]
    how: dict[str, Any] = {"capture_output": True, "text": True, "env": environment(), "timeout": TIMEOUT}
    done = forking.run([*command, "--phase", "warm-start"], ranks=2, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    study = json.loads((folder / "four_way.json").read_text())
    assert "NOT PRIVATE" in study["marked"] and study["marked"] in done.stdout
    assert set(study["best"]) == {"neither", "clipping only", "noise only", "both"}
    assert len(study["curves"]) == 8 and (folder / "four_way.png").read_bytes()[:4] == b"\x89PNG"
    refused = forking.run([*command, "--phase", "private"], **how)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["lora", "bias", "all"])
def test_public_measurements_work_where_no_rank_holds_the_model_whatever_is_trained(
    launch: Make, trainable: str
) -> None:
    def parted(config: dict[str, Any]) -> None:
        watched(config)
        config["phases"][1]["trainable"] = trainable
        config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}

    job, run_dir = launch(trainable, parted)
    ended = job.end()
    assert ended.codes == [0, 0], ended.output
    lines = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    private = [line for line in lines if line["phase"] == "private"]
    assert [line["step"] for line in private if line.get("monitor_gradient_norm_squared", 0) > 0] == [0, 4]
    assert [line["step"] for line in private if "zero_shot_colour" in line] == [0, 2, 4, 6]
    (elements,) = {line["facts"]["noise"]["elements"] for line in ledger_lines(run_dir) if line["kind"] == "commit"}
    plan = as_text(meaning(load(job.config, [])))
    assert f"{elements:,} trainable ({trainable})" in plan, plan
    assert verify(run_dir).committed == 6
