"""The FSDP2 engine: exact, self-tested, guarded; and a run that changes engines on its way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from murmuration.train.commands.dry_run import as_text, meaning
from murmuration.train.config.load import load
from tests.support.launching import Launch, run_worker

Make = Callable[..., tuple[Launch, Path]]
NOT_THE_SUM = "UpdateError: what was reduced for"
STOPPED = {
    "shards replaced": "UpdateError: the model's shards are no longer those that the optimizer updates",
    "left whole": "ShardMapError: ",
    "NaN in the sum": "UpdateError: the sum of clipped gradients of cls_token is not finite",
    "not reduced": NOT_THE_SUM,
    "reduced twice": NOT_THE_SUM,
    "shifted": NOT_THE_SUM,
    "wrong slices": NOT_THE_SUM,
    "window kept": "UpdateError: a window of clipped gradients was not sent",
    "last window lost": "UpdateError: a window of clipped gradients was not sent",
    "step skipped": "UpdateError: the optimizer did not take exactly one step",
    "no noise on a shard": "UpdateError: ",
    "rows swapped": "ShardMapError: blocks.0.norm1.bias: layers do not receive what the shards contain",
}


@pytest.fixture(scope="module", params=[2, *(pytest.param(w, marks=pytest.mark.slow) for w in (1, 3))])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    launcher = "forked" if request.param == 2 else "torchrun"
    result = run_worker("fsdp2_worker.py", ranks=request.param, launcher=launcher)
    assert result["world"] == request.param
    return result


def test_two_steps_equal_a_loop_over_single_records_with_torchs_own_optimizers(found: dict[str, Any]) -> None:
    """Private and not, with tied and frozen weights, uneven rows, and parameters smaller than the world."""
    assert len(found["drifts"]) == 4
    for case, drift in found["drifts"].items():
        assert drift <= 5e-6, case


def test_the_self_test_passes_and_deepspeed_is_not_needed(found: dict[str, Any]) -> None:
    assert found["self-tests"] == {"caption": "passed", "dropping": "passed"}
    assert found["world"] == 2 or not found["deepspeed"], "something imported it, and not what has forked the ranks"


def test_what_the_framework_does_to_weights_is_not_watched_as_if_records_were_in_it(found: dict[str, Any]) -> None:
    alone, sharded = found["watched"]
    assert sharded == alone > 0


def test_what_would_go_wrong_in_silence_stops_every_rank(found: dict[str, Any]) -> None:
    faults = found["faults"]
    assert set(faults) == {"honest", *STOPPED}
    assert faults["honest"] == ["went through"] * found["world"]
    for case, message in STOPPED.items():
        if case == "not reduced" and found["world"] == 1:
            continue  # there is nothing to reduce
        assert all(said.startswith(message) for said in faults[case]), (case, faults[case])


def test_the_dry_run_names_the_engine(launch: Make) -> None:
    job, _ = launch("dry")
    assert "engine: DeepSpeed, ZeRO-1\n" in as_text(meaning(load(job.config, [])))
    assert "engine: FSDP2 (torch" in as_text(meaning(load(job.config, ["run.engine=fsdp2"])))
