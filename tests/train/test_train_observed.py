"""What is observed of a step: sums over micro-batches and ranks, whatever records do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from murmuration.train.step import StepSummary
from tests.support.train_helpers import alone, on_ranks


def test_observed_sums_over_micro_batches_and_ranks() -> None:
    def act(ranks: Any) -> dict[str, float]:
        observed = StepSummary()
        present = torch.tensor([True, False, True])
        for _ in range(2):
            norms = torch.tensor([0.5, 99.0, 2.0 + ranks.rank])
            observed.add(
                present, torch.tensor([1.0, math.nan, 3.0]), norms, doubtful=torch.tensor([True, False, False])
            )
        return observed.over_ranks(ranks, 2.5)

    first, second = on_ranks(2, act)
    assert first == second
    expected = {"records": 8, "loss": 2.0, "gradient_norm": 12 / 8, "clipped_fraction": 2 / 8, "written_out": 4}
    assert first == pytest.approx(expected)


def test_observed_survives_hostile_and_empty_batches() -> None:
    observed = StepSummary()
    present = torch.tensor([True, True])
    observed.add(present, torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert observed.over_ranks(alone(), 1.0)["loss"] == 0.5
    assert StepSummary().over_ranks(alone(), 1.0) == {"records": 0.0, "loss": 0.0}
