"""Dry run, missing data and exit codes, as a user meets them on the command line."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from murmuration.__main__ import COMMANDS
from murmuration.accounting.cli.main import main as account
from murmuration.accounting.epsilon.accountant import epsilon, round_up
from murmuration.data.index.shard_index import build
from murmuration.data.synthetic.index import shape_samples, write_shards
from murmuration.train.commands.dry_run import as_text, meaning
from murmuration.train.config.load import load
from tests.support import forking
from tests.support.config_base import BASE
from tests.support.launching import ROOT


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


def test_several_private_phases_are_added_up_as_the_certificate_will_do(tmp_path: Path) -> None:
    path, config = tmp_path / "config.json", copy.deepcopy(BASE)
    config["phases"].append(copy.deepcopy(config["phases"][1]) | {"name": "again"})
    path.write_text(json.dumps(config))
    found = meaning(load(path, []))
    plan = found.phases[1].promise
    assert plan is not None
    both = epsilon([plan.plan.event(), plan.plan.event()], plan.plan.delta)
    assert plan.epsilon < both < 2 * plan.epsilon
    assert as_text(found).endswith(f"all private phases together: epsilon {round_up(both)} of 16, delta 0.00125")
    path.write_text(json.dumps(BASE))
    assert "together" not in as_text(meaning(load(path, [])))


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


# What can be refused without ranks is refused before the ranks are joined, and by one of them.


# Each command line by two ranks in turn, in one process, as a launcher describes them to a script.
BOTH_RANKS = """
import contextlib, io, json, os, sys
from murmuration.train.commands.train import main
found = []
for arguments in json.loads(sys.argv[1]):
    for rank in "01":
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = main(arguments)
        found.append([code, said.getvalue()])
import torch
print(json.dumps([found, "deepspeed" in sys.modules, torch.distributed.is_initialized()]))
"""

REFUSED = {
    "phases.0.privacy.expected_batch=41": "phases.0.privacy: expected_batch must lie in (0, 40]",
    "phases.0.privacy.delta=0.5": "phases.0.privacy: delta must lie in (0, 1/n]",
    "phases.0.privacy.delta=1/m": "phases.0.privacy: delta must be a number, '1/n' or",
    "phases.0.privacy.delta=1e-300": "phases.0.privacy: delta = 1e-300 is too small",
    "phases.0.privacy.epsilon=1e6": "epsilon = 1e+06 promises nothing",
    "phases.0.data.path=elsewhere": "elsewhere",
    "phases.0.evaluation.path=private": "belongs to the private records",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    raw: dict[str, Any] = copy.deepcopy(BASE)
    raw["model"] = {"family": "mae", "image_size": 32, "patch_size": 8, "width": 16, "depth": 1, "heads": 2}
    raw["model"] |= {"mae_decoder_width": 16, "mae_decoder_depth": 1, "mae_decoder_heads": 2}
    private = raw["phases"][1] | {"objective": "mae", "data": {"path": "private"}}
    private["evaluation"] = {"path": "held", "public": True}
    private["privacy"] |= {"noise_multiplier": None}
    raw["phases"] = [private]
    for name, seed, count in (("private", 2, 40), ("held", 3, 8)):
        write_shards(tmp_path / name, shape_samples(seed, count, 32), 20)
        build(tmp_path / name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    return path


def test_no_rank_is_joined_for_a_refusal_and_one_rank_says_it(config: Path) -> None:
    lines = [["--config", str(config), "--set", change] for change in REFUSED]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BOTH_RANKS, json.dumps(lines)], cwd=config.parent, env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, deepspeed, joined = json.loads(done.stdout)
    assert not deepspeed and not joined
    for (change, message), (code, said), (other_code, other) in zip(
        REFUSED.items(), found[::2], found[1::2], strict=True
    ):
        assert (code, other_code, other) == (2, 2, ""), (change, said, other)
        assert message in said and said.startswith("error: ") and said.count("\n") == 1, (change, said)
    assert sorted(path.name for path in config.parent.iterdir()) == ["config.json", "held", "private"]


# What a person waits for while typing is answered before anything that takes seconds is imported.


SLOW = (
    "torch",
    "deepspeed",
    "timm",
    "transformers",
    "torchvision",
    "dp_accounting",
    "scipy",
    "matplotlib",
    "tokenizers",
)
ANSWER = """
import json, sys
from murmuration.__main__ import main
try:
    code = main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]), file=sys.stderr)
"""


def answered(*arguments: str) -> tuple[int, set[str], str]:
    """Exit code, the packages that were imported, and what was printed."""
    done = subprocess.run([sys.executable, "-c", ANSWER, *arguments], cwd=ROOT, capture_output=True, text=True)
    *said, last = done.stderr.splitlines()
    code, imported = json.loads(last)
    return code, set(imported), done.stdout + "\n".join(said)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_imports_nothing_that_takes_seconds(command: str) -> None:
    code, imported, text = answered(command, "--help")
    assert code == 0 and "usage:" in text
    assert imported.isdisjoint({*SLOW, "pydantic", "numpy"})


@pytest.mark.parametrize(
    "arguments",
    [
        ("train",),
        ("train", "--dry-run"),
        ("audit",),
        ("plan", "--gpus=1", "--memory=80", "--tflops=100"),
    ],
    ids=" ".join,
)
def test_a_misspelt_key_is_answered_before_anything_that_takes_seconds(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    raw = json.loads((ROOT / "ds_configs" / "demo.json").read_text())
    raw["phases"][1]["schedule"]["peek"] = raw["phases"][1]["schedule"].pop("peak")
    config = tmp_path / "typo.json"
    config.write_text(json.dumps(raw))
    code, imported, text = answered(arguments[0], "--config", str(config), *arguments[1:])
    assert code == 2 and "did you mean 'peak'?" in text, text
    assert imported.isdisjoint(SLOW)


@pytest.mark.parametrize("name", ["demo.json", "vip/vip_base.json"])
def test_a_dry_run_imports_pytorch_and_no_package_built_on_it(name: str) -> None:
    """timm brings torchvision, and that PyTorch's compiler with sympy: more than all that a dry run computes."""
    code, imported, text = answered("train", "--config", f"ds_configs/{name}", "--dry-run")
    assert code == 0 and "(calibrated)" in text and "torch" in imported, text
    brought = {"torch", "scipy", "tokenizers"} | ({"sympy"} if version("torch").startswith("2.10.") else set())
    assert imported.isdisjoint({*SLOW, "sympy", "triton"} - brought)
