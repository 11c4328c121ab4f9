"""A whole run whose records are each seen in several views, and a replay of one with and without a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from murmuration.train.audit.replay import replay
from murmuration.train.config.load import load
from murmuration.train.engines.local import start_ranks

VIEWS, STEPS = 3, 3


def several(config: dict[str, Any]) -> None:
    config["phases"] = config["phases"][1:]
    private = config["phases"][0]
    private["privacy"] |= {"views": VIEWS, "expected_batch": 24}
    private["steps"] = STEPS
    config["model"] |= {"dropout": 0.1}
    config["run"]["precision"] = "bf16"


def test_one_record_moves_the_sum_of_a_step_by_at_most_c(small_config: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads(json.dumps(small_config))
    several(config)
    config["train_micro_batch_size_per_gpu"] = 64  # one micro-batch a step
    config["run"]["precision"] = "fp32"
    config["phases"][0]["data"]["reading"] = {"workers": 0}
    (tmp_path / "recipe.json").write_text(json.dumps(config))
    report = replay(load(tmp_path / "recipe.json", []), start_ranks(), 1, None)
    assert report.refuted == [] and report.drawn == 1
    assert 0 < max(report.moves) <= report.bound * 1.001 <= 1.001
