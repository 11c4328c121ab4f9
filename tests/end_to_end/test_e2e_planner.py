"""Memory as planned against the record of all allocations of real engines, two ranks, every ZeRO stage."""

from __future__ import annotations

import pytest

from tests.end_to_end.conftest import TIMEOUT, run_worker
from train.planner_memory import Weights, memory


@pytest.mark.slow
def test_what_stays_and_what_the_update_needs_is_what_real_engines_allocate() -> None:
    rows = run_worker("planner_worker.py", ranks=2, seconds=3 * TIMEOUT)
    assert [row["stage"] for row in rows] == [0, 1, 1, 2, 3]
    for row in rows:
        weights = Weights(row["elements"], 0, row["largest"], 8, True)
        planned = memory(weights, row["stage"], row["world"], row["offload"])
        # A CPU has one memory: host and device together.
        stays, most = planned.stays + planned.host, 1.08 if row["offload"] else 1.02
        assert stays / most < row["stays"] < stays * most, row
        if not row["offload"]:
            assert planned.update / 1.12 < row["update"] < planned.update * 1.03, row
        # Smaller micro-batches need less, so that the slope is one of activations.
        small, large = row["accumulate"]
        assert 0 < small < large
