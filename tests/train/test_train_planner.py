"""The planner: counts against the real model, memory against recorded allocations, answers as people see them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from murmuration.accounting.epsilon.accountant import Event, epsilon
from murmuration.model.build import build
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.rule import ClipRule
from murmuration.train.commands.forecast import main
from murmuration.train.engines.exchange import WEIGHED_AT_ONCE
from murmuration.train.engines.sharded_sums import MOST_SLOTS
from murmuration.train.planner.cluster import Cluster, step_time
from murmuration.train.planner.cost import RecordCost
from murmuration.train.planner.memory import Memory, WeightCounts, fsdp2_memory, memory
from murmuration.train.planner.rows import Batch
from murmuration.train.self_test.probes import synthetic_batch
from tests.support.planner_world import CLUSTER, COST, SHAPES, ask, config, counted, peak_of


@pytest.mark.parametrize("objective", ["mae", "caption"])
def test_operations_counted_from_shapes_are_those_of_the_real_model(objective: Any) -> None:
    shape, cost = SHAPES[objective], counted(SHAPES[objective], objective)
    model, records = build(shape, objective), 6
    batch = synthetic_batch(shape, objective, records, 0)
    with FlopCounterMode(display=False) as forward:
        loss = model(batch.inputs).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert cost.forward_flops == pytest.approx(forward.get_total_flops() / records, rel=1e-6)
    whole = (forward.get_total_flops() + backward.get_total_flops()) / records
    assert cost.step_flops == pytest.approx(whole, rel=1e-6)
    # Gram matrices or whole gradients, whichever is less: no more than one weight gradient again.
    assert 0.02 * cost.step_flops < cost.clipping_flops < 0.34 * cost.step_flops


@pytest.mark.parametrize("objective", ["mae", "caption"])
def test_a_record_takes_as_much_memory_as_a_real_clipped_micro_batch_shows(objective: Any) -> None:
    shape, cost = SHAPES[objective], counted(SHAPES[objective], objective)
    model, clip = build(shape, objective), BookKeepingClip(ClipRule("flat", 1.0, 0.0))
    clip.prepare(model)
    peaks = []
    for records in (8, 24):
        batch = synthetic_batch(shape, objective, records, 0)
        peaks.append(peak_of(lambda batch=batch: clipped_totals(clip, model, batch.inputs, batch.present)))
    measured = (peaks[1] - peaks[0]) / 16
    assert 0.9 * measured < cost.bytes < 1.25 * measured


def test_time_is_arithmetic_rings_and_whole_micro_batches() -> None:
    weights = WeightCounts(trainable=100_000_000, frozen=0, largest=1, moments=8, private=True)
    cost = RecordCost(1e9, 3e9, 1e9, 1e6, 0.0)
    # 1000 records on 4 ranks are 250 each: 4 rows of 64, of which 6 slots are padding.
    found = step_time(cost, weights, CLUSTER, Batch(1000, public=False), 64, stage=1)
    assert found.compute == pytest.approx(256 * 4e9 / 10e12)
    one = 0.75 / 5e9  # seconds per byte that passes the ring once
    assert found.exchange == pytest.approx(one * (8e8 + 4e8)), "fp64 sums to the shards, and the weights back"
    assert found.noise == pytest.approx(0.25) and found.seconds == pytest.approx(found.exchange + found.noise)
    partitioned = step_time(cost, weights, CLUSTER, Batch(1000, public=False), 64, stage=3)
    assert partitioned.exchange == pytest.approx(one * (4e8 + 4e8 + 4 * 4 * 4e8)), "4 rows fit into one window"
    many = step_time(cost, weights, CLUSTER, Batch(4 * 64 * 15, public=False), 64, stage=3)
    assert many.exchange == pytest.approx(one * (3 * 4e8 + 4e8 + 15 * 4 * 4e8)), "of 7, 7 and 1 micro-batches"
    wide = step_time(cost, weights, CLUSTER, Batch(4 * 3000, public=False), 3000, stage=3)
    assert wide.exchange == pytest.approx(one * (8e8 + 4e8 + 4 * 4e8)), "one window in fp64"
    assert step_time(
        cost, weights, CLUSTER, Batch(1000, public=False), 64, 1, records_per_second=64.0
    ).compute == pytest.approx(4.0)
    public = WeightCounts(100_000_000, 0, 1, 8, private=False)
    assert step_time(cost, public, CLUSTER, Batch(1000), 64, 1).compute == pytest.approx(4 * 63 * 3e9 / 10e12)


def test_probes_of_the_loss_cost_three_forward_passes_each_and_the_weights_on_both_sides() -> None:
    plain = WeightCounts(trainable=100_000_000, frozen=0, largest=1, moments=8, private=True)
    probed = replace(plain, moments=12, probed=5)
    without, with_probes = (step_time(COST, weights, CLUSTER, Batch(1000), 32, 1) for weights in (plain, probed))
    more = 1 + 3 * COST.forward_flops / 5 / COST.private_flops
    assert with_probes.compute == pytest.approx(more * without.compute) and with_probes.noise == without.noise
    held = memory(probed, 0, 1, offload=False).while_computing - memory(plain, 0, 1, offload=False).while_computing
    assert held == 2 * 4 * 100_000_000


def test_frozen_weights_are_gathered_too_and_whole_weights_get_all_their_noise_on_every_rank() -> None:
    weights = WeightCounts(trainable=100_000_000, frozen=100_000_000, largest=1, moments=8, private=True)
    cost, one = RecordCost(1e9, 3e9, 1e9, 1e6, 0.0), 0.75 / 5e9
    partitioned = step_time(cost, weights, CLUSTER, Batch(1000), 64, stage=3)
    assert partitioned.exchange == pytest.approx(one * (4e8 + 4e8 + 4 * 4 * 8e8))
    assert step_time(cost, weights, CLUSTER, Batch(1000), 64, stage=0).noise == pytest.approx(1.0)
    assert CLUSTER.usable_bytes == pytest.approx(0.9 * 16 * 2**30)


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    weights = WeightCounts(trainable=50_000_000, frozen=1000, largest=9_000_000, moments=8, private=True)
    cost = RecordCost(1.0, 1.0, 1.0, 3e7, 1e6)
    for stage in range(4):
        for offload in (False, True) if stage else (False,):
            need = memory(weights, stage, 8, offload)
            room = 3e9
            largest = need.micro_batch(room, cost)
            assert largest > 10
            assert need.peak(largest, cost) <= room < need.peak(largest + 1, cost)
            assert need.micro_batch(need.stays, cost) == 0
    sums = [memory(weights, stage, 8, False).sums for stage in range(4)]
    assert sums == [8 * 50_000_000] * 3 + [(4 + 8 / 8) * 50_000_000], "sharded only where the model is"
    stays = [memory(weights, stage, 8, False).stays for stage in (0, 1, 3)]
    assert stays == sorted(stays, reverse=True)
    assert memory(weights, 1, 8, True).stays < memory(weights, 1, 8, False).stays


def test_memory_is_what_each_stage_holds() -> None:
    """The terms that test_e2e_planner.py finds in real allocations: 80 weights, the largest of 30, 8 ranks."""

    def held(stage: int, private: bool, offload: bool = False, ranks: int = 8) -> Memory:
        weights = WeightCounts(trainable=80, frozen=20, largest=30, moments=8, private=private)
        return memory(weights, stage, ranks, offload)

    under_way = 2 * 8 * 80  # of fp64 sums, at so small a size all of them
    assert held(0, True) == Memory(400, 640, 0, 640, 0, 320 + 8 * 80)
    assert held(0, False) == Memory(400, 0, 320, 640, 0, 320)
    assert held(1, True) == Memory(400, 640, 0, 120, 0, 320 + under_way)
    assert held(2, True) == Memory(400, 640, 0, 120, 0, 40 + under_way), "its gradient is reduced before"
    assert held(1, True, ranks=1) == Memory(400, 640, 0, 960, 0, 5 * 320)
    wide = WeightCounts(trainable=10**9, frozen=0, largest=30, moments=8, private=True)
    assert memory(wide, 1, 2, False).update == 5 * 2e9
    assert memory(wide, 1, 64, False).update == pytest.approx(4.5e9), "half a byte per weight is under way"
    assert memory(wide, 2, 64, False).update == pytest.approx(4e9 + 4e9 / 64)
    assert held(1, False) == Memory(400, 0, 320, 120, 0, 40)
    assert held(2, False) == Memory(400, 0, 40, 120, 0, 40)
    assert held(3, True) == Memory(50, 320 + 80, 40, 120, 400, 2 * 320, wide=320)
    assert held(3, False) == Memory(50, 0, 40, 120, 400, 40)
    assert held(1, True, offload=True) == Memory(400, 640, 0, 0, 0, 320 + under_way, 0, 120 + 80 + 240, 120)
    assert held(1, False, offload=True) == Memory(400, 0, 320, 0, 0, 0, 0, 120 + 80 + 240, 0)
    assert held(3, True, offload=True) == Memory(50, 400, 0, 0, 400, 2 * 320, 0, 120 + 80, 120, wide=320)
    few = memory(WeightCounts(trainable=80, frozen=0, largest=70, moments=8, private=True), 0, 8, False)
    assert few.update == 320 + 8 * 80
    huge = memory(WeightCounts(trainable=10**9, frozen=0, largest=70, moments=8, private=True), 0, 8, False)
    assert huge.update == 4e9 + 8 * WEIGHED_AT_ONCE
    cost = RecordCost(1.0, 1.0, 1.0, 7.0, 3.0)
    assert held(3, True).peak(2, cost) == 610 + 640 and held(3, True).peak(90, cost, 1.0) == 610 + 400 + 990
    assert held(3, True).micro_batch(610 + 400 + 990, cost, 1.0) == 90 and held(3, True).stays == 610
    widest = 610 + 400 + 11 * MOST_SLOTS
    assert held(3, True).micro_batch(widest, cost, 1.0) == MOST_SLOTS
    assert held(3, True).micro_batch(widest + 11 + 319, cost, 1.0) == MOST_SLOTS, "one more needs fp64 windows"
    assert held(3, True).micro_batch(widest + 11 + 320, cost, 1.0) == MOST_SLOTS + 1
    assert held(3, True).peak(MOST_SLOTS, cost, 1.0) == widest
    assert held(3, True).peak(MOST_SLOTS + 1, cost, 1.0) == widest + 11 + 320


def test_fsdp2_holds_shards_of_the_ranks_of_a_copy_and_no_second_copy_of_the_weights() -> None:
    """As in test_e2e_planner.py: 80 weights."""
    private, public = (WeightCounts(trainable=80, frozen=20, largest=30, moments=8, private=p) for p in (True, False))
    assert fsdp2_memory(private, 8) == Memory(50, 320 + 80, 0, 80, 400, 8 * 80, wide=320)
    assert fsdp2_memory(private, 2) == Memory(200, 320 + 320, 0, 320, 400, 8 * 80, wide=320)
    assert fsdp2_memory(public, 8) == Memory(50, 0, 40, 80, 400, 0)
    large = replace(private, trainable=640 << 20)
    assert fsdp2_memory(large, 64).update == (640 << 20) / 4, "a quarter of a byte per weight is under way"
    assert fsdp2_memory(large, 8).update == (640 << 20) / 2
    assert fsdp2_memory(replace(private, trainable=3 << 20), 8).update == 16 << 20


def test_copies_of_the_weights_exchange_sums_once_and_gather_within() -> None:
    n, gather = 1_000_000, 4 * 3 / 4
    weights = WeightCounts(trainable=n, frozen=0, largest=n, moments=8, private=True)
    cluster = Cluster(gpus=16, memory_gib=16, tflops=10, link_gb_per_s=5, noise_per_second=1e8, node_link_gb_per_s=50)
    # One micro-batch on each rank: four gathers and one window among four ranks, then fp64 shards over four copies.
    copies = step_time(COST, weights, cluster, Batch(16 * 64), 64, 3, ranks_per_copy=4)
    assert copies.exchange == pytest.approx(n * (5 * gather / 50e9 + 2 * (8 / 4) * 3 / 4 / 5e9))
    assert copies.noise == pytest.approx(n / 4 / 1e8)
    whole = step_time(COST, weights, cluster, Batch(16 * 64), 64, 3, ranks_per_copy=16)
    assert whole.exchange == pytest.approx(5 * n * 4 * 15 / 16 / 5e9), "over the slow link"
    public = step_time(COST, replace(weights, private=False), cluster, Batch(2 * 16 * 64), 64, 3, ranks_per_copy=4)
    assert public.exchange == pytest.approx(2 * n * (5 * gather / 50e9 + 2 * (4 / 4) * 3 / 4 / 5e9)), "in every row"


def test_a_recording_keeps_the_memory_of_a_micro_batch() -> None:
    cost = RecordCost(1.0, 1.0, 1.0, 7.0, 3.0)
    need = memory(WeightCounts(trainable=80, frozen=20, largest=30, moments=8, private=True), 1, 8, False)
    # Beside it one that is computed as usual, and two copies of the fp64 sums.
    room = need.stays + 2 * 640 + 2 * 10 * 37
    assert need.recorded_micro_batch(room, cost) == 37 and need.recorded_micro_batch(room - 1, cost) == 36
    assert need.recorded_micro_batch(need.stays, cost) == 0 and need.micro_batch(room, cost) > 74


def test_a_plan_for_fsdp2_names_the_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, run={"engine": "fsdp2", "shard_over": 8})
    assert ask(path, "--node-link", "300", "--json") == 0
    (phase,) = json.loads(capsys.readouterr().out)["phases"]
    assert [layout["ranks_per_copy"] for layout in phase["layouts"]] == [2, 4, 8, 16]
    assert phase["chosen"]["ranks_per_copy"] == 8 and phase["chosen"]["recorded"] is None
    assert ask(path, "--node-link", "300") == 0
    assert "FSDP2 over 8" in capsys.readouterr().out
    assert ask(config(tmp_path, run={"engine": "fsdp2", "shard_over": 3})) == 2
    assert "16 ranks cannot be divided into copies of 3" in capsys.readouterr().err
    assert ask(config(tmp_path, run={"engine": "local"})) == 2


def test_a_plan_says_what_is_launched_kernel_by_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def recorded(*arguments: str, **changes: Any) -> tuple[int | None, bool]:
        assert ask(config(tmp_path, **changes), "--json", *arguments) == 0
        (phase,) = json.loads(capsys.readouterr().out)["phases"]
        assert phase["layouts"][-1]["recorded"] is None, "at stage 3 nothing is"
        return phase["chosen"]["recorded"], any("kernel by kernel" in line for line in phase["advice"])

    plenty, said = recorded()
    assert plenty is not None and plenty > 32 and not said
    few, said = recorded("--memory", "22")
    assert few is not None and few < 32 and said
    assert recorded(run={"cuda_graph": "off"}) == (None, False)


def test_a_plan_without_data_and_without_the_model_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert ask(config(tmp_path), "--json") == 0
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    found = json.loads(capsys.readouterr().out)
    (phase,) = found["phases"]
    trainable = phase["weights"]["trainable"]
    assert trainable > 600_000_000 and grown < trainable, "the weights alone would be four bytes each"
    assert phase["chosen"]["memory"]["sums"] == 8 * trainable
    assert (phase["layouts"][0]["stage"], phase["layouts"][0]["offload"]) == (0, False)
    last = phase["epsilons"][-1]
    assert last[0] == 100
    exact = epsilon([Event(phase["plan"]["threshold"] / 2**32, 1.0, 100)], phase["plan"]["delta"])
    assert last[1] == pytest.approx(exact)
    assert [t for t, _ in phase["epsilons"]] == [20, 40, 60, 80, 100]
    assert phase["gpu_hours"] == pytest.approx(phase["days"] * 24 * 16)
    assert phase["days"] == pytest.approx(phase["time"]["seconds"] * 100 / 86400)
    assert math.isclose(found["total"]["gpu_hours"], phase["gpu_hours"])


def test_what_does_not_fit_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = config(tmp_path, zero_optimization={"stage": 0}, train_micro_batch_size_per_gpu=128)
    assert ask(small, "--memory", "16") == 0
    said = capsys.readouterr().out
    assert "a micro-batch of 128 needs" in said and "zero_optimization.stage = 1" in said
    assert "does not fit  <- config" in said and "GPU-hours" not in said, "not even one record at a time"
    assert ask(small, "--memory", "20") == 0
    said = capsys.readouterr().out
    assert "does not fit" not in said and "a micro-batch of 128 needs" in said and "GPU-hours" in said
    assert ask(small, "--memory", "4") == 0
    assert "no stage fits" in capsys.readouterr().out


def test_what_is_missing_is_asked_for_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path)
    assert main(["--config", str(path), "--gpus", "2", "--memory", "80", "--tflops", "100"]) == 2
    assert "--link is missing" in capsys.readouterr().err
    assert ask(path, "--tflops", "0") == 2
    assert "tflops must be a positive number" in capsys.readouterr().err
    without = json.loads(path.read_text())
    del without["phases"][0]["data"]["expected_records"]
    path.write_text(json.dumps(without))
    assert ask(path) == 2
    assert "expected_records" in capsys.readouterr().err


def test_planning_leaves_the_random_state_and_the_default_device_alone() -> None:
    before = torch.random.get_rng_state()
    counted(SHAPES["mae"], "mae")
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.zeros(1).device.type == "cpu"
