"""Rows of micro-batches of Poisson draws and of public records, and what the planner advises about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.accounting.plan import PrivacyPlan, threshold_for
from murmuration.data.draw.micro_batch import even_width, row_count, slots
from murmuration.train.planner.cluster import step_time
from murmuration.train.planner.rows import Batch
from tests.support.planner_world import CLUSTER, COST, SMALL, WEIGHTS, ask, config

DRAWS = 20_000


def plan(records: int, batch: float) -> PrivacyPlan:
    return PrivacyPlan(
        records=records, threshold=threshold_for(records, batch), clip_norm=1.0, noise_multiplier=1.0, steps=1,
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
    of = plan(records, batch)
    found = Batch.drawn(of).rows(gpus, micro_batch)
    real = simulated(of, gpus, micro_batch)
    # Of so many draws, the mean of a number that moves by one or two; and what the normal curve is off by.
    assert found == pytest.approx(real, abs=0.02 * max(1.0, real**0.5))
    slots_of_a_row = gpus * micro_batch * found
    assert Batch.drawn(of).padding(gpus, micro_batch) == pytest.approx(1 - of.divisor / slots_of_a_row)


def test_the_mean_of_the_rows_is_not_the_rows_of_the_mean() -> None:
    assert Batch.drawn(plan(1_000_000, 4096)).rows(128, 32) == pytest.approx(1.5, abs=0.01)
    assert Batch.drawn(plan(4096, 4096)).rows(128, 32) == 1.0, "with q = 1 every draw is the same"
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
    private = step_time(COST, WEIGHTS, CLUSTER, Batch.drawn(plan(1_000_000, 4096)), 64, stage=1)
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
    of = plan(records, batch)
    drawn = Batch.drawn(of)
    for size in (drawn.even(gpus, micro_batch), drawn.fewer(gpus, micro_batch)):
        if size:
            assert drawn.mean / gpus < size * round(simulated(of, gpus, size)), "not at the mean of the draws"
            assert size * simulated(of, gpus, size) < micro_batch * simulated(of, gpus, micro_batch) * 1.01
    assert drawn.even(gpus, micro_batch) <= micro_batch
    assert drawn.fewer(gpus, micro_batch) == 0 or drawn.fewer(gpus, micro_batch) > micro_batch
    assert drawn.even(gpus, 0) == 0


def advised(tmp_path: Path, capsys: Any, changes: dict[str, Any], micro_batch: int, *more: str) -> dict[str, Any]:
    path = config(tmp_path, train_micro_batch_size_per_gpu=micro_batch, model=SMALL)
    raw = json.loads(path.read_text())
    phase = raw["phases"][0]
    phase["privacy"] |= changes.pop("privacy", {})
    phase |= changes
    if phase["privacy"] is None or "batch" in phase:
        del phase["privacy"]
        phase["data"]["public"] = True
    path.write_text(json.dumps(raw))
    assert ask(path, "--json", *more) == 0
    return json.loads(capsys.readouterr().out)["phases"][0]


def test_a_private_phase_is_not_sent_to_the_mean_of_its_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    found = advised(tmp_path, capsys, {"privacy": {"expected_batch": 4096}}, 32, "--gpus", "128")
    assert found["time"]["rows"] == pytest.approx(1.5, abs=0.01) and found["micro_batch"] == 32
    assert found["batch"] == pytest.approx(4096, abs=0.1) and found["batch_spread"] == pytest.approx(64, rel=0.01)
    # Four standard deviations are 256 records, two for each GPU.
    assert found["chosen"]["micro_batch"] == 34
    assert "33% of the slots are padding: train_micro_batch_size_per_gpu = 34 leaves 6%" in found["advice"]
    better = advised(tmp_path, capsys, {"privacy": {"expected_batch": 4096}}, 34, "--gpus", "128")
    assert better["time"]["rows"] == pytest.approx(1, abs=0.01) and "padding" not in "".join(better["advice"])
    assert better["time"]["compute"] < 0.75 * found["time"]["compute"]
    public = advised(tmp_path, capsys, {"batch": 4096}, 32, "--gpus", "128")
    assert public["time"]["rows"] == 1 and public["chosen"]["micro_batch"] == 32
    assert "padding" not in "".join(public["advice"])


def test_what_fits_fills_its_rows_evenly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = {"privacy": {"expected_batch": 4096}}
    wanted = advised(tmp_path, capsys, dict(batch), 8, "--gpus", "16")
    memory, cost = wanted["chosen"]["memory"], wanted["cost"]["kept_bytes"] + wanted["cost"]["working_bytes"]
    room = (memory["stays"] + memory["gathered"] + 256.5 * cost) / 2**30
    found = advised(tmp_path, capsys, dict(batch), 1024, "--gpus", "16", "--memory", str(room), "--free", "0")
    # 256 fit, which is the mean of a rank's draws: a second row would be all but empty, every second step.
    assert found["chosen"]["micro_batch"] == 256
    assert found["micro_batch"] == 136 and "set train_micro_batch_size_per_gpu to 136" in found["advice"]


def test_padding_that_no_micro_batch_saves_asks_for_fewer_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    found = advised(tmp_path, capsys, {"batch": 10}, 1, "--gpus", "8")
    assert "38% of the slots are padding: use fewer GPUs" in found["advice"]
