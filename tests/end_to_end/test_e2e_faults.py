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
    "bf16 on the wire": NOT_THE_SUM,
    "round robin": "ShardMapError",
    "bf16 parameters by its own mode": "UpdateError: model.cls_token is torch.bfloat16",
    "bf16 parameters": "ClipError",
    "hook lost": "UpdateError: 0 of",
    "hook lost at 0": "UpdateError: 0 of",
    "optimizer made anew": "UpdateError: DeepSpeed replaced the optimizer",
    "NaN in the sum at 0": "UpdateError: the sum of clipped gradients of ",
    "NaN in the sum at 1": "UpdateError: the sum of clipped gradients of ",
    "NaN in the sum at 3": "UpdateError: the sum of clipped gradients of ",
    "wrong slices of a total at 1": "UpdateError: what was reduced for ",
    "nothing added up at 2": "UpdateError: what was reduced for ",
    "not added up on one rank at 0": "UpdateError: what was reduced for ",
    "two parameters confused at 1": NOT_THE_SUM,
    "two parameters confused at 2, and the first step is empty": NOT_THE_SUM,
    "scaled in a later step at 2": NOT_THE_SUM,
    "shards exchanged at 3": NOT_THE_SUM,
    "wrong slices of a window at 3": "UpdateError: what was reduced for ",
    "a window added twice at 3": "UpdateError: what was reduced for ",
    "last window lost at 3": "UpdateError: a window of clipped gradients was not sent",
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


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_sums_cross_the_wire_once_per_logical_step(found: dict[str, Any], stage: int) -> None:
    """Micro-batches are summed without a word. In the first step of an engine DeepSpeed reduces the whole gradient,
    too, as evidence of where its shards lie; later, only a module in turn."""
    said = found["collectives"][str(stage)]
    first, second, sizes = said["update"], said["second update"], said["sizes"]
    proof = 3 * sizes["parameters"]
    assert said["micro-batches 0"] == said["micro-batches 2"] == {}
    assert first["checks"] == second["checks"] == 1, "elements, step and weights in one tensor"
    if stage == 0:
        assert first == second and first["elements by all_reduce"] == sizes["weights"] + proof
        return
    # What this rank receives of two: its half of the weights, padding aside, from itself, too.
    received = first["elements by all_to_all_single"]
    assert received == second["elements by all_to_all_single"] and abs(received - sizes["weights"]) <= 2
    assert first["elements by all_reduce"] == sizes["weights"] + proof
    assert second["elements by all_reduce"] <= sizes["first module"] + proof < first["elements by all_reduce"]


def test_windows_cross_the_wire_when_they_are_full(found: dict[str, Any]) -> None:
    said = found["collectives"]["3"]
    assert "all_to_all_single" not in said["micro-batches 0"], "both micro-batches fit into one window"
    assert said["update"]["all_to_all_single"] == said["update"]["all_reduce"] == 1, "a window, and its proof"
