"""An "auto" micro-batch is the largest that the planner lets in, one number for all ranks, and kept by its run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.planner.forecast import counted, forecast
from murmuration.train.planner.memory import GIB, memory
from murmuration.train.planner.micro_batch import KEY, MOST_ON_PROCESSORS, NAME, largest, on_this_machine, settled
from tests.support.planner_world import CLUSTER, SMALL
from tests.support.planner_world import config as written
from tests.support.train_helpers import alone


def automatic(tmp_path: Path, **changes: Any) -> Config:
    return load(written(tmp_path, **{KEY: "auto", "model": SMALL} | changes), [])


@pytest.mark.parametrize("rows", [1, 30, 300])
def test_what_fits_is_taken_and_no_larger_one_would_need_fewer_rows(tmp_path: Path, rows: int) -> None:
    config = automatic(tmp_path)
    cost, weights = counted(config, config.phases[0])
    need = memory(weights, 1, 1, False)
    room = need.peak(rows, cost)
    found = largest(config, 1, room, gpus=True)
    privacy = config.phases[0].privacy
    assert privacy is not None and need.peak(found, cost) <= room and found >= 1
    most = privacy.expected_batch + 4 * privacy.expected_batch**0.5
    fitting = [size for size in range(found, int(most) + 1) if need.peak(size, cost) <= room]
    assert len({math.ceil(most / size) for size in fitting}) == 1


def test_processors_gain_nothing_from_a_large_one_and_no_room_is_refused(tmp_path: Path) -> None:
    config = automatic(tmp_path)
    assert 1 < largest(config, 1, 1000 * GIB, gpus=False) <= MOST_ON_PROCESSORS
    assert largest(config, 1, 1000 * GIB, gpus=True) > MOST_ON_PROCESSORS
    with pytest.raises(RecipeError, match="has no room for one record"):
        largest(config, 1, 1000.0, gpus=True)


def test_a_run_keeps_its_number_and_its_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run_dir = automatic(tmp_path), tmp_path / "run"
    first = settled(config, run_dir, alone())
    assert f"{KEY}: {first.micro_batch} rows" in capsys.readouterr().out
    (run_dir / NAME).write_text(json.dumps({KEY: 3}))
    again = settled(config, run_dir, alone())
    assert again.micro_batch == on_this_machine(config, run_dir).micro_batch == 3
    given = load(written(tmp_path, **{KEY: 3, "model": SMALL}), [])
    assert again.digest(0, {}) == given.digest(0, {}) != first.digest(0, {})
    for damaged in ("", "[]", '{"train_micro_batch_size_per_gpu": 0}', '{"train_micro_batch_size_per_gpu": true}'):
        (run_dir / NAME).write_text(damaged)
        with pytest.raises(RecipeError, match=NAME):
            settled(config, run_dir, alone())


def test_a_number_that_is_given_is_left_alone_and_nothing_is_written(tmp_path: Path) -> None:
    config = automatic(tmp_path, **{KEY: 5})
    assert settled(config, tmp_path / "run", alone()) == config == on_this_machine(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_plan_for_a_cluster_answers_it_by_the_memory_of_its_gpus(tmp_path: Path) -> None:
    plan = forecast(automatic(tmp_path), CLUSTER)[0]
    assert plan.micro_batch == plan.batch.even(CLUSTER.gpus, plan.chosen.micro_batch) > 0
    assert not any("set train_micro_batch_size_per_gpu" in line for line in plan.advice)
    assert plan.chosen.peak_bytes <= CLUSTER.usable_bytes
