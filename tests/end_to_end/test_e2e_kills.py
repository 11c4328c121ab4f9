"""Kill -9 at random operations of a real run with two processes, and on from there: nothing lost, nothing twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accounting.history import History
from tests.end_to_end.conftest import Launch
from tests.end_to_end.warm import WarmLauncher
from train.checkpoint import Checkpoints

Make = Callable[..., tuple[Launch, Path]]
STEPS = 8
# How far a life may get at most, by rank and the kind of operation that ends it: a rest must be left to be killed in.
REACH = [
    {"write": 9, "fsync": 24, "pread": 100, "replace": 3, "rename": 2, "mkdir": 3},
    {"fsync": 1, "pread": 100},
]


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmLauncher]:
    launcher = WarmLauncher()
    yield launcher
    launcher.close()


def toy(config: dict[str, Any]) -> None:
    """Fast, with a checkpoint at every other step, so that kills meet many of them."""
    for phase in config["phases"]:
        phase["data"]["reading"] = {"workers": 0}
    private = config["phases"][1]
    del private["evaluation"]
    private["steps"] = STEPS
    config["run"] |= {"checkpoint_every": 2, "keep_key": True}


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    loaded = Checkpoints.newest(run_dir / "checkpoints")
    assert loaded is not None and loaded.position.step == STEPS
    return loaded.weights()


@pytest.fixture(scope="module")
def whole(warm: WarmLauncher, small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    job, run_dir = Launch.written(small_config, folder, "whole", toy)
    ended = warm.run(job.config, folder)
    assert ended.codes == [0, 0], ended.output
    return run_dir


def killed_often(warm: WarmLauncher, job: Launch, kinds: list[tuple[int, str]], seed: int) -> None:
    """One life per (rank, kind of operation), ended by a kill at a random one of its kind; then one to the end."""
    draw = random.Random(seed)
    for rank, kind in kinds:
        kill = {"rank": rank, "kind": kind, "at": draw.randint(1, REACH[rank][kind]), "before": draw.random() < 0.5}
        ended = warm.run(job.config, job.cwd, kill=kill)
        # The other one is killed, too, unless it noticed first and ended in order.
        assert ended.codes[rank] == -9 and ended.codes[1 - rank] in (-9, 75), (kill, ended.codes, ended.output)
    ended = warm.run(job.config, job.cwd)
    assert ended.codes == [0, 0], ended.output


def nothing_lost_and_nothing_twice(run_dir: Path, whole: Path) -> None:
    found, expected = weights(run_dir), weights(whole)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    history, straight = (History.read(folder / "ledger.jsonl")[0] for folder in (run_dir, whole))
    assert [step_id.step for step_id in history.opened] == list(range(1, STEPS + 1))
    assert history.opened == straight.opened and history.committed == straight.committed
    assert len(history.segments) == 1 and not history.faults
    assert history.epsilon() == straight.epsilon()
    assert not list((run_dir / "checkpoints").glob(".*")), "orphans were left"


def test_five_kills_at_random_operations(warm: WarmLauncher, whole: Path, launch: Make) -> None:
    job, run_dir = launch("five", toy)
    killed_often(warm, job, [(0, "mkdir"), (0, "fsync"), (1, "pread"), (0, "write"), (0, "rename")], seed=1)
    nothing_lost_and_nothing_twice(run_dir, whole)


INSIDE = {
    "checkpoint writes": [(0, "rename"), (1, "fsync"), (0, "replace"), (0, "fsync"), (0, "rename"), (1, "fsync")],
    "open and commit": [(0, "write"), (0, "fsync"), (0, "write"), (0, "fsync"), (0, "write"), (0, "write")],
    "index reads": [(0, "pread"), (1, "pread"), (0, "pread"), (1, "pread"), (1, "pread"), (0, "pread")],
    "the start, and anywhere": [(0, "mkdir"), (0, "fsync"), (0, "write"), (0, "replace"), (1, "pread"), (0, "replace")],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("where", INSIDE)
@pytest.mark.parametrize("seed", [2, 3])
def test_many_kills(warm: WarmLauncher, whole: Path, launch: Make, where: str, seed: int) -> None:
    """48 in all."""
    job, run_dir = launch("many", toy)
    killed_often(warm, job, INSIDE[where], seed)
    nothing_lost_and_nothing_twice(run_dir, whole)
