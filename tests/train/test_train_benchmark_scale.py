"""The simulation of many GPUs, where its answer is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from murmuration.train.planner.memory import WeightCounts

RECORDS, BATCH = 10_000_000, 65_536.0


@pytest.fixture
def scale(benchmark: Callable[[str], ModuleType]) -> Any:
    return benchmark("scale")


def setting(scale: Any, **changes: Any) -> Any:
    """Nothing costs anything but the records."""
    free = scale.Setting(RECORDS, BATCH, 1e12, 1e18, 1e18, jitter=0.0, late=0.0, steps=50)
    return replace(free, **changes)


def work(scale: Any, **changes: Any) -> Any:
    known = scale.Work(WeightCounts(100_000_000, 0, 10_000_000, 8, True), 256, 0.05, 0.045, 1e18)
    return replace(known, **changes)


@pytest.mark.parametrize("stage", [1, 3])
def test_alone_records_take_their_time_and_slots_without_one_too(scale: Any, stage: int) -> None:
    one = scale.simulated(work(scale), 1, stage, setting(scale))
    assert one["efficiency"] > 0.998 and one["seconds"] == pytest.approx(BATCH / 256 * 0.05, rel=0.01)
    # 255 ranks need a second micro-batch in most steps, which hardly holds anything.
    many = scale.simulated(work(scale), 255, stage, setting(scale))
    assert many["bottleneck"] == "padding" and many["efficiency"] == pytest.approx(0.53, abs=0.04)


def test_each_cost_is_found_where_it_was_put(scale: Any) -> None:
    def bottleneck(stage: int = 1, gpus: int = 16, **changes: Any) -> str:
        # All records at once, so that every draw fills its micro-batches.
        whole = setting(scale, records=65_536, batch=65_536.0, **changes)
        return str(scale.simulated(work(scale), gpus, stage, whole)["bottleneck"])

    assert bottleneck(link=1.0) == "exchange"
    assert bottleneck(jitter=0.1) == "unequal"
    assert bottleneck(late=0.5) == "unequal"
    assert bottleneck(noise_per_second=1e5) == "noise"
    assert bottleneck(ids_per_second=10.0) == "draw"


def test_a_draw_that_is_shared_takes_each_rank_two_parts(scale: Any) -> None:
    slow = setting(scale, ids_per_second=1e4)
    whole, shared = (scale.simulated(work(scale), gpus, 1, slow)["parts"] for gpus in (1, 64))
    waited = RECORDS * 2 / 64 / 1e4 - (shared["ideal"] + shared["padding"])
    assert shared["draw"] == pytest.approx(waited, rel=1e-6)
    assert whole["draw"] == pytest.approx(RECORDS / 1e4 - whole["ideal"] - whole["padding"], rel=1e-6)


def test_nodes_wait_within_and_meet_once(scale: Any) -> None:
    """Nodes of one GPU are ranks that meet once; one node of all is ZeRO-3's waiting."""
    uneven = setting(scale, jitter=0.1)

    def waited(stage: int | str, node: int) -> float:
        nodes = replace(uneven, node=node)
        return float(scale.simulated(work(scale), 64, stage, nodes)["parts"]["unequal"])

    assert waited(scale.HSDP, 1) == pytest.approx(waited(1, 8))
    assert waited(scale.HSDP, 64) == pytest.approx(waited(3, 8))
    assert waited(1, 8) < waited(scale.HSDP, 8) < waited(3, 8) > 1.5 * waited(1, 8)


def test_what_nodes_exchange_is_what_passes_their_links(scale: Any) -> None:
    n = 100e6

    def exchanged(gpus: int, records: int) -> float:
        # All records at once: so many micro-batches of 256 on each rank, and as many windows of 4 bytes.
        every = setting(scale, records=records, batch=float(records), link=50.0, node_link=400.0, node=8)
        return float(scale.simulated(work(scale), gpus, scale.HSDP, every)["parts"]["exchange"])

    inside = (4 * n + 3 * 4 * 4 * n) * 7 / 8 / 400e9
    assert exchanged(8, 3 * 256 * 8) == pytest.approx(inside), "a single node"
    across = 2 * (8 * n / 8) * 7 / 8 / 50e9
    assert exchanged(64, 3 * 256 * 64) == pytest.approx(inside + across)


def test_a_copy_on_a_node_takes_the_memory_of_a_shard_of_it(scale: Any) -> None:
    def gib(stage: int | str) -> float:
        return float(scale.simulated(work(scale), 64, stage, setting(scale))["gib_without_activations"])

    # Weights, window, fp64 totals and moments; DeepSpeed would keep another copy of the weights, and a gradient.
    stays = 100e6 * (4 / 8 + 4 + 8 / 8 + 8 / 8)
    assert gib(scale.HSDP) == pytest.approx((stays + 4 * 100e6) / 2**30)
    assert gib(3) < gib(1)
