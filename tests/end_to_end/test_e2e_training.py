"""A whole run through real launchers with two processes: finished, stopped, killed, resumed, verified."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.conftest import ROOT, Launch, environment, ledger_lines, opened_steps, wait_for
from train.checkpoint import Loaded

Make = Callable[..., tuple[Launch, Path]]
STEPS = 12


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    pointer = json.loads((run_dir / "checkpoints" / "latest").read_text())
    return Loaded.open(run_dir / "checkpoints" / pointer["folder"], pointer["manifest_sha256"]).weights()


def account(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch" / "account.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_config: dict[str, Any]) -> tuple[Path, str]:
    """An uninterrupted run by `deepspeed`, from a folder that is not the repository's."""
    folder = tmp_path_factory.mktemp("finished")
    config = json.loads(json.dumps(small_config))
    (folder / "whole.json").write_text(json.dumps(config))
    code, output = Launch(folder / "whole.json", folder).run()
    assert code == 0, output
    return folder / "runs" / "whole", output


def test_run_directory_holds_what_the_design_lists(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    for name in ("ledger.jsonl", "certificate.json", "certificate.md", "report.html", "run_state.json", "checkpoints"):
        assert (run_dir / name).exists(), name
    assert json.loads((run_dir / "run_state.json").read_text())["status"] == "done"
    assert not (run_dir / "secret" / "run.key").exists(), "the run key outlived the final certificate"
    for private in (run_dir / "secret", run_dir / "tb" / "private"):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / "logs" / "private.jsonl").stat().st_mode) == 0o600


def test_ledger_has_each_step_once_with_the_facts_of_the_acting_parts(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    lines = ledger_lines(run_dir)
    assert opened_steps(run_dir) == list(range(1, STEPS + 1))
    commits = [line for line in lines if line["kind"] == "commit"]
    assert [line["step"] for line in commits] == list(range(1, STEPS + 1))
    weights = sum(t.numel() for n, t in final_weights(run_dir).items() if n in trainable_names(run_dir))
    for line in commits:
        assert line["facts"]["noise"]["elements"] == weights
        assert line["facts"]["sampling"]["threshold"] == round(48 / 600 * 2**32)
        assert [metric["name"] for metric in line["facts"]["metrics"]] == ["loss", "clipped"]
    assert len({line["facts"]["sampling"]["digest"] for line in commits}) == STEPS
    assert not any(re.search(r"\d{4}-\d\d-\d\d|time", json.dumps(line)) for line in lines if line["kind"] != "run")


def trainable_names(run_dir: Path) -> set[str]:
    pointer = json.loads((run_dir / "checkpoints" / "latest").read_text())
    loaded = Loaded.open(run_dir / "checkpoints" / pointer["folder"], pointer["manifest_sha256"])
    return set(loaded.names("weights"))


def test_verify_agrees_and_names_a_changed_line(finished: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, output = finished
    answer = account("verify", str(run_dir), "--json")
    assert answer.returncode == 0, answer.stderr
    verdict = json.loads(answer.stdout)
    certificate = json.loads((run_dir / "certificate.json").read_text())
    assert abs(verdict["epsilon"] - certificate["claim"]["epsilon"]) < 1e-6
    assert verdict["epsilon"] <= 8
    assert "NOT PRIVATE (debug)" in output and "NOT PRIVATE (debug)" in certificate["claim"]["statement"]

    copy = tmp_path / "copy"
    copy.mkdir()
    content = bytearray((run_dir / "ledger.jsonl").read_bytes())
    position = content.index(b'"std"')
    content[position + 7] ^= 1
    (copy / "ledger.jsonl").write_bytes(content)
    refused = account("verify", str(copy))
    line = content[:position].count(b"\n") + 1
    assert refused.returncode != 0 and f"line {line}:" in refused.stderr


def test_public_sinks_show_no_private_quantity(finished: tuple[Path, str]) -> None:
    """Contract 16: losses, norms and batch sizes of private records reach private sinks alone."""
    run_dir, output = finished
    board = EventAccumulator(str(run_dir / "tb" / "public")).Reload()
    public = board.Tags()["scalars"]
    times = {event.wall_time for tag in public for event in board.Scalars(tag)}
    assert len(times) == 1, "the times of private steps tell their batch sizes"
    private = EventAccumulator(str(run_dir / "tb" / "private")).Reload()
    assert {"private/epsilon", "private/lr", "private/public_loss", "private/update_snr"} <= set(public)
    # Released with noise, charged with the step's gradient: these may be seen.
    assert {"private/noised_loss", "private/noised_clipped"} <= set(public)
    assert {"private/loss", "private/records", "private/gradient_norm"} <= set(private.Tags()["scalars"])
    assert not {"private/loss", "private/records", "private/gradient_norm", "private/clipped_fraction"} & set(public)
    secret = [json.loads(line) for line in (run_dir / "logs" / "private.jsonl").read_text().splitlines()]
    shown = output + (run_dir / "report.html").read_text() + (run_dir / "logs" / "public.jsonl").read_text()
    for entry in secret:
        assert f"{entry['loss']:.6f}"[:8] not in shown
    assert "samples/s (timed on synthetic records)" in output


def test_the_same_weights_by_torchrun_from_elsewhere(finished: tuple[Path, str], launch: Make) -> None:
    job, run_dir = launch("torchrun", launcher="torchrun")
    code, output = job.run()
    assert code == 0, output
    expected, got = final_weights(finished[0]), final_weights(run_dir)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("how", ["SIGTERM to the launcher", "SIGKILL", "stop file, from ZeRO-3 to 1"])
def test_stopped_and_resumed_ends_where_it_would_have(finished: tuple[Path, str], launch: Make, how: str) -> None:
    job, run_dir = launch("broken")
    other_stage = "ZeRO-3" in how
    if other_stage:  # weights themselves are sharded, and none is so small that it is kept whole
        job.arguments = ["--set", "zero_optimization.stage=3"]
        job.arguments += ["--set", "zero_optimization.stage3_param_persistence_threshold=0"]
    process = job.start()
    wait_for(lambda: len(opened_steps(run_dir)) >= 5, process)
    if how == "SIGTERM to the launcher":
        os.kill(process.pid, signal.SIGTERM)
    elif how == "SIGKILL":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        (run_dir / "stop").touch()
    output, _ = process.communicate(timeout=120)
    if how.startswith("stop file"):
        assert process.returncode == 75 and "start the same command again" in output, output
        assert json.loads((run_dir / "run_state.json").read_text())["status"] == "stopped, resume me"
    broken_at = len(opened_steps(run_dir))
    assert 5 <= broken_at < STEPS, "it was over before it could be stopped"

    job.arguments = []
    code, output = job.run()
    assert code == 0, output
    lines = ledger_lines(run_dir)
    assert opened_steps(run_dir) == list(range(1, STEPS + 1)), "a step is missing or was charged twice"
    assert sum(line["kind"] == "commit" for line in lines) == STEPS
    assert any(line["kind"] == "resume" for line in lines)
    expected, got = final_weights(finished[0]), final_weights(run_dir)
    # Stages add the public phase's gradients up in orders of their own.
    far = 2e-4 if other_stage else 0.0
    different = [name for name in expected if not torch.allclose(expected[name], got[name], rtol=0, atol=far)]
    assert not different, different
    assert account("verify", str(run_dir)).returncode == 0


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
def test_resume_on_one_process_gives_the_same_batches_noise_and_nearly_the_same_weights(
    finished: tuple[Path, str], launch: Make
) -> None:
    job, run_dir = launch("elastic")
    process = job.start()
    wait_for(lambda: len(opened_steps(run_dir)) >= 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    job.launcher = "python"
    code, output = job.run()
    assert code == 0, output
    digests = [
        [line["facts"]["sampling"]["digest"] for line in ledger_lines(folder) if line["kind"] == "open"]
        for folder in (finished[0], run_dir)
    ]
    assert digests[0] == digests[1]
    expected, got = final_weights(finished[0]), final_weights(run_dir)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=2e-4)


@pytest.mark.slow
def test_changed_config_is_refused_until_declared_and_then_charged(launch: Make) -> None:
    job, run_dir = launch("changed")
    process = job.start()
    wait_for(lambda: len(opened_steps(run_dir)) >= 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
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
    assert verdict["opened"] == len(before) + STEPS - again, "a step of the old segment was not charged"


@pytest.mark.slow
def test_a_second_process_on_the_same_directory_is_refused_while_the_first_lives(launch: Make) -> None:
    job, run_dir = launch("twice")
    process = job.start()
    wait_for(lambda: len(opened_steps(run_dir)) >= 1, process)
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        code, output = job.run()
    finally:
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert code == 5 and "in use by another process" in output, output


def test_export_takes_weights_and_certificate_and_never_the_key(finished: tuple[Path, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    out = tmp_path / "out"
    script = [sys.executable, str(ROOT / "launch" / "export.py"), str(run_dir)]
    (run_dir / "certificate.md").write_text("(0.001, 0)-differential privacy")  # pages are not what is verified
    done = subprocess.run([*script, str(out)], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert (out / "NOT_PRIVATE.txt").read_text().startswith("NOT PRIVATE (debug)")
    exported = load_file(out / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in final_weights(run_dir).items())
    assert account("verify", str(out)).returncode == 0, "an export carries what its claim needs"
    assert "(0.001, 0)" not in (out / "certificate.md").read_text()

    # A key that occurs anywhere in what would leave: nothing may be written.
    (run_dir / "secret" / "run.key").write_bytes((out / "model.safetensors").read_bytes()[-32:])
    refused = subprocess.run([*script, str(tmp_path / "leak")], capture_output=True, text=True, env=environment())
    assert refused.returncode == 2 and "contains the run key" in refused.stderr
    assert not (tmp_path / "leak").exists()
    inside = subprocess.run([*script, str(run_dir / "out")], capture_output=True, text=True, env=environment())
    assert inside.returncode == 2 and "secret folder" in inside.stderr


@pytest.mark.slow
def test_a_copied_run_directory_goes_on_with_new_keys_and_every_step_charged(launch: Make, tmp_path: Path) -> None:
    job, run_dir = launch("original")
    process = job.start()
    wait_for(lambda: len(opened_steps(run_dir)) >= 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    copy = tmp_path / "copy-run"
    shutil.copytree(run_dir, copy)
    (copy / "secret").chmod(0o700)
    before = len(opened_steps(copy))

    job.arguments = ["--set", f"run.dir={copy}"]
    code, output = job.run()
    assert code == 0 and "new keys from here on" in output, output
    segments = [line for line in ledger_lines(copy) if line["kind"] == "segment"]
    assert len(segments) == 2
    verdict = json.loads(account("verify", str(copy), "--json").stdout)
    assert verdict["opened"] == before + STEPS - segments[1]["from_step"]
    assert verdict["claimed"] == 8.0, "outputs of the first segment may have been seen: the budget is claimed"


@pytest.mark.slow
def test_the_budget_ends_a_run_before_it_is_passed(launch: Make) -> None:
    def tight(config: dict[str, Any]) -> None:
        config["phases"][1]["privacy"]["epsilon"] = 0.25
        config["phases"][1]["privacy"]["release"] = []

    job, run_dir = launch("tight", tight)
    code, output = job.run()
    assert code == 3, output
    done = opened_steps(run_dir)
    assert 3 < len(done) < STEPS
    assert (run_dir / "checkpoints" / f"phase01-step{len(done):08d}").is_dir(), "the last paid step was not kept"
    assert json.loads((run_dir / "run_state.json").read_text())["status"] == "budget spent"
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
    assert code == 5 and "holds a run already" in output, output
