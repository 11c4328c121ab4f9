"""What the planner and --dry-run say of TAN simulations, and what public records that are mixed in cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.epsilon.accountant import Event, epsilon
from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.model.build import build
from murmuration.train.commands.dry_run import as_text, meaning
from murmuration.train.config.load import load
from murmuration.train.planner.cluster import step_time
from murmuration.train.planner.memory import WeightCounts, memory
from murmuration.train.planner.rows import Batch
from murmuration.train.run.public_mixing import PublicGradient
from murmuration.train.self_test.probes import synthetic_batch
from tests.support.planner_world import CLUSTER, COST, SHAPES, SMALL, WEIGHTS, ask, config, counted, peak_of
from tests.support.train_helpers import alone

SAID = "NOT PRIVATE at ε = 1: a TAN simulation, batch and noise divided by 2; ε above is that of what will run"


def changed(tmp_path: Path, privacy: dict[str, Any], **phase: Any) -> Path:
    path = config(tmp_path, model=SMALL)
    raw = json.loads(path.read_text())
    raw["phases"][0]["privacy"] |= {"epsilon": 1.0, "expected_batch": 4096} | privacy
    raw["phases"][0] |= phase
    path.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("sigma", [2.0, None])
def test_a_simulation_is_called_not_private_at_the_epsilon_of_its_config(
    sigma: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    path = changed(tmp_path, {"noise_multiplier": sigma, "tan": {"scale": 2.0}}, steps=10)
    assert ask(path) == 0
    said = capsys.readouterr().out
    assert f"  note          {SAID}\n" in said and said.index("ε by step") < said.index(SAID), "ε is above the note"
    assert "(mae, a simulation)" in said and "(mae, private)" not in said
    assert ask(path, "--json") == 0
    (phase,) = json.loads(capsys.readouterr().out)["phases"]
    assert phase["note"] == SAID and phase["plan"]["stands_for"] == {"epsilon": 1.0, "scale": 2.0}
    run = phase["plan"]
    spent = epsilon([Event(run["threshold"] / 2**32, run["noise_multiplier"], 10)], run["delta"])
    assert phase["batch"] == pytest.approx(2048, abs=0.1) and phase["epsilons"][-1] == [10, pytest.approx(spent)]
    assert run["noise_multiplier"] == 1.0 if sigma else spent > 1.2, "what will run, not what the config reads as"
    assert f"  note          {SAID}\n" in as_text(meaning(load(path, [])))


def test_a_phase_that_keeps_its_promise_has_no_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(tmp_path, {"noise_multiplier": 4.0})
    assert ask(path) == 0
    said = capsys.readouterr().out
    assert "(mae, private)" in said and "NOT PRIVATE" not in said and "note " not in said
    assert ask(path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["phases"][0]["note"] is None
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
    path = changed(tmp_path, {}, mixing=mixing(2048))
    assert ask(path) == 0
    assert "4,096 records and 2,048 public ones mixed in per step" in capsys.readouterr().out
    assert ask(path, "--json") == 0
    (phase,) = json.loads(capsys.readouterr().out)["phases"]
    assert ask(changed(tmp_path, {}), "--json") == 0
    (without,) = json.loads(capsys.readouterr().out)["phases"]
    public = phase["time"]["compute"] - without["time"]["compute"]
    # On 16 GPUs, 128 records each at the price of a non-private step.
    assert phase["mixed"] == 2048 and public == pytest.approx(128 * phase["cost"]["step_flops"] / 100e12)
    assert phase["time"]["public"] == pytest.approx(public) and without["time"]["public"] == 0.0


def test_mixing_does_not_advise_a_stage_that_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = {"family": "mae", "size": "base", "width": 4096, "heads": 16, "depth": 3}
    for more, advised in (({}, True), ({"mixing": mixing(64)}, False)):
        path = changed(tmp_path, {}, **more)
        raw = json.loads(path.read_text()) | {"model": big, "zero_optimization": {"stage": 0}}
        raw["train_micro_batch_size_per_gpu"] = 128
        path.write_text(json.dumps(raw))
        assert ask(path, "--memory", "20" if not more else "26", "--json") == 0
        (phase,) = json.loads(capsys.readouterr().out)["phases"]
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
