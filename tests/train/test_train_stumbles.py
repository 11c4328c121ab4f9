"""What new users type, and the one sentence that they are told: what is wrong, and what to do."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from murmuration.__main__ import COMMANDS as EVERY
from murmuration.__main__ import main
from murmuration.data.index.folders import build_folder
from murmuration.launch import init, prepare
from murmuration.train.commands import doctor, export, forecast, retire, train
from tests.support.config_base import BASE
from tests.support.launching import ROOT, environment
from tests.support.tars import indexed, png

DEMO = ROOT / "ds_configs" / "demo.json"


def lay_out(folder: Path) -> None:
    (folder / "my.yaml").write_text("model: {family: mae}\nphases: []\n")
    (folder / "empty").mkdir()
    (folder / "dino").mkdir()
    (folder / "dino" / "config.json").write_text('{"model_type": "dinov2", "patch_size": 14, "image_size": 518}')
    indexed(folder / "shards", [{"png": png(number), "txt": b"a picture"} for number in range(10)])
    private = BASE["phases"][1] | {"data": {"path": "shards", "tokenizer": "clip:515"}, "evaluation": None}
    private |= {"privacy": private["privacy"] | {"expected_batch": 5}}
    for number in range(8):
        (folder / "folders" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        (folder / "folders" / "ab"[number % 2] / f"{number}.png").write_bytes(png(number))
    build_folder(folder / "folders")
    (folder / "classes.txt").write_text("a\nb\nc\n")
    classify = private | {"objective": "classify", "data": {"path": "folders", "label": "cls"}}
    sizes = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 1, "heads": 2}
    classifier = {"family": "classifier", "size": "custom", **sizes, "classes": 2}
    (folder / "folders.json").write_text(json.dumps(BASE | {"model": classifier, "phases": [classify]}))
    start = {"name": "start", "data": {"source": "checkpoint", "path": "w", "public": True}}
    for name, phases in (("small", [private]), ("start", [start, private])):
        (folder / f"{name}.json").write_text(json.dumps(BASE | {"phases": phases}))


def trained(*overrides: str) -> list[str]:
    return ["train", "--config", "small.json", *(part for each in overrides for part in ("--set", each))]


def dry(*overrides: str, config: str = str(DEMO)) -> list[str]:
    return ["train", "--config", config, "--dry-run", *(part for each in overrides for part in ("--set", each))]


STUMBLES: dict[str, tuple[list[str], str]] = {
    "a name of the hub, for timm": (
        dry("model.family=timm", "model.name=hf-hub:timm/vit_small_patch14_dinov2.lvd142m"),
        "nothing is downloaded; save them by timm.models.save_for_hf",
    ),
    "a name of the hub, for transformers": (
        dry("model.family=hf", "model.name=facebook/dinov2-small"),
        "does not exist, and nothing is downloaded; set model.name to a folder",
    ),
    "YAML": (dry(config="my.yaml"), "configs are JSON, not YAML"),
    "no such config": (dry(config="my.json"), "there is no config file my.json; write one by launch/init.py"),
    "a tracker": (dry("run.report_to=wandb"), "the trainer calls no tracker; leave it out"),
    "pixels that no patch holds": (dry("model.image_size=50"), "set image_size to 48 or 56"),
    "pixels that no patch of a named encoder holds": (
        dry("model={\"family\": \"timm\", \"name\": \"vit_tiny_patch16_224\", \"image_size\": 50}"),
        "leaves 2 pixels at the edge that are in no patch; set it to a multiple of the patch, such as 48",
    ),
    "pixels that no patch of a folder's encoder holds": (
        dry("model={\"family\": \"hf\", \"name\": \"dino\", \"image_size\": 50}", config="start.json"),
        "model.image_size 50 leaves 8 pixels at the edge that are in no patch",
    ),
    "an export of a folder that is no run": (
        ["export", "empty", "out"], "empty has no ledger.jsonl; name the run directory of a finished run",
    ),
    "an export of nothing": (["export", "nowhere", "out"], "nowhere has no ledger.jsonl; name the run directory"),
    "records that are nowhere": (
        ["train", "--config", str(DEMO), "--set", "phases.0.data.path=nowhere"],
        "phases.0.data.path: {here}/nowhere: no such folder; name another, or put the records there, then python "
        "launch/prepare.py index {here}/nowhere",
    ),
    "records that were not indexed": (
        ["train", "--config", str(DEMO), "--set", "phases.0.data.path=empty"],
        "phases.0.data.path: {here}/empty: no index here; build it with: python launch/prepare.py index {here}/",
    ),
    "a first config of records that were not indexed": (
        ["init", "caption", "--data", "no where", "--epsilon", "8"],
        "--data: no where: no such folder; name another, or put the records there, then python launch/prepare.py index "
        "'no where'",
    ),
    "class folders of private records without a list": (
        ["train", "--config", "folders.json"], "name data.classes, a file with one class per line",
    ),
    "more classes on the list than outputs": (
        ["train", "--config", "folders.json", "--dry-run", "--set", "phases.0.data.classes=classes.txt"],
        "phases.0.data.classes: 3 classes, but the model has 2 outputs; set model.classes to 3",
    ),
    "a check without a config": (["prepare", "check", "--config", "my.json"], "there is no config file my.json"),
    "a plan without a link": (
        ["plan", "--config", str(DEMO), "--gpus", "8", "--memory", "80", "--tflops", "100"],
        "--link is missing: GPUs exchange gradients; give the GB/s of the slowest link",
    ),
    "class weights by a word": (
        dry("model.class_weights=balanced"), "a list of public numbers, one for each class",
    ),
    "a typo in a name of timm": (
        dry("model.family=timm", "model.name=vit_smal_patch14_dinov2"),
        "timm has no model 'vit_smal_patch14_dinov2'; did you mean vit_small_patch14_dinov2, ",
    ),
    "a typo in a tag of timm": (
        dry("model.family=timm", "model.name=vit_small_patch14_dinov2.lvd142"),
        "timm's vit_small_patch14_dinov2 has no weights 'lvd142'; choose lvd142m, or leave the tag out",
    ),
    "a delta above 1/n": (
        [*trained("phases.0.privacy.delta=0.5"), "--dry-run"],
        "phases.0.privacy: delta must lie in (0, 1/n] = (0, 0.1], but is 0.5",
    ),
    "a budget that promises nothing": (
        [*trained("phases.0.privacy.epsilon=1000", "phases.0.privacy.noise_multiplier=null"), "--dry-run"],
        "phases.0.privacy: epsilon = 1000 promises nothing, so no noise",
    ),
    "a batch above n": (trained("phases.0.privacy.expected_batch=11"), "expected_batch must lie in (0, 10]"),
    "a unit that the index does not know": (
        trained("phases.0.data.unit=patient"), "phases.0.data.unit: {here}/shards/index: this index knows no units",
    ),
    "a tokenizer that is not there": (
        trained("phases.0.data.tokenizer=tok.json"), "phases.0.data.tokenizer: {here}/tok.json: no tokenizer here",
    ),
    "weights that are not there": (
        ["train", "--config", "start.json"],
        "phases.0.data.path: {here}/w does not exist; name a run directory, an export, or a file of weights",
    ),
    "a doctor without a config": (["doctor", "--config", "my.json"], "there is no config file my.json"),
    "a run to retire that is none": (["retire", "empty"], "there is no ledger in empty; name a run directory"),
    "a first config without a budget": (
        ["init", "caption", "--data", "shards", "--epsilon", "-1"], "--epsilon -1 is no privacy budget",
    ),
    "a first config from weights that are not there": (
        ["init", "caption", "--data", "shards", "--start", "w", "--public"], "--start: w does not exist; name a run",
    ),
    "a first config for a unit that the index does not know": (
        ["init", "caption", "--data", "shards", "--unit", "patient"], "--unit: shards/index: this index knows no units",
    ),
}  # fmt: skip
COMMANDS: dict[str, Callable[[], int]] = {
    "train": train.main, "export": export.main, "init": init.main, "prepare": prepare.main, "plan": forecast.main,
    "doctor": doctor.main, "retire": retire.main,
}  # fmt: skip


@pytest.mark.parametrize(("command", "told"), STUMBLES.values(), ids=STUMBLES)
def test_a_stumble_is_one_sentence_with_the_fix(
    command: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path)
    monkeypatch.setattr("sys.argv", [f"{command[0]}.py", *command[1:]])
    assert COMMANDS[command[0]]() == (5 if command[0] == "retire" else 2)
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error: ", "prepare.py: "))]
    assert told.format(here=tmp_path) in error
    assert not (tmp_path / "out").exists() and not (tmp_path / "runs").exists(), "nothing is half-written"


ALL = """
import json, sys
from importlib import import_module
from murmuration.__main__ import COMMANDS
for name, *words in json.load(sys.stdin):
    sys.argv = [f"{name}.py", *words]
    code = import_module(COMMANDS[name][0]).main()
    assert code == (5 if name == "retire" else 2) and "torch" not in sys.modules, (code, name, words)
"""


def test_none_of_them_waits_for_pytorch(tmp_path: Path) -> None:
    """To import it takes seconds."""
    lay_out(tmp_path)
    asked = json.dumps([command for command, _ in STUMBLES.values()])
    env = environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ALL], input=asked, cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words", ["train --config no", "audit --config no", "doctor --config no", "evaluate compare no"]
)
def test_the_number_that_deepspeed_gives_each_process_may_stand_before_the_command(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["murmuration", "--local_rank=1", *words.split()])
    assert main() == 2
    assert capsys.readouterr().err.startswith(("error: there is no config file no", "error: no cannot be read"))


@pytest.mark.parametrize("command", EVERY)
def test_no_letter_is_too_much_for_the_output(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of days would end with an exception at its first ε, where the locale is that of Latin-1."""
    output = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setattr("sys.argv", [command, "--help"])
    with pytest.raises(SystemExit):
        import_module(EVERY[command][0]).main()
    print("ε")
    output.seek(0)
    assert output.read().endswith("\\u03b5\n")
