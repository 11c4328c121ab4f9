"""A checkpoint of any layout of the shards, resumed at any other: the same next update of weights, moments, averages.

Layouts are the ZeRO stages 0 to 3 and FSDP2, each on 1, 2 or 3 ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import TIMEOUT, run_worker

LAYOUTS = ("0", "1", "2", "3", "fsdp2")
WORLDS = (1, 2, 3)
KINDS = {"weights", "exp_avg", "exp_avg_sq", "weights_ema"}
# Of the distance that the update moved them.
MOST = 1e-6


def check(found: list[dict[str, Any]], expected: set[tuple[str, str]]) -> None:
    assert {(transfer["from"], transfer["to"]) for transfer in found} == expected
    for transfer in found:
        assert transfer["steps"] == 3 and set(transfer["apart"]) == KINDS, transfer
        assert all(apart <= MOST for apart in transfer["apart"].values()), transfer


def test_each_layout_on_two_ranks_goes_on_from_itself_and_from_another(tmp_path: Path) -> None:
    """What is saved is the same whoever saves it; ZeRO-1 and 2 cut it alike."""
    found = run_worker("transfers_worker.py", "--in-turn", "save+load", str(tmp_path), ranks=2)
    names = [f"{layout}-of-2" for layout in LAYOUTS if layout != "2"]
    check(found, {*zip(names, names, strict=True), *zip(names, [*names[1:], names[0]], strict=True)})


@pytest.mark.slow
def test_every_pair_of_layouts_and_world_sizes(tmp_path: Path) -> None:
    for world in WORLDS:
        run_worker("transfers_worker.py", "save", str(tmp_path), ranks=world, seconds=2 * TIMEOUT)
    found = [
        transfer
        for world in WORLDS
        for transfer in run_worker("transfers_worker.py", "load", str(tmp_path), ranks=world, seconds=2 * TIMEOUT)
    ]
    names = [f"{layout}-of-{world}" for layout in LAYOUTS for world in WORLDS]
    check(found, {(one, other) for one in names for other in names})
