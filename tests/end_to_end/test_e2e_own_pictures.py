"""What is refused of a config for packed pictures, before a launcher starts (test_e2e_tutorials.py trains on such)."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from murmuration.accounting.ledger.history import History
from murmuration.data.index.units import FACTS
from tests.support import forking
from tests.support.evaluation_world import COLOURS, picture
from tests.support.launching import ROOT, TIMEOUT, environment

PICTURES = 121


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """Pictures, one of them broken."""
    (tmp_path / "pictures").mkdir()
    names = list(COLOURS)
    for number in range(PICTURES):
        content = picture(names[number % len(names)], number) if number else b"no picture"
        (tmp_path / "pictures" / f"{number:03}.png").write_bytes(content)
    return tmp_path


def run(world: Path, *command: str, code: int = 0) -> str:
    """A command as a user types it, in the folder of the pictures."""
    script, *arguments = command
    call = [sys.executable, str(ROOT / "launch" / script), *arguments]
    done = forking.run(call, cwd=world, capture_output=True, text=True, env=environment(), timeout=TIMEOUT)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def patients(world: Path) -> list[str]:
    """How to pack the pictures by a table in which one patient alone has a rare finding, and each has two pictures."""
    with (world / "findings.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file_name", "finding", "patient_id"])
        for number in range(PICTURES):
            finding = "fabry disease" if number == 7 else ("melanoma", "naevus")[number // 2 % 2]
            table.writerow([f"{number:03}.png", finding, f"p{number // 2}"])
    return ["pack", "pictures", "--csv", "findings.csv", "--label", "finding", "--unit", "patient_id",
            "--workers", "1"]  # fmt: skip


TOY = ("--size", "nano", "--image-size", "16")
SHORT = ("--set", 'run.engine="local"', "--set", "phases.0.steps=2", "--set", "model.depth=1",
         "--set", "phases.0.data.reading.workers=0")  # fmt: skip


def test_a_list_of_classes_that_was_made_of_private_rows_takes_a_word(world: Path, patients: list[str]) -> None:
    """One patient's finding would be an output of the model and stand in the export, under a certificate without a word
    of it."""
    said = run(world, "prepare.py", *patients, "--out", "shards", code=2)
    assert said.count("prepare.py:") == 1 and "--classes-from-rows" in said and not (world / "shards").exists()
    run(world, "prepare.py", *patients, "--classes-from-rows", "--out", "shards")
    asked = ("init.py", "classify", "--data", "shards", *TOY)
    said = run(world, *asked, code=2)
    assert "was made of the rows of packed records" in said and not (world / "my.json").exists()
    (world / "elsewhere.txt").write_text("fabry disease\nmelanoma\nnaevus")  # no line feed at the end
    said = run(world, *asked, "--classes", "elsewhere.txt", code=2)
    assert "was made of the rows of packed records" in said and not (world / "my.json").exists()
    (world / "public.txt").write_text("melanoma\nnaevus\n")
    run(world, *asked, "--classes", "public.txt", "--out", "public.json")
    for classes in ("elsewhere.txt", "shards/classes.txt"):
        said = run(world, "train.py", "--config", "public.json", "--set", f"phases.0.data.classes={classes}",
                   "--set", "model.classes=3", *SHORT, code=2)  # fmt: skip
        assert "phases.0.data.classes_public, true, if these names are public" in said
    [shard] = sorted((world / "shards").glob("*.tar"))
    by_pattern = ("--set", f"phases.0.data.path={shard}", "--set", "phases.0.data.classes=elsewhere.txt")
    said = run(world, "train.py", "--config", "public.json", *by_pattern, "--set", "model.classes=3", *SHORT, code=2)
    assert "phases.0.data.classes_public, true, if these names are public" in said
    assert not (world / "runs").exists()
    run(world, *asked, "--classes-public")
    run(world, "train.py", "--config", "my.json", *SHORT)
    [word] = History.read(world / "runs" / "my" / "ledger.jsonl")[0].public_uses
    assert word.use == "classes"
    certificate = json.loads((world / "runs" / "my" / "certificate.json").read_text())
    [said] = [each for each in certificate["known_deviations"] if "names of the classes" in each]
    assert "are public by the word of the run's owner" in said and word.digest[:16] in said


def test_the_unit_that_the_index_knows_is_what_is_protected(world: Path, patients: list[str]) -> None:
    """Packed with units, a config that says nothing of them protected single pictures, and nothing said so."""
    (world / "public.txt").write_text("melanoma\nnaevus\n")
    run(world, "prepare.py", *patients, "--classes", "public.txt", "--out", "shards")
    asked = ("init.py", "classify", "--data", "shards", *TOY)
    said = run(world, *asked)
    assert "of n = 61 units" in said and "it protects one unit (all records that have the same 'patient_id'" in said
    said = run(world, *asked, "--unit", "record", "--out", "single.json")
    assert "of n = 120 records" in said and "it protects one record" in said
    assert "named by 'patient_id', not by 'ward'" in run(world, *asked, "--unit", "ward", "--out", "x.json", code=2)

    for config, unit, n in (("my.json", "one unit (all records that have the same 'patient_id'", 61),
                            ("single.json", "one record", 120)):  # fmt: skip
        said = run(world, "train.py", "--config", config, "--dry-run")
        assert f"n             {n} (" in said and f"unit          {unit}" in said
    nothing = ("--config", "single.json", "--set", "phases.0.data.unit=null")
    said = run(world, "train.py", *nothing, *SHORT)
    assert said.count("private  protects one unit (all records that have the same 'patient_id'") == 1
    assert "a unit of its own): n = 61\n" in said
    certificate = json.loads((world / "runs" / "single" / "certificate.json").read_text())
    assert certificate["unit"].startswith("one unit (all records that have the same 'patient_id'")
    said = run(world, "train.py", *nothing, "--set", "phases.0.data.expected_records=120", "--dry-run", code=2)
    assert "n counts units by 'patient_id'" in said and "set unit to 'record'" in said
    (facts := world / "shards" / "index" / FACTS).write_text("{")
    assert "table of units cannot be read" in run(world, "train.py", *nothing, "--dry-run", code=2)
    assert "table of units cannot be read" in run(world, "prepare.py", "index", "shards", code=2)
    run(world, "train.py", "--config", "single.json", "--dry-run")
    facts.unlink()
    run(world, "prepare.py", "index", "shards", "--unit", "record", code=2)
