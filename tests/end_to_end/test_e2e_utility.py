"""The same training by Opacus and by this trainer ends at the same accuracy, as far as seeds differ anyway."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import ROOT, environment

SEEDS = 3


@pytest.mark.slow
def test_opacus_and_this_trainer_end_alike_within_the_spread_of_seeds(tmp_path: Path) -> None:
    out = tmp_path / "utility.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "utility.py"), "--seeds", str(SEEDS), "--out", str(out)],
        capture_output=True, text=True, env=environment(), timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    for name, both in found["compared"].items():
        # Welch's statistic of two times three seeds: beyond 4.6 once in a hundred times if nothing differs.
        assert abs(both["standard_errors_apart"]) < 4.6, f"{name}: {both}"
    chance = found["setting"]["chance"]["colour"]
    colour = found["compared"]["zero_shot_colour"]
    # Both learned something that more noise or another clipping norm would have cost.
    assert min(colour["ours"], colour["opacus"]) > 4 * chance
    assert all(0 < run["epsilon"] < 14 for run in found["runs"]["ours"])
