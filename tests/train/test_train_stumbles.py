"""What new users type, and the one sentence that they are told: what is wrong, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from murmuration.train.commands import export, train
from tests.support.launching import ROOT

DEMO = ROOT / "ds_configs" / "demo.json"


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
    "an export of a folder that is no run": (
        ["export", "empty", "out"], "empty has no ledger.jsonl; name the run directory of a finished run",
    ),
    "class weights by a word": (
        dry("model.class_weights=balanced"), "a list of public numbers, one for each class",
    ),
}  # fmt: skip
COMMANDS: dict[str, Callable[[], int]] = {"train": train.main, "export": export.main}


@pytest.mark.parametrize(("command", "told"), STUMBLES.values(), ids=STUMBLES)
def test_a_stumble_is_one_sentence_with_the_fix(
    command: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("model: {family: mae}\nphases: []\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("sys.argv", [f"{command[0]}.py", *command[1:]])
    assert COMMANDS[command[0]]() == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert told in error
    assert not (tmp_path / "out").exists() and not (tmp_path / "runs").exists(), "nothing is half-written"
