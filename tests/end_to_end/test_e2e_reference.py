"""Two ranks, three micro-batches each, ZeRO 0-2: the clipped sum and the noisy trajectory against brute force."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.launching import run_worker


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_worker("reference_worker.py")


def test_every_combination_ran_on_two_ranks_with_norms_on_both_sides_of_c(results: list[dict[str, Any]]) -> None:
    assert len(results) == 6 and all(result["world"] == 2 for result in results)
    flat = [result["clipped"] for result in results if result["clip"] == "flat"]
    assert all(clipped > 0 for clipped in flat)


def test_clipped_sum_equals_brute_force_to_1e6(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["sum_error"] <= 1e-6, result


def test_noisy_trajectory_equals_textbook_adamw_at_every_stage(results: list[dict[str, Any]]) -> None:
    """Same draws, same noise, two steps: distance from the textbook's weights over the distance they moved."""
    for result in results:
        assert result["drift"] <= 1e-5, result
