"""A whole run whose records are each seen in several views, and a replay of one with and without a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.ledger.history import History
from murmuration.train.audit.replay import replay
from murmuration.train.config.load import load
from murmuration.train.engines.local import start_ranks
from tests.support.launching import Launch
from tests.support.whole_history import steps_of

LOCAL: dict[str, Any] = {"launcher": "python", "arguments": ["--set", 'run.engine="local"']}
VIEWS, STEPS = 3, 3


def several(config: dict[str, Any]) -> None:
    config["phases"] = config["phases"][1:]
    private = config["phases"][0]
    private["privacy"] |= {"views": VIEWS, "expected_batch": 24}
    private["steps"] = STEPS
    config["model"] |= {"dropout": 0.1}
    config["run"]["precision"] = "bf16"


def test_a_run_with_views_is_charged_as_one_without_and_says_how_often_records_were_seen(
    launch: Callable[..., tuple[Launch, Path]],
) -> None:
    job, run_dir = launch("views", several, **LOCAL)
    code, output = job.run()
    assert code == 0, output
    assert "self-test passed" in output
    history = History.read(run_dir / "ledger.jsonl")[0]
    (plan,) = history.plans.values()
    assert plan.views == VIEWS and verify(run_dir).committed == STEPS
    once, once_dir = launch(
        "once", lambda config: (several(config), config["phases"][0]["privacy"].pop("views")), **LOCAL
    )
    code, output = once.run()
    assert code == 0, output
    assert verify(once_dir).epsilon == verify(run_dir).epsilon
    drawn = [[facts.sampling for facts in steps_of(folder).opened.values()] for folder in (run_dir, once_dir)]
    assert drawn[0] == drawn[1] and len(drawn[0]) == STEPS, "the same records are drawn"
    assert f"each drawn record is seen {VIEWS} times" in (run_dir / "certificate.md").read_text()
    assert "is seen" not in (once_dir / "certificate.md").read_text()


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
