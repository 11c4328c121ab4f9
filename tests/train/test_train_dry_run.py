"""Dry run, missing data and exit codes, as a user meets them on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from murmuration.accounting.cli.main import main as account
from murmuration.train.commands.dry_run import meaning
from murmuration.train.config.load import load
from tests.support import forking
from tests.support.config_base import BASE

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    script = [sys.executable, str(ROOT / "launch" / "train.py"), *arguments]
    return forking.run(script, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def test_a_dry_run_says_what_the_config_means_without_launcher_or_data(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE))
    done = command("--config", str(path), "--dry-run", "--set", "phases.1.privacy.noise_multiplier=null",
        "--set", "run.clip_engine=reference", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in (
        "n             400 (expected_records; the data are not at hand)", "q             0.05 = 214748365/2^32",
        "sigma", "(calibrated)", "C             1 (flat)", "T             5", "epsilon", "of 8 (PLD)",
        "delta         0.00125", "parameters", "memory/rank", "fp64 sums",
        "non-private   on public data; batch 16, 2 steps",
    ):  # fmt: skip
        assert word in done.stdout, word
    spent = float(done.stdout.split("epsilon       ")[1].split(" of")[0])
    assert 7.9 < spent <= 8.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json"], "nothing is written"


def test_people_are_told_first_and_scripts_get_json_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE))
    said = command("--config", str(path), "--dry-run", cwd=tmp_path)
    assert said.returncode == 0 and said.stdout.startswith("engine: DeepSpeed, ZeRO-1\n") and "{" not in said.stdout
    piped = command("--config", str(path), "--dry-run", "--json", cwd=tmp_path)
    assert piped.returncode == 0 and piped.stderr == ""
    found = json.loads(piped.stdout)
    public, private = found["phases"]
    assert found["config"]["phases"][1]["privacy"]["expected_batch"] == 20.0 and found["model"]["vocabulary"] == 64
    assert (public["private"], public["batch"], public["steps"]) == (False, 16, 2)
    assert (private["n"], private["sigma"], private["steps"], private["delta"]) == (400, 1.5, 5, 0.00125)
    assert f"epsilon       {private['epsilon']} of {private['epsilon_budget']:g} (PLD)" in said.stdout
    assert f"{private['parameters']:,} trainable (all)" in said.stdout
    alone = command("--config", str(path), "--json", cwd=tmp_path)
    assert alone.returncode == 2 and alone.stdout == "" and "give --dry-run as well" in alone.stderr


def test_missing_data_are_bad_input_in_one_sentence_with_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE))
    done = command("--config", str(path), cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: phases.0.data.path: ")
    assert str(tmp_path / "warm") in lines[0] and "index" in lines[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json"]
    refused = command("--config", str(path), "--set", "gradient_clipping=1", cwd=tmp_path)
    assert refused.returncode == 2 and "gradient_clipping = 1 is refused" in refused.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], ""),
        (["phases.1.privacy.sampling=allocation"], "--sampling allocation"),
        (['phases.1.privacy.noise={"kind":"banded","bands":4}'], "--bands 4"),
    ],
)
def test_account_calibrates_the_noise_that_a_config_in_the_same_words_gets(
    settings: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(ROOT / "ds_configs" / "demo.json", ["phases.1.steps=40", *settings])
    promise = meaning(config).phases[1].promise
    assert promise is not None and promise.calibrated
    plan = promise.plan
    assert account(f"calibrate --n 20000 --batch 1000 --steps 40 --epsilon 8 {words} --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sigma"], found["delta"], found["rate"]) == (plan.noise_multiplier, plan.delta, plan.sampling_rate)
    asked = f"epsilon --n 20000 --batch 1000 --steps 40 --sigma {plan.noise_multiplier!r} {words} --json"
    assert account(asked.split()) == 0
    assert json.loads(capsys.readouterr().out)["epsilon_rounded_up"] == promise.epsilon
