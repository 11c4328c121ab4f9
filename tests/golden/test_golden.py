"""Golden values: what must stay as it was, whatever is moved, renamed or merged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.freeze import Golden, differences

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def command(script: str, *arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments], cwd=folder, capture_output=True, text=True, timeout=1200
    )


def test_what_no_processor_changes_is_as_it_was_frozen() -> None:
    """Helps, config digests, resolved recipes, draws, noise and indexes. Meant to change: freeze.py refreeze."""
    done = command("tests/golden/freeze.py", "check", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_dry_runs_of_all_recipes_are_as_they_were_frozen() -> None:
    done = command("tests/golden/freeze.py", "check", "--only", "dry-run")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_difference_is_told_with_its_item_and_its_line() -> None:
    before = Golden({}, {"help": {"train.py": "one\ntwo\n", "gone.py": ""}, "ids": {"same": "1"}})
    after = Golden({}, {"help": {"train.py": "one\n2\n", "new.py": ""}, "ids": {"same": "1"}})
    assert differences(before, after, ["help", "ids"]) == [
        "help | gone.py: only before",
        "help | new.py: only after",
        "help | train.py: differs\n@@ -1,2 +1,2 @@\n one\n-two\n+2",
    ]
    assert differences(before, before, ["help", "ids"]) == []


def test_golden_values_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = Golden({"python": "3"}, {"ids": {"a": "ε\n"}})
    made.write(tmp_path)
    assert Golden.read(tmp_path) == made
    (tmp_path / "golden.json").write_text((tmp_path / "golden.json").read_text().replace('"a": "', '"a": "0'))
    with pytest.raises(SystemExit, match="does not hold the texts"):
        Golden.read(tmp_path)
