"""Training from a web server that fails in the middle: the run stops, resumes, and ends bitwise where it would have."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.index import ShardIndex, build
from tests.end_to_end.conftest import ROOT, Launch, ledger_lines, opened_steps
from tests.end_to_end.test_e2e_training import STEPS, final_weights

sys.path.append(str(ROOT / "tests" / "data"))
from range_server import Fault, RangeServer, serving

Make = Callable[..., tuple[Launch, Path]]


@pytest.mark.slow
def test_a_server_that_fails_stops_the_run_and_resuming_changes_nothing(
    launch: Make, small_data: Path, tmp_path: Path
) -> None:
    local, local_dir = launch("local", ranks=1, launcher="python")
    code, output = local.run()
    assert code == 0, output
    private = small_data / "private"
    reads = 0

    def breaks_down(_path: str, _attempt: int) -> Fault:
        """In the middle of the fourth private step or so; 48 records are expected per step."""
        nonlocal reads
        reads += 1
        return "500" if reads > 200 else "ok"

    with serving(RangeServer(private)) as server:
        names = [shard.name for shard in ShardIndex.open(private).shards]
        build([f"{server.url}/{name}" for name in names], tmp_path / "index")

        def from_the_web(config: dict[str, Any]) -> None:
            config["phases"][1]["data"] |= {"path": str(tmp_path / "index"), "reading": {"timeout_seconds": 20}}

        server.fault = breaks_down
        remote, remote_dir = launch("remote", from_the_web, ranks=1, launcher="python")
        code, output = remote.run()
        assert code == 2 and "cannot be read (" in output and "resume" in output and ".tar" in output, output
        lines = ledger_lines(remote_dir)
        opened = len(opened_steps(remote_dir))
        committed = [line["step"] for line in lines if line["kind"] == "commit"]
        assert 0 < len(committed) < STEPS and opened >= len(committed)
        server.fault = lambda _path, _attempt: "ok"
        code, output = remote.run()
        assert code == 0, output
    state = json.loads((remote_dir / "run_state.json").read_text())
    assert state["status"] == "done"
    expected, found = final_weights(local_dir), final_weights(remote_dir)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
