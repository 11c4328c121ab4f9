"""Kill -9 at random operations of a real run with two processes, and on from there: nothing lost, nothing twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launching import Launch
from tests.support.runs import account, nothing_lost_and_nothing_twice, toy

Make = Callable[..., tuple[Launch, Path]]
# How far a life may get at most, by rank and the kind of operation that ends it: a rest must be left to be killed in.
REACH = [
    {"write": 9, "fsync": 24, "pread": 100, "replace": 3, "rename": 2, "mkdir": 3},
    {"fsync": 1, "pread": 100},
]


def killed_often(job: Launch, kinds: list[tuple[int, str]], seed: int) -> None:
    """One life per (rank, kind of operation), ended by a kill at a random one of its kind; then one to the end."""
    draw = random.Random(seed)
    for rank, kind in kinds:
        kill = {"rank": rank, "kind": kind, "at": draw.randint(1, REACH[rank][kind]), "before": draw.random() < 0.5}
        ended = job.end(kill=kill)
        # The other one is killed, too, unless it noticed first and ended in order.
        assert ended.codes[rank] == -9 and ended.codes[1 - rank] in (-9, 75), (kill, ended.codes, ended.output)
    ended = job.end()
    assert ended.codes == [0, 0], ended.output


@pytest.mark.core
def test_three_kills_at_random_operations(whole: Path, launch: Make) -> None:
    """Killed and resumed time and again, it ends with the weights of the uninterrupted run, and verifies."""
    job, run_dir = launch("three", toy)
    killed_often(job, [(0, "fsync"), (1, "pread"), (0, "rename")], seed=1)
    nothing_lost_and_nothing_twice(run_dir, whole)
    verified = account("verify", str(run_dir))
    assert verified.returncode == 0, verified.stdout + verified.stderr


INSIDE = {
    "checkpoint writes": [(0, "rename"), (1, "fsync"), (0, "replace"), (0, "fsync"), (0, "rename"), (1, "fsync")],
    "open and commit": [(0, "write"), (0, "fsync"), (0, "write"), (0, "fsync"), (0, "write"), (0, "write")],
    "index reads": [(0, "pread"), (1, "pread"), (0, "pread"), (1, "pread"), (1, "pread"), (0, "pread")],
    "the start, and anywhere": [(0, "mkdir"), (0, "fsync"), (0, "write"), (0, "replace"), (1, "pread"), (0, "replace")],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("where", INSIDE)
@pytest.mark.parametrize("seed", [2, 3])
def test_many_kills(whole: Path, launch: Make, where: str, seed: int) -> None:
    """48 in all."""
    job, run_dir = launch("many", toy)
    killed_often(job, INSIDE[where], seed)
    nothing_lost_and_nothing_twice(run_dir, whole)
