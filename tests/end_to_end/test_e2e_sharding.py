"""ZeRO 0-3 and FSDP2, four optimizers, one of them in bf16 too, 1 to 3 ranks: three noisy steps equal one textbook."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.launching import TIMEOUT, run_worker

# Distances from the textbook's weights, over the distance that they moved, are bounded by what fp32 rounds away at
# most; no bound may be so wide that a wrong sum would pass.
WIDEST_BOUND = 3e-5
# Where the model is sharded, a rank's sum over a few micro-batches is rounded to fp32, by u of itself for each of them.
WINDOWS = 1e-7
# DeepSpeedCPUAdam holds betas and their powers in fp32.
MOST_BY_KERNEL = 1e-4


def by_kernel(result: dict[str, Any]) -> bool:
    return result["offload"] == "deepspeed"


@pytest.fixture(scope="module", params=[2, *(pytest.param(w, marks=pytest.mark.slow) for w in (1, 3))])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    world: int = request.param
    offload = ["--all", "--offload"] if world == 3 else []  # DeepSpeed compiles an operation for it, about a minute
    return run_worker("sharding_worker.py", *offload, ranks=world, seconds=2 * TIMEOUT) | {"world": world}


def test_every_stage_precision_and_optimizer_equals_the_textbook(found: dict[str, Any]) -> None:
    """One of the records is not finite, and adds exactly nothing."""
    world, counts = found["world"], found["records_per_rank"]
    assert any(len(set(step)) > 1 for step in counts) or world == 1, "ranks must have had uneven counts"
    assert any(sum(step) == 0 for step in counts), "an empty draw is among the steps"
    results = found["results"]
    assert len(results) == (5 * 5 + 3 * 3 if world == 3 else 5 + 3 + 3)
    assert all(result["world"] == world for result in results)
    for result in results:
        assert result["bound"] <= WIDEST_BOUND, result
        assert result["drift"] <= (MOST_BY_KERNEL if by_kernel(result) else result["bound"]), result
    # Blocks as they are recorded for a compiler: their weights are gathered around the whole block.
    assert len(found["recorded"]) == 2 and all(each["drift"] <= each["bound"] for each in found["recorded"])
    # Whatever the optimizer and the rounding: stages and engines do not differ among themselves.
    for case in {(result["optimizer"], result["precision"]) for result in results}:
        same = [result for result in results if (result["optimizer"], result["precision"]) == case]
        if len(same) == 1:
            continue
        whole, parts = (
            [r["drift"] for r in same if not by_kernel(r) and (r["layout"] in (3, "fsdp2")) == sharded]
            for sharded in (False, True)
        )
        assert max(whole) - min(whole) <= 1e-9 and max(parts) - min(parts) <= 1e-9, case
        assert max(*whole, *parts) - min(*whole, *parts) <= WINDOWS, case
    # What the bounds leave room for is far less than any of these mistakes moves the weights.
    assert all(result["drift"] > 10 * result["bound"] for result in found["planted"].values()), found["planted"]
    # Hundreds of micro-batches: from the clipped sums to the weights, in units of C.
    errors = found["errors_of_long_sums"]
    assert len(errors) == 3 and all(error <= 1e-3 for error in errors.values()), errors
    # Units of 1 to 9 rows, from the rows to the weights, in units of the whole sum.
    units = found["errors_of_units"]
    assert len(units) == 3 * 2 and all(error <= 1e-6 for error in units.values()), units


def test_the_self_test_sees_three_percent_where_no_rank_holds_the_weights(found: dict[str, Any]) -> None:
    """On all ranks alike. Before, sharded weights had nothing to be compared with, and bf16 took ten percent."""
    said = found["self_tests"]
    assert said.pop("honest") == ["passed"] * found["world"]
    assert set(said) == {"ZeRO-3", "FSDP2"}
    assert all("gradient of a test record is off by 0.03" in each for ranks in said.values() for each in ranks)
