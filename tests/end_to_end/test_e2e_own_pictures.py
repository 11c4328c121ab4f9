"""What is refused of a config for packed pictures, before a launcher starts (test_e2e_tutorials.py trains on such)."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forking
from tests.support.evaluation_world import COLOURS, picture, tokenizer
from tests.support.launching import ROOT, TIMEOUT, environment

PICTURES = 121


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
    start = subprocess.run if script == "deepspeed" else forking.run
    done = start([*call, *arguments], cwd=world, capture_output=True, text=True, env=environment(), timeout=TIMEOUT)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


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
