"""A classifier whose accuracy on held-out private records is released: a whole run, and a replayed pair."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.accounting.certificate.verify import verify
from murmuration.data.batch.held_out import is_held_out
from murmuration.train.audit.replay import replay
from murmuration.train.config.load import load
from murmuration.train.engines.local import start_ranks
from murmuration.train.storage.sibling_runs import LOG
from tests.support.launching import Launch

SHARE, RECORDS, STEPS = 0.25, 64, 4


@pytest.fixture
def config(small_config: dict[str, Any], small_data: Path, tmp_path: Path) -> dict[str, Any]:
    """On a copy of the records: what a private run protects is public for no other test any more."""
    shutil.copytree(small_data / "held_out", tmp_path / "records")
    for log in (tmp_path / "records").rglob(f"*{LOG}"):
        log.unlink()
    found = json.loads(json.dumps(small_config))
    found["model"] = {
        "family": "classifier", "size": "custom", "image_size": 32, "patch_size": 8, "width": 32, "depth": 1,
        "heads": 2, "classes": 4,
    }  # fmt: skip
    private = found["phases"][1]
    del private["evaluation"]
    private["data"] = {"source": "shards", "path": str(tmp_path / "records"), "label": "shape"}
    private["data"]["reading"] = {"workers": 0}
    private |= {"objective": "classify", "steps": STEPS}
    private["privacy"] |= {"expected_batch": 32}
    private["privacy"]["release"] = [
        {"name": "loss", "bound": 8.0, "noise_multiplier": 6.0},
        {"name": "accuracy", "noise_multiplier": 2.0, "share": SHARE},
    ]
    found["phases"] = [private]
    found["run"] |= {"checkpoint_every": 2}
    return found


LOCAL: dict[str, Any] = {"launcher": "python", "arguments": ["--set", 'run.engine="local"']}


@pytest.mark.parametrize("how", [LOCAL, pytest.param({}, marks=pytest.mark.slow)], ids=["local", "deepspeed"])
def test_a_run_releases_charges_and_certifies_it(config: dict[str, Any], tmp_path: Path, how: dict[str, Any]) -> None:
    job, run_dir = Launch.written(config, tmp_path, "held", None, **how)
    code, output = job.run()
    assert code == 0, output
    lines = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    told = {line["step"]: line["noised_accuracy"] for line in lines if "noised_accuracy" in line}
    # Noise of 2 on a count of which 8 are expected: six standard deviations either side of what can be counted.
    assert sorted(told) == list(range(1, STEPS + 1)) and all(-1.5 <= value <= 3.5 for value in told.values())
    assert verify(run_dir).committed == STEPS
    certificate = json.loads((run_dir / "certificate.json").read_text())
    (phase,) = certificate["phases"]
    assert {each["name"]: each.get("share") for each in phase["plan"]["metrics"]}["accuracy"] == SHARE
    assert phase["events"][0]["sigma"] < phase["plan"]["noise_multiplier"]
    assert "held out in private: 25.000% of the records" in (run_dir / "certificate.md").read_text()


def test_a_held_out_record_moves_no_sum_and_the_count_by_at_most_one(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(config))
    held = is_held_out(np.arange(RECORDS), SHARE)
    moved = {}
    for record in (int(np.flatnonzero(held)[0]), int(np.flatnonzero(~held)[0])):
        # Some step of 18 draws it, but for one time in 2^18.
        report = replay(load(tmp_path / "recipe.json", ["phases.0.steps=18"]), start_ranks(), 18, record)
        assert report.refuted == [] and report.drawn and set(report.released) == {"loss", "accuracy"}
        moved[bool(held[record])] = report
    assert max(moved[True].moves) == 0.0 and moved[True].released["loss"] == 0.0
    assert 0.0 <= moved[True].released["accuracy"] <= 1.001
    assert max(moved[False].moves) > 0.0 and moved[False].released["accuracy"] == 0.0
