"""From a folder of pictures and a table to a private model that other packages load: the commands of the README."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.evaluation_world import COLOURS, picture, tokenizer
from tests.support.launching import ROOT, environment

PICTURES = 121
PACKED = PICTURES - 1
"""Packing leaves out what is no picture, and says so."""
# Imports nothing of ours.
CLEAN = """
import sys, timm, torch, transformers
images = torch.zeros(1, 3, 32, 32)
with torch.no_grad():
    one = timm.create_model(f"local-dir:{sys.argv[1]}", pretrained=True).eval()(images)
    other = transformers.AutoModel.from_pretrained(sys.argv[2]).eval()(images).last_hidden_state[:, 1:].mean(1)
assert one.isfinite().all() and torch.allclose(one, other, atol=1e-5), (one - other).abs().max()
assert not [name for name in sys.modules if name.split(".")[0] in ("murmuration", "deepspeed")]
"""


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """Pictures, one of them broken, and a table of theirs."""
    (tmp_path / "pictures").mkdir()
    names = list(COLOURS)
    with (tmp_path / "captions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file_name", "caption", "finding"])
        for number in range(PICTURES):
            colour = names[number % len(names)]
            table.writerow([f"{number:03}.png", f"a photo of a {colour} square", colour])
            content = picture(colour, number) if number else b"no picture"
            (tmp_path / "pictures" / f"{number:03}.png").write_bytes(content)
    tokenizer(tmp_path)
    return tmp_path


def run(world: Path, *command: str, code: int = 0) -> str:
    """A command as a user types it, in the folder of the pictures."""
    script, *arguments = command
    call = [script] if script == "deepspeed" else [sys.executable, str(ROOT / "launch" / script)]
    done = subprocess.run(
        [*call, *arguments], cwd=world, capture_output=True, text=True, env=environment(), timeout=400
    )
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_from_a_table_of_captions_to_a_model_that_other_packages_load(world: Path) -> None:
    table = ("--csv", "captions.csv", "--image", "file_name", "--caption", "caption", "--label", "finding")
    packed = run(world, "prepare.py", "pack", "pictures", *table, "--out", "shards")
    assert "1 × undecodable image" in packed, packed
    told = run(world, "init.py", "caption", "--data", "shards", "--tokenizer", "tokenizer.json", "--size", "nano",
               "--image-size", "32", "--epsilon", "20", "--out", "my.json")  # fmt: skip
    assert f"n = {PACKED}" in told, told
    checked = run(world, "prepare.py", "check", "--config", "my.json", "--out", "check.html")
    assert "private" in checked and (world / "check.html").stat().st_mode & 0o077 == 0

    meant = json.loads(run(world, "train.py", "--config", "my.json", "--dry-run", "--json"))["phases"][0]
    assert meant["n"] == PACKED and meant["epsilon"] <= 20
    trainer = str(ROOT / "launch" / "train.py")
    output = run(world, "deepspeed", "--num_gpus", "2", trainer, "--config", "my.json")
    assert "verified" in output and "recompute ε from the ledger" in output
    assert f"{meant['epsilon']:g}" in run(world, "account.py", "verify", "runs/my")
    assert f"n = {PACKED}" in (world / "runs" / "my" / "report.html").read_text()

    for form in ("safetensors", "timm", "hf"):
        run(world, "export.py", "runs/my", form, "--form", form)
    clean = [sys.executable, "-I", "-c", CLEAN, str(world / "timm"), str(world / "hf")]
    done = subprocess.run(clean, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    used = json.loads(run(world, "use.py", "safetensors", "pictures/001.png", "--json"))
    assert "001.png" in json.dumps(used), used


def test_a_misspelt_field_is_refused_before_anything_is_spent(world: Path) -> None:
    table = ("--csv", "captions.csv", "--image", "file_name", "--label", "finding", "--caption", "caption")
    run(world, "prepare.py", "pack", "pictures", *table, "--out", "shards")
    classes = world / "colours.txt"
    classes.write_text("\n".join(COLOURS) + "\n")
    run(world, "init.py", "classify", "--data", "shards", "--classes", "colours.txt", "--size", "nano", "--image-size",
        "32", "--out", "my.json")  # fmt: skip
    asked = ("--config", "my.json", "--set", "phases.0.data.label=findng")
    for more in (("--dry-run",), ()):
        refused = run(world, "train.py", *asked, *more, code=2)
        assert "findng" in refused and refused.count("error:") == 1, refused
    assert not (world / "runs").exists()
