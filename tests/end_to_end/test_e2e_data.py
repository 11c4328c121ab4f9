"""Training from a web server that fails in the middle: the run stops, resumes, and ends bitwise where it would have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.data.index.shard_index import build
from murmuration.data.synthetic.index import shape_samples, write_shards
from tests.support.launching import Launch, ledger_lines, opened_steps
from tests.support.range_server import Fault, RangeServer, serving
from tests.support.runs import SMALL_STEPS, account, final_weights

Make = Callable[..., tuple[Launch, Path]]


@pytest.mark.slow
def test_a_server_that_fails_stops_all_ranks_in_order_and_resuming_changes_nothing(
    launch: Make, tmp_path: Path
) -> None:
    """One shard alone fails, so that one rank alone notices; the other must not wait for it until it is killed."""
    private = tmp_path / "private"
    names = [path.name for path in write_shards(private, shape_samples(5, 600, 32), 100)]
    build(private)

    def from_disk(config: dict[str, Any]) -> None:
        config["phases"][1]["data"]["path"] = str(private)

    local, local_dir = launch("local", from_disk)
    code, output = local.run()
    assert code == 0, output
    reads = 0

    def breaks_down(path: str, _attempt: int) -> Fault:
        """In the middle of the fourth private step or so; 48 records are expected per step."""
        nonlocal reads
        reads += 1
        return "500" if reads > 200 and path == names[-1] else "ok"

    with serving(RangeServer(private)) as server:
        build([f"{server.url}/{name}" for name in names], tmp_path / "index")

        def from_the_web(config: dict[str, Any]) -> None:
            config["phases"][1]["data"] |= {"path": str(tmp_path / "index"), "reading": {"timeout_seconds": 20}}

        server.fault = breaks_down
        remote, remote_dir = launch("remote", from_the_web)
        code, output = remote.run()
        assert code == 75, output
        said = f"stopped by records that cannot be read: {server.url}/{names[-1]}: cannot be read ("
        assert said in output and "start the same command again to continue" in output, output
        assert "another rank ended" not in output and "Traceback" not in output, output
        state = json.loads((remote_dir / "run_state.json").read_text())
        assert state["status"] == "stopped, resume me"
        committed = [line["step"] for line in ledger_lines(remote_dir) if line["kind"] == "commit"]
        assert 0 < len(committed) < SMALL_STEPS and len(opened_steps(remote_dir)) == len(committed) + 1
        assert (remote_dir / "checkpoints" / f"phase01-step{len(committed):08d}").is_dir(), "a whole step was not kept"
        code, output = remote.run()
        assert code == 75 and "cannot be read" in output, "still broken: it says so again, and breaks nothing"

        server.fault = lambda _path, _attempt: "ok"
        code, output = remote.run()
        assert code == 0, output
    assert json.loads((remote_dir / "run_state.json").read_text())["status"] == "done"
    assert sorted(set(opened_steps(remote_dir))) == list(range(1, SMALL_STEPS + 1))
    verdict = json.loads(account("verify", str(remote_dir), "--json").stdout)
    assert verdict["committed"] == SMALL_STEPS and verdict["opened"] == SMALL_STEPS, (
        "the step that was left is charged once"
    )
    expected, found = final_weights(local_dir), final_weights(remote_dir)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
