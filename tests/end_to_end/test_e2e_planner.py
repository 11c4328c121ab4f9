"""The planner against real launches of two ranks: memory at every ZeRO stage, and the time of a private step."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from murmuration.train.engines.exchange import SHORTEST_RUN
from murmuration.train.planner.memory import WeightCounts, fsdp2_memory, memory
from tests.support.launching import TIMEOUT, run_worker

NEAR = 2**0.5
"""What a planned step may be off by, either way: then a plan for twice the batch cannot pass for this one."""


SCRATCH = 2.5e6
"""Bytes that gloo and DeepSpeed's buckets take whatever the model's size. The model's weights alone are 12e6."""
LATE = 4 * SHORTEST_RUN
"""A run of sums that gloo no longer holds when the next is sent, or still does when the next but one is: it depends on
how far a rank is behind the others."""


@pytest.mark.slow
def test_what_stays_and_what_the_update_needs_is_what_real_engines_allocate(tmp_path: Path) -> None:
    """On three ranks, of which a share is not a half."""
    counted: dict[str, Any] = {"launcher": "deepspeed", "preload": counter(tmp_path)}
    rows = run_worker("planner_worker.py", ranks=3, seconds=4 * TIMEOUT, **counted)
    assert len(rows) == 12
    for row in rows:
        weights = WeightCounts(row["elements"], 0, row["largest"], 8, row["private"])
        planned = memory(weights, row["stage"], row["world"], row["offload"])
        private, exact = row["private"], planned.host_update > 0
        assert private or not exact
        # A CPU has one memory: host and device together. Gradients of a public batch add up between updates; ZeRO-3
        # leaves weights of a clipped micro-batch gathered, which the update finds there.
        stays = row["stays"] + (0 if private else row["kept"])
        assert _near(stays, planned.stays + planned.host, 1.01), row
        assert not private or row["kept"] < planned.gathered + SCRATCH, row
        update = row["update"] + (row["kept"] if private else 0)
        handed = 4 * row["elements"] / row["world"] if exact else 0
        needed = max(planned.update, planned.host_update + handed)
        # At stages 1 and 2 runs of fp64 sums are under way, beside the gradient that was handed over.
        late = 2 * LATE if private and row["stage"] in (1, 2) else 0
        assert _near(update, needed, 1.12 if row["stage"] == 3 else 1.01, late), row
        # Smaller micro-batches need less, so that the slope is one of activations.
        small, large = row["accumulate"]
        assert 0 < small < large


@pytest.mark.slow
def test_sums_of_a_sharded_model_take_four_bytes_per_weight_and_eight_of_a_shard(tmp_path: Path) -> None:
    """By what a private engine holds and a public one does not, where four ranks hold one copy, or two."""
    ranks = 4
    counted: dict[str, Any] = {"launcher": "torchrun", "preload": counter(tmp_path)}
    rows = run_worker("planner_worker.py", "--sharded", ranks=ranks, seconds=2 * TIMEOUT, **counted)
    held = {(row["stage"], row["private"]): row["stays"] for row in rows}
    layouts = {3: ranks, "fsdp2": ranks, "hsdp": 2}
    assert len(held) == 2 * len(layouts)
    weights = WeightCounts(rows[0]["elements"], 0, rows[0]["largest"], 8, True)
    assert memory(weights, 3, ranks, False).sums == (4 + 8 / ranks) * weights.trainable
    for layout, of_a_copy in layouts.items():
        formula = (4 + 8 / of_a_copy) * weights.trainable
        sums = held[layout, True] - held[layout, False]
        print(f"{layout} on {ranks} ranks: {sums:,} bytes of sums, {formula:,.0f} by the formula")
        assert formula / 1.01 < sums < formula * 1.01 + SCRATCH / 2, (layout, sums, formula)
    for row in rows:
        if row["stage"] != 3:
            _fsdp2_as_planned(row, layouts[row["stage"]])


def _fsdp2_as_planned(row: dict[str, Any], ranks_per_copy: int) -> None:
    weights = WeightCounts(row["elements"], 0, row["largest"], 8, row["private"])
    planned = fsdp2_memory(weights, ranks_per_copy)
    stays = row["stays"] + (0 if row["private"] else row["kept"])
    assert _near(stays, planned.stays, 1.01), (row, planned)
    assert not row["private"] or row["kept"] < planned.gathered + SCRATCH, (row, planned)
    # The update frees what was gathered, so that a public one may need less than nothing.
    update = row["update"] + (row["kept"] if row["private"] else 0)
    assert update < planned.update * 1.01 + SCRATCH + LATE, (row, planned)
    assert not row["private"] or update > planned.update / 1.01 - LATE, (row, planned)


def counter(folder: Path) -> Path:
    counting = folder / "allocations.so"
    source = Path(__file__).with_name("allocations.cpp")
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", str(counting), str(source)], check=True)
    return counting


def _near(measured: float, planned: float, within: float, late: int = 0) -> bool:
    return planned / within - late < measured < planned * 1.01 + SCRATCH + late


@pytest.mark.slow
@pytest.mark.by_hand  # compares seconds: another program on the machine of CI would move them
def test_a_planned_step_takes_as_long_as_those_of_a_real_run(
    tmp_path: Path, benchmark: Callable[[str], ModuleType]
) -> None:  # fmt: skip
    """By the rate that the run's self-test found on synthetic records. How near to its plain products a processor comes
    in a model this small is for benchmarks/plan.py to report: it says more of the processor than of the plan."""
    plan = benchmark("plan")
    told = plan.machine_of(2)
    data = plan.prepare(tmp_path / "data", 2000)
    raw = plan.config("captioner", data, tmp_path / "run", steps=plan.DROPPED + 7)
    run = plan.train(raw, tmp_path, 2)
    rate, measured = plan.rate_of(run, 2), statistics.median(plan.step_seconds(run))
    planned = plan.planned(raw, told, 2, rate).time.seconds
    shown = f"planned {planned:.2f} s at {rate:.1f} records/s, measured {measured:.2f} s; {told}"
    assert measured / NEAR < planned < measured * NEAR, shown
    larger = plan.config("captioner", data, tmp_path / "run", batch=2 * plan.BATCHES["captioner"])
    assert plan.planned(larger, told, 2, rate).time.seconds > planned * NEAR, shown
