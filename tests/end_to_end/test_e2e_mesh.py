"""FSDP2 on a grid of ranks (HSDP): two copies of the weights, each on two ranks, at four processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.ledger.history import History
from tests.support.launching import Launch, opened_steps, run_worker
from tests.support.runs import SMALL_STEPS, final_weights
from tests.support.whole_history import steps_of

Make = Callable[..., tuple[Launch, Path]]
# Where the model is sharded, a rank's sum over a few micro-batches is rounded to fp32: of the distance moved.
WINDOWS = 1e-7
NOT_THE_SUM = "UpdateError: what was reduced for"
NOT_EQUAL = "UpdateError: the copies of the weights are no longer equal"
STOPPED = {
    "copies not added": NOT_THE_SUM,
    "copies added twice": NOT_THE_SUM,
    "another sum on one rank": "UpdateError: ranks with equal shards got different sums",
    "own noise on each copy": NOT_EQUAL,
    "noise before the sum of the copies": NOT_THE_SUM,
    "another moment on one rank": NOT_EQUAL,
}
# The noise of both copies is the same, so that two of them are twice as much.
FOUND_BY_THE_SELF_TEST = {
    "as if there were one copy": "get noise twice, or never",
    "as if each rank had a copy": "get no noise and no update",
    "copies not added": "the reduced sum differs from the sum of the clipped gradients",
    "own noise on each copy": "replicas drew different noise",
    "noise before the sum of the copies": "where 0.4000 is planned",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = run_worker("mesh_worker.py", str(tmp_path_factory.mktemp("saved")), ranks=4)
    assert result["world"] == 4
    return result


def test_a_grid_moves_the_weights_as_a_single_copy_does(found: dict[str, Any]) -> None:
    """By LAMB, which divides by norms of whole parameters: they are those of one copy. A single record more or less
    moves the weights by a hundredth."""
    assert found["apart"] <= WINDOWS
    assert found["apart without privacy"] <= 5 * WINDOWS


def test_a_step_without_records_leaves_the_bits_of_any_other_layout(found: dict[str, Any]) -> None:
    assert found["noise alone"] is True


def test_one_copy_is_saved_and_continues_at_any_layout(found: dict[str, Any]) -> None:
    resumed = found["resumed"]
    assert resumed["pieces"] == {"hsdp": 2, "1": 4}
    assert set(resumed["apart"]) == {"hsdp to hsdp", "hsdp to 1", "1 to hsdp"}
    assert all(apart <= 5 * WINDOWS for apart in resumed["apart"].values()), resumed["apart"]


def test_what_would_go_wrong_in_silence_stops_every_rank(found: dict[str, Any]) -> None:
    faults = found["faults"]
    assert set(faults) == {"honest", *STOPPED}
    assert faults["honest"] == ["went through"] * 4
    for case, message in STOPPED.items():
        assert all(said.startswith(message) for said in faults[case]), (case, faults[case])


def test_the_self_test_knows_the_grid(found: dict[str, Any]) -> None:
    said = found["self-tests"]
    assert said.pop("honest") == "passed"
    assert set(said) == set(FOUND_BY_THE_SELF_TEST)
    for case, message in FOUND_BY_THE_SELF_TEST.items():
        assert message in said[case], (case, said[case])
    assert "4 ranks cannot be divided into copies of 3" in found["three ranks a copy"]


@pytest.mark.slow
def test_a_run_killed_on_a_grid_goes_on_with_another_one_to_the_ledger_and_weights_of_a_single_copy(
    launch: Make,
) -> None:
    """All draw from one seed, so that the ledgers can be compared, too."""
    seed = ["--set", "run.debug_seed=5"]
    grid = [*seed, "--set", "run.engine=fsdp2", "--set", "run.shard_over=2"]
    whole, whole_dir = launch("whole", arguments=[*seed, "--set", "run.engine=fsdp2"], ranks=4)
    code, output = whole.run()
    assert code == 0, output

    job, run_dir = launch("grid", arguments=grid, ranks=4)
    job.killed(run_dir, 5)
    assert 5 <= len(opened_steps(run_dir)) < SMALL_STEPS, "it was over before it could be killed"
    job.ranks = 2  # one copy
    code, output = job.run()
    assert code == 0, output

    straight, history = (History.read(folder / "ledger.jsonl")[0] for folder in (whole_dir, run_dir))
    assert opened_steps(run_dir) == list(range(1, SMALL_STEPS + 1)), "a step is missing or was charged twice"
    assert steps_of(run_dir) == steps_of(whole_dir)
    assert history.epsilon() == straight.epsilon()
    assert "a copy of the weights on every 2 ranks" in json.loads((run_dir / "certificate.json").read_text())["engine"]
    expected, got = final_weights(whole_dir), final_weights(run_dir)
    for name in expected:  # the public phase's gradients are added up in other orders
        assert (expected[name] - got[name]).abs().max() <= 2e-4, name
