"""Golden values and runs of earlier versions: what must stay as it was, whatever is moved, renamed or merged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.golden import old_runs
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


def test_a_finished_run_of_an_earlier_version_verifies(tmp_path: Path) -> None:
    run_dir = old_runs.unpack(tmp_path) / old_runs.FINISHED
    done = command("launch/account.py", "verify", str(run_dir), "--json")
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    steps = sum(old_runs.STEPS.values())
    assert (verdict["opened"], verdict["committed"], verdict["objection"]) == (steps, steps, None)


@pytest.mark.slow
def test_a_stopped_run_of_an_earlier_version_goes_on_with_its_own_keys_to_the_same_end(tmp_path: Path) -> None:
    """One process where there were two; draws and charges are still those of the run that the old version finished."""
    root = old_runs.unpack(tmp_path)
    stopped, finished = root / old_runs.STOPPED, root / old_runs.FINISHED
    before = (stopped / "ledger.jsonl").read_bytes()
    old_runs.at_home(stopped)
    settings = ("--config", old_runs.CONFIG, "--set", f"run.dir={old_runs.STOPPED}", "--resume", "must")
    refused = command("launch/train.py", *settings, folder=root)
    assert refused.returncode == 2 and "evaluation: records to evaluate on are used without noise" in refused.stderr
    settings += ("--set", "phases.2.evaluation.public=true")  # the word, which earlier versions did not ask for
    done = command("launch/train.py", *settings, folder=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (stopped / "ledger.jsonl").read_bytes().startswith(before)
    for kind in ("plan", "segment", "open", "commit"):
        assert told(stopped, kind) == told(finished, kind), kind
    assert len(told(stopped, "open")) == sum(old_runs.STEPS.values())
    expected, got = weights(finished), weights(stopped)
    assert expected.keys() == got.keys()
    for name, values in expected.items():  # on another processor, by other numbers of ranks, sums round otherwise
        np.testing.assert_allclose(got[name], values, rtol=0, atol=2e-4, err_msg=name)
    assert command("launch/account.py", "verify", str(stopped)).returncode == 0


def told(run_dir: Path, kind: str) -> list[dict[str, object]]:
    """Lines of a kind without their place in the ledger, which a stop moves."""
    place = ("index", "previous", "hash")
    return [
        {name: value for name, value in line.items() if name not in place}
        for line in old_runs.lines(run_dir)
        if line["kind"] == kind
    ]


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    """The last checkpoint's weights, put together from the fragments that ranks share."""
    folder = run_dir / "checkpoints" / json.loads((run_dir / "checkpoints" / "latest").read_text())["folder"]
    found: dict[str, dict[int, np.ndarray]] = {}
    for piece in folder.glob("piece-*"):
        for key, values in load_file(piece).items():
            kind, name, start = key.split("|")
            if kind in ("weights", "fixed"):
                found.setdefault(name, {})[int(start)] = values
    return {name: np.concatenate([part[start] for start in sorted(part)]) for name, part in found.items()}
