"""The planner: counts against the real model, memory against recorded allocations, answers as people see them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.tensorboard import SummaryWriter

from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.event import Event
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import Poisson, threshold_for
from murmuration.data.draw.micro_batch import MicroBatch, even_width, row_count, slots
from murmuration.model.build import build
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.rule import ClipRule
from murmuration.train.commands.dry_run import as_text, meaning
from murmuration.train.commands.forecast import main
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.engines.exchange import WEIGHED_AT_ONCE
from murmuration.train.engines.sharded_sums import MOST_SLOTS
from murmuration.train.planner.cluster import Cluster, step_time
from murmuration.train.planner.cost import RecordCost
from murmuration.train.planner.drowned import DROWNED, USEFUL, drowned, noise_over_signal
from murmuration.train.planner.forecast import forecast
from murmuration.train.planner.memory import Memory, WeightCounts, fsdp2_memory, memory
from murmuration.train.planner.rows import Batch
from murmuration.train.run.public_mixing import PublicGradient
from murmuration.train.self_test.probes import synthetic_batch
from murmuration.train.storage.run_dir import RunDir
from tests.support.planner_world import CLUSTER, COST, SHAPES, SMALL, WEIGHTS, ask, config, counted, peak_of
from tests.support.shipped_recipes import FILES, PLANS, SIGMAS, private_phase
from tests.support.train_helpers import alone


def planned(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The answer about the one phase."""
    assert ask(path, "--json", *arguments) == 0
    (phase,) = json.loads(capsys.readouterr().out)["phases"]
    return phase


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
    phase = planned(path, capsys, "--node-link", "300")
    assert [layout["ranks_per_copy"] for layout in phase["layouts"]] == [2, 4, 8, 16]
    assert phase["chosen"]["ranks_per_copy"] == 8 and phase["chosen"]["recorded"] is None
    assert ask(path, "--node-link", "300") == 0
    assert "FSDP2 over 8" in capsys.readouterr().out
    assert ask(config(tmp_path, run={"engine": "fsdp2", "shard_over": 3})) == 2
    assert "16 ranks cannot be divided into copies of 3" in capsys.readouterr().err
    assert ask(config(tmp_path, run={"engine": "local"})) == 2


def test_a_plan_says_what_is_launched_kernel_by_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def recorded(*arguments: str, **changes: Any) -> tuple[int | None, bool]:
        phase = planned(config(tmp_path, **changes), capsys, *arguments)
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
    exact = epsilon([Event(phase["plan"]["sampling"]["threshold"] / 2**32, 1.0, 100)], phase["plan"]["delta"])
    assert last[1] == pytest.approx(exact)
    assert [t for t, _ in phase["epsilons"]] == [20, 40, 60, 80, 100]
    assert phase["gpu_hours"] == pytest.approx(phase["days"] * 24 * 16)
    assert phase["days"] == pytest.approx(phase["time"]["seconds"] * 100 / 86400)
    assert phase["reads_per_second"] == pytest.approx(phase["batch"] / phase["time"]["seconds"])
    assert math.isclose(found["total"]["gpu_hours"], phase["gpu_hours"])


def test_a_unit_reads_as_many_records_as_it_may_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    units = {"unit": "patient", "rows_per_unit": 3, "expected_units": 1_000_000, "expected_records": None}
    phase = planned(config(tmp_path, data=units), capsys)
    assert phase["reads_per_second"] == pytest.approx(3 * phase["batch"] / phase["time"]["seconds"])


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
    assert ask(config(tmp_path, data={"expected_records": None})) == 2
    assert "expected_records" in capsys.readouterr().err


def test_planning_leaves_the_random_state_and_the_default_device_alone() -> None:
    before = torch.random.get_rng_state()
    counted(SHAPES["mae"], "mae")
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.zeros(1).device.type == "cpu"


# The planner's benchmark reads what it says it reads: no training here, and no wall times.


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


# Plans by which nothing can be learned are told, with a plan that is useful when it is calibrated.


def calibrated_plan(records: int, batch: float, steps: int, epsilon: float) -> PrivacyPlan:
    threshold, delta = threshold_for(records, batch), 1 / (2 * records)
    sigma = calibrate_sigma(Event(threshold / 2**32, 1.0, steps), epsilon, delta)
    return PrivacyPlan(
        records=records, sampling=Poisson(threshold), clip_norm=1.0, noise_multiplier=sigma, steps=steps, delta=delta,
        epsilon_budget=epsilon,
    )  # fmt: skip


def test_the_ratio_is_how_far_noise_moves_weights_over_how_far_agreeing_gradients_do() -> None:
    settings, weights = replace(calibrated_plan(1000, 50, 40, 1.0), clip_norm=0.3), 4000
    torch.manual_seed(1)
    divisor, std = settings.divisor, settings.noise_std
    noise = sum((torch.randn(weights) * std / divisor for _ in range(settings.steps)), torch.zeros(weights)).norm()
    gradients = settings.steps * divisor * settings.clip_norm / divisor
    assert float(noise) / gradients == pytest.approx(noise_over_signal(settings, weights), rel=0.05)


def test_the_named_epsilon_is_useful_and_a_smaller_one_is_not() -> None:
    weights = 1_000_000
    said = drowned(calibrated_plan(20_000, 1000, 50, 0.002), weights, calibrated=True)
    assert said is not None and "nothing can be learned" in said and "expected_batch" not in said
    named = float(re.findall(r"privacy.epsilon = (\S+)", said)[0])
    assert noise_over_signal(calibrated_plan(20_000, 1000, 50, named), weights) <= USEFUL
    assert noise_over_signal(calibrated_plan(20_000, 1000, 50, 0.8 * named), weights) > USEFUL


def test_the_named_batch_is_useful_at_the_same_epsilon() -> None:
    weights = 10**8
    said = drowned(calibrated_plan(1_000_000, 20, 100, 8.0), weights, calibrated=True)
    assert said is not None
    batch = int(re.findall(r"privacy.expected_batch = (\d+)", said)[0])
    assert noise_over_signal(calibrated_plan(1_000_000, batch, 100, 8.0), weights) <= USEFUL
    assert noise_over_signal(calibrated_plan(1_000_000, batch / 4, 100, 8.0), weights) > USEFUL


def test_given_noise_is_answered_with_noise_that_fits_the_budget() -> None:
    given = replace(calibrated_plan(20_000, 1000, 50, 8.0), noise_multiplier=2503.0)
    said = drowned(given, 1_377_088, calibrated=False)
    assert said is not None and said.startswith("σ = 2,503: nothing can be learned")
    sigma, spent = re.findall(r"privacy.noise_multiplier = (\S+), which spends ε = (\S+)$", said)[0]
    useful = replace(given, noise_multiplier=float(sigma))
    assert noise_over_signal(useful, 1_377_088) <= USEFUL and float(spent) <= 8.0


def test_where_nothing_helps_it_says_so() -> None:
    said = drowned(calibrated_plan(100, 10, 5, 0.1), 10**9, calibrated=True)
    assert said is not None and "nearest useful plan: none" in said and 'trainable = "head"' in said


def test_no_published_recipe_is_called_useless() -> None:
    for records, batch, steps, budget, sigma in PLANS.values():
        published = PrivacyPlan(
            records=records, sampling=Poisson(threshold_for(records, batch)), clip_norm=1.0, noise_multiplier=sigma,
            steps=steps, delta=1 / (2 * records), epsilon_budget=budget,
        )  # fmt: skip
        assert noise_over_signal(published, 2 * 10**9) < DROWNED, "even with two billion weights"


def test_a_dry_run_and_the_planner_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, {"noise_multiplier": 1e8})
    warned = "  warning       σ = 1e+08: nothing can be learned"
    text = as_text(meaning(load(path, [])))
    assert warned in text and "nothing is measured while it trains, so nobody will see whether it learns" in text
    assert ask(path) == 0 and warned in capsys.readouterr().out


# What public records that are mixed in cost.


BATCH = {"epsilon": 1.0, "expected_batch": 4096}


def test_a_private_phase_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, BATCH | {"noise_multiplier": 4.0}, model=SMALL)
    assert ask(path) == 0
    said = capsys.readouterr().out
    assert "(mae, private)" in said and "NOT PRIVATE" not in said
    assert "NOT PRIVATE" not in as_text(meaning(load(path, [])))


def mixing(batch: int) -> dict[str, Any]:
    return {"data": {"source": "synthetic", "records": 100_000}, "batch": batch}


def test_public_records_that_are_mixed_in_take_their_time() -> None:
    batch = Batch(1000, 31.6, public=False)
    alone_, mixed = (step_time(COST, WEIGHTS, CLUSTER, batch, 64, 1, mixed=count) for count in (0, 300))
    # 300 on 4 ranks are 75 each: two rows of 38, without clipping; and one more fp32 sum of gradients.
    assert mixed.public == pytest.approx(76 * 3e9 / 10e12) and mixed.rows == alone_.rows
    assert mixed.compute == pytest.approx(alone_.compute + mixed.public)
    assert mixed.exchange - alone_.exchange == pytest.approx(2 * 0.75 * 4e8 / 5e9)
    measured = step_time(COST, WEIGHTS, CLUSTER, batch, 64, 1, records_per_second=64.0, mixed=300)
    # A record without clipping takes three of the four parts of a private one.
    assert measured.public == pytest.approx(76 / 64 * 0.75)
    twin = WeightCounts(100_000_000, 0, 1, 8, private=False)
    assert step_time(COST, twin, CLUSTER, batch, 64, 1, records_per_second=64.0, mixed=300).public == pytest.approx(
        76 / 64
    )


def test_mixed_records_are_in_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, BATCH, {"mixing": mixing(2048)}, model=SMALL)
    assert ask(path) == 0
    assert "4,096 records and 2,048 public ones mixed in per step" in capsys.readouterr().out
    phase, without = planned(path, capsys), planned(config(tmp_path, BATCH, model=SMALL), capsys)
    public = phase["time"]["compute"] - without["time"]["compute"]
    # On 16 GPUs, 128 records each at the price of a non-private step.
    assert phase["mixed"] == 2048 and public == pytest.approx(128 * phase["cost"]["step_flops"] / 100e12)
    assert phase["time"]["public"] == pytest.approx(public) and without["time"]["public"] == 0.0


def test_mixing_does_not_advise_a_stage_that_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = {"family": "mae", "size": "base", "width": 4096, "heads": 16, "depth": 3}
    settings = {"model": big, "zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 128}
    for more, room, advised in (({}, "20", True), ({"mixing": mixing(64)}, "26", False)):
        phase = planned(config(tmp_path, BATCH, more, **settings), capsys, "--memory", room)
        assert any("stage = 1" in line for line in phase["advice"])
        assert any("stage = 3" in line for line in phase["advice"]) == advised


def test_public_gradients_lie_whole_on_every_rank() -> None:
    weights = [WeightCounts(80, 20, 30, 8, True, mixed=mixed) for mixed in (False, True)]
    for stage, offload in ((0, False), (1, False), (1, True), (2, False), (3, False)):
        without, with_ = (memory(each, stage, 8, offload) for each in weights)
        assert with_.stays == without.stays and with_.host == without.host
        assert with_.update == without.update + 4 * 80 and with_.while_computing == without.while_computing + 8 * 80


def test_the_mean_public_gradient_takes_as_much_memory_as_counted() -> None:
    shape, cost = SHAPES["caption"], counted(SHAPES["caption"], "caption")
    model = build(shape, "caption")
    own, size = sum(p.numel() for p in model.parameters()), 2
    batches = [synthetic_batch(shape, "caption", size, seed) for seed in (0, 1)]

    def rows(step: int) -> Iterator[MicroBatch]:
        del step
        yield from batches

    gradient = PublicGradient(model, rows, alone())
    # So few records that the gradients are most of it, and two rows: the second finds those of the first.
    peak = peak_of(lambda: gradient.of_step(1))
    planned = memory(WeightCounts(own, 0, 1, 8, True, mixed=True), 1, 1, False).while_computing + size * cost.bytes
    assert 0.92 * planned < peak < 1.08 * planned


# Rows of micro-batches of Poisson draws and of public records, and what the planner advises about them.


DRAWS = 20_000


def plan_of(records: int, batch: float) -> PrivacyPlan:
    return PrivacyPlan(
        records=records, sampling=Poisson(threshold_for(records, batch)), clip_norm=1.0, noise_multiplier=1.0, steps=1,
        delta=1e-3 / records, epsilon_budget=1.0,
    )  # fmt: skip


def simulated(of: PrivacyPlan, gpus: int, micro_batch: int) -> float:
    """The mean number of rows, by the function that training cuts its draws with."""
    drawn = np.random.default_rng(5).binomial(of.records, of.sampling_rate, DRAWS)
    return float(np.mean([row_count(int(total), gpus, micro_batch) for total in drawn]))


@pytest.mark.parametrize(
    ("records", "batch", "gpus", "micro_batch"),
    [
        # At the mean of a row: half of the draws need one more.
        (1_000_000, 4096, 128, 32), (14_000_000, 98_304, 1024, 96), (233_804_767, 1_310_720, 1024, 128),
        # Between two, below the first, and so small that many numbers of rows occur.
        (1_000_000, 1000, 8, 64), (1_000_000, 4000, 128, 32), (600, 48, 2, 8), (600, 48, 2, 1), (10_000, 10, 8, 64),
        # A draw of half of the records scatters less; the records as a whole do not scatter.
        (8192, 4096, 128, 32), (4096, 4096, 128, 32), (4097, 4097, 128, 32),
    ],
)  # fmt: skip
def test_rows_are_those_of_simulated_draws(records: int, batch: float, gpus: int, micro_batch: int) -> None:
    of = plan_of(records, batch)
    found = Batch.drawn(of).rows(gpus, micro_batch)
    real = simulated(of, gpus, micro_batch)
    # Of so many draws, the mean of a number that moves by one or two; and what the normal curve is off by.
    assert found == pytest.approx(real, abs=0.02 * max(1.0, real**0.5))
    slots_of_a_row = gpus * micro_batch * found
    assert Batch.drawn(of).padding(gpus, micro_batch) == pytest.approx(1 - of.divisor / slots_of_a_row)


def test_the_mean_of_the_rows_is_not_the_rows_of_the_mean() -> None:
    assert Batch.drawn(plan_of(1_000_000, 4096)).rows(128, 32) == pytest.approx(1.5, abs=0.01)
    assert Batch.drawn(plan_of(4096, 4096)).rows(128, 32) == 1.0, "with q = 1 every draw is the same"
    assert Batch(4096).rows(128, 32) == 1.0 and Batch(4097).rows(128, 32) == 2.0, "public batches do not scatter"
    assert Batch(1).rows(8, 64) == Batch(0.5, 0.7).rows(8, 64) == 1.0, "an empty draw is a step, too"


def test_the_row_function_is_that_of_the_slots() -> None:
    for total in (0, 1, 63, 64, 65, 1000):
        rows = {len(slots(np.arange(total), rank, 4, 16)) for rank in range(4)}
        assert rows == {row_count(total, 4, 16)} == {round(Batch(total).rows(4, 16))}


@pytest.mark.parametrize("world", [1, 3, 4])
def test_public_rows_are_no_wider_than_they_must_be(world: int) -> None:
    for total in (1, 15, 16, 17, 64, 65, 100, 1000):
        width = even_width(total, world, 16)
        cut = [slots(np.arange(total), rank, world, width) for rank in range(world)]
        assert width <= 16 and {len(rows) for rows in cut} == {row_count(total, world, 16)}
        filled = np.concatenate([rows[rows >= 0] for rows in cut])
        assert np.array_equal(np.sort(filled), np.arange(total)), "each record once"
        assert sum(rows.size for rows in cut) == world * round(Batch(total).slots(world, 16))
        assert sum(rows.size for rows in cut) - total < world * len(cut[0]), "less than one slot of a row is padding"
    private = Batch(100, public=False)
    assert private.slots(4, 16) == 32 and Batch(100).slots(4, 16) == 26


def test_time_counts_the_rows_of_the_draws() -> None:
    private = step_time(COST, WEIGHTS, CLUSTER, Batch.drawn(plan_of(1_000_000, 4096)), 64, stage=1)
    exact = step_time(COST, WEIGHTS, CLUSTER, Batch(4096), 64, stage=1)
    assert exact.rows == 16 and exact.compute == pytest.approx(16 * 64 * 4e9 / 10e12)
    assert private.rows == pytest.approx(16.5, abs=0.01)
    assert private.compute == pytest.approx(exact.compute * private.rows / 16)
    gathered = [step_time(COST, WEIGHTS, CLUSTER, Batch(4096, spread), 64, stage=3).exchange for spread in (0, 64)]
    assert gathered[1] > gathered[0], "a row more gathers the weights once more"


@pytest.mark.parametrize(
    ("records", "batch", "gpus", "micro_batch"),
    [(1_000_000, 4096, 128, 32), (14_000_000, 98_304, 1024, 96), (1_000_000, 4000, 16, 256), (100_000, 500, 8, 64)],
)
def test_advised_micro_batches_waste_less_in_simulated_draws(
    records: int, batch: float, gpus: int, micro_batch: int
) -> None:
    of = plan_of(records, batch)
    drawn = Batch.drawn(of)
    for size in (drawn.even(gpus, micro_batch), drawn.fewer(gpus, micro_batch)):
        if size:
            assert drawn.mean / gpus < size * round(simulated(of, gpus, size)), "not at the mean of the draws"
            assert size * simulated(of, gpus, size) < micro_batch * simulated(of, gpus, micro_batch) * 1.01
    assert drawn.even(gpus, micro_batch) <= micro_batch
    assert drawn.fewer(gpus, micro_batch) == 0 or drawn.fewer(gpus, micro_batch) > micro_batch
    assert drawn.even(gpus, 0) == 0


def advised(tmp_path: Path, capsys: Any, micro_batch: int, *more: str, public: int | None = None) -> dict[str, Any]:
    """What is said of private batches of 4096, or of public ones."""
    changes: dict[str, Any] = {"privacy": {"expected_batch": 4096}}
    if public is not None:
        changes = {"phase": {"privacy": None, "batch": public}, "data": {"public": True}}
    path = config(tmp_path, train_micro_batch_size_per_gpu=micro_batch, model=SMALL, **changes)
    return planned(path, capsys, *more)


def test_a_private_phase_is_not_sent_to_the_mean_of_its_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    found = advised(tmp_path, capsys, 32, "--gpus", "128")
    assert found["time"]["rows"] == pytest.approx(1.5, abs=0.01) and found["micro_batch"] == 32
    assert found["batch"] == pytest.approx(4096, abs=0.1) and found["batch_spread"] == pytest.approx(64, rel=0.01)
    # Four standard deviations are 256 records, two for each GPU.
    assert found["chosen"]["micro_batch"] == 34
    assert "33% of the slots are padding: train_micro_batch_size_per_gpu = 34 leaves 6%" in found["advice"]
    better = advised(tmp_path, capsys, 34, "--gpus", "128")
    assert better["time"]["rows"] == pytest.approx(1, abs=0.01) and "padding" not in "".join(better["advice"])
    assert better["time"]["compute"] < 0.75 * found["time"]["compute"]
    public = advised(tmp_path, capsys, 32, "--gpus", "128", public=4096)
    assert public["time"]["rows"] == 1 and public["chosen"]["micro_batch"] == 32
    assert "padding" not in "".join(public["advice"])


def test_what_fits_fills_its_rows_evenly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = advised(tmp_path, capsys, 8, "--gpus", "16")
    memory, cost = wanted["chosen"]["memory"], wanted["cost"]["kept_bytes"] + wanted["cost"]["working_bytes"]
    room = (memory["stays"] + memory["gathered"] + 256.5 * cost) / 2**30
    found = advised(tmp_path, capsys, 1024, "--gpus", "16", "--memory", str(room), "--free", "0")
    # 256 fit, which is the mean of a rank's draws: a second row would be all but empty, every second step.
    assert found["chosen"]["micro_batch"] == 256
    assert found["micro_batch"] == 136 and "set train_micro_batch_size_per_gpu to 136" in found["advice"]


def test_padding_that_no_micro_batch_saves_asks_for_fewer_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    found = advised(tmp_path, capsys, 1, "--gpus", "8", public=10)
    assert "38% of the slots are padding: use fewer GPUs" in found["advice"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name != "demo"])
def test_planned_hours_are_the_planners(name: str) -> None:
    config = load(FILES[name], [])
    if name in SIGMAS:
        config = load(FILES[name], [f"phases.{private_phase(config)}.privacy.noise_multiplier={SIGMAS[name]}"])
    cluster = Cluster(8, 80, 150, 25, 4e8)
    hours = sum(phase.gpu_hours(cluster) or math.nan for phase in forecast(config, cluster))
    said = float(re.findall(r"([\d,.]+) GPU-hours", config.about.hardware)[0].replace(",", ""))
    assert abs(hours / said - 1) < 0.05, hours
