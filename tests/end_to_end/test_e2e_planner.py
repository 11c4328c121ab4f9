"""The planner against real launches of two ranks: memory at every ZeRO stage, and the time of a private step."""

from __future__ import annotations

import importlib
import statistics
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, TIMEOUT, run_worker
from train.planner_memory import Weights, memory

NEAR = 2**0.5
"""What a planned step may be off by, either way: then a plan for twice the batch cannot pass for this one."""


@pytest.mark.slow
def test_what_stays_and_what_the_update_needs_is_what_real_engines_allocate() -> None:
    rows = run_worker("planner_worker.py", ranks=2, seconds=3 * TIMEOUT)
    assert [row["stage"] for row in rows] == [0, 1, 1, 2, 3]
    for row in rows:
        weights = Weights(row["elements"], 0, row["largest"], 8, True)
        planned = memory(weights, row["stage"], row["world"], row["offload"])
        # A CPU has one memory: host and device together.
        stays, most = planned.stays + planned.host, 1.08 if row["offload"] else 1.02
        assert stays / most < row["stays"] < stays * most, row
        if not row["offload"]:
            assert planned.update / 1.12 < row["update"] < planned.update * 1.03, row
        # Smaller micro-batches need less, so that the slope is one of activations.
        small, large = row["accumulate"]
        assert 0 < small < large


@pytest.mark.slow
def test_a_planned_step_takes_as_long_as_those_of_a_real_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """By the rate that the run's self-test found on synthetic records. How near to its plain products a processor comes
    in a model this small is for benchmarks/plan.py to report: it says more of the processor than of the plan."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    plan = importlib.import_module("plan")
    told = plan.machine_of(2)
    data = plan.prepare(tmp_path / "data", 2000)
    raw = plan.config("captioner", data, tmp_path / "run", steps=plan.DROPPED + 7)
    run = plan.train(raw, tmp_path, 2)
    rate, measured = plan.rate_of(run, 2), statistics.median(plan.step_seconds(run))
    planned = plan.planned(raw, told, 2, rate).time.seconds
    shown = f"planned {planned:.2f} s at {rate:.1f} records/s, measured {measured:.2f} s; {told}"
    assert measured / NEAR < planned < measured * NEAR, shown
    larger = plan.config("captioner", data, tmp_path / "run", batch=2 * plan.BATCHES["captioner"])
    assert plan.planned(larger, told, 2, rate).time.seconds > measured * NEAR, shown
