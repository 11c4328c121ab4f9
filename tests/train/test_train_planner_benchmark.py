"""The planner's benchmark reads what it says it reads: no training here, and no wall times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from murmuration.train.config.root import Config
from murmuration.train.storage.run_dir import RunDir

TOLD = {"mae_tflops": 0.05, "captioner_tflops": 0.05, "link_gb_per_s": 1.0, "noise_per_second": 5e7}


@pytest.fixture
def plan(benchmark: Callable[[str], ModuleType]) -> Any:
    return benchmark("plan")


def raw_of(plan: Any, name: str, **more: Any) -> dict[str, Any]:
    raw = plan.config(name, Path("nowhere"), Path("run"), **more)
    raw["phases"][0]["data"]["expected_records"] = plan.RECORDS
    Config.model_validate(raw)
    return raw


def test_step_times_are_the_differences_on_the_private_board(plan: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.prepare()
    writer = SummaryWriter(str(run.private_board))
    times = [100.0, 110.0, 113.0, 116.0, 118.0, 120.5]
    for step, at in enumerate(times, start=1):
        writer.add_scalar("private/records", 80.0 + step, step, walltime=at)
        writer.add_scalar("private/loss", 1.0, step, walltime=at + 0.5)
    writer.close()
    run.public_log.write_text('{"phase": "private", "step": 1, "lr": 1}\n{"step": 1, "samples_per_second": 30.0}\n')
    assert plan.DROPPED == 3
    assert plan.step_seconds(run) == pytest.approx([2.0, 2.5]), "the first ones warm up"
    assert plan.rate_of(run, 2) == 15.0
    raw = raw_of(plan, "captioner")
    found = plan.compared(raw, TOLD, run, 2)
    forecast = plan.planned(raw, TOLD, 2).time
    assert found["predicted_over_measured"] == pytest.approx(forecast.seconds / 2.25)
    by_rate = plan.planned(raw, TOLD, 2, 15.0).time
    assert found["predicted_by_rate_over_measured"] == pytest.approx(by_rate.seconds / 2.25)
    assert by_rate.compute == pytest.approx(by_rate.rows * plan.MICRO_BATCH / 15.0)


@pytest.mark.parametrize("name", ["mae", "captioner"])
def test_the_measured_products_are_most_of_what_a_step_is_planned_to_compute(plan: Any, name: str) -> None:
    found = plan.planned(raw_of(plan, name), TOLD, 2)
    products = sum(6 * rows * inputs * outputs for rows, inputs, outputs in plan.layers(name)) / plan.MICRO_BATCH
    assert 0.85 * found.cost.step_flops < products < 1.15 * found.cost.step_flops
    # Nearly all draws need the same number of rows, so that the median step is the mean one.
    assert abs(found.time.rows - round(found.time.rows)) < 0.05
    assert found.time.compute > 10 * (found.time.exchange + found.time.noise), "arithmetic dominates"
    twice = plan.planned(raw_of(plan, name, batch=2 * plan.BATCHES[name]), TOLD, 2)
    assert 1.6 < twice.time.seconds / found.time.seconds < 2.1
