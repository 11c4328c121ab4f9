"""What DeepSpeed does in silence when told otherwise than the trainer tells it, stopped by the guard at 2 processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.launching import run_worker

NOT_THE_SUM = "UpdateError: what DeepSpeed reduced"
STOPPED = {
    "clips the reduced sum at 1": NOT_THE_SUM,
    "clips the reduced sum at 3": NOT_THE_SUM,
    "clips by default": NOT_THE_SUM,
    "averages over ranks": NOT_THE_SUM,
    "averages over ranks at 0": NOT_THE_SUM,
    "bf16 on the wire": NOT_THE_SUM,
    "round robin": "ShardMapError",
    "bf16 parameters by its own mode": "UpdateError: model.cls_token is torch.bfloat16",
    "bf16 parameters": "ClipError",
    "hook lost": "UpdateError: 0 of",
    "hook lost at 0": "UpdateError: 0 of",
    "optimizer made anew": "UpdateError: DeepSpeed replaced the optimizer",
    "NaN in the sum at 0": NOT_THE_SUM,
    "NaN in the sum at 1, step skipped": "UpdateError: 0 of",
    "NaN in the sum at 3, step skipped": "UpdateError: 0 of",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_worker("faults_worker.py")


@pytest.mark.parametrize("case", STOPPED)
def test_a_silent_failure_is_stopped(found: dict[str, Any], case: str) -> None:
    assert found["cases"][case].startswith(STOPPED[case])


def test_the_same_step_without_a_fault_goes_through_and_no_case_is_left_out(found: dict[str, Any]) -> None:
    honest = {name for name in found["cases"] if name.startswith("honest")}
    assert honest and all(found["cases"][name] == "went through" for name in honest)
    assert set(found["cases"]) == set(STOPPED) | honest


def test_ranks_talk_once_per_logical_step(found: dict[str, Any]) -> None:
    """DeepSpeed's reduction and ours, both in the update; at stages 0-2 micro-batches are summed without a word."""
    for stage in ("0", "1", "2"):
        assert found["collectives"][stage]["micro-batches"] == {}
        assert found["collectives"][stage]["update"]["all_reduce"] == 2
        assert found["collectives"][stage]["update"]["checks"] == 1, "elements, step and weights in one tensor"
