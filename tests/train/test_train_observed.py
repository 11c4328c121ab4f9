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


def test_one_record_and_records_at_the_bound_are_counted_as_they_are() -> None:
    """Clipping scales what is longer than C, not what is as long."""
    observed = StepSummary()
    observed.add(torch.tensor([True]), torch.tensor([3.0]), torch.tensor([2.0]))
    expected = {"records": 1.0, "loss": 3.0, "gradient_norm": 2.0, "written_out": 0.0}
    assert observed.over_ranks(alone(), 2.0) == expected | {"clipped_fraction": 0.0}
    assert observed.over_ranks(alone(), 1.9) == expected | {"clipped_fraction": 1.0}
    assert observed.over_ranks(alone(), None) == expected | {"clipped_fraction": 0.0}, "nothing was clipped to"
    adapting = StepSummary(bound=1.9)
    adapting.add(torch.tensor([True]), torch.tensor([3.0]), torch.tensor([2.0]))
    assert adapting.over_ranks(alone(), 9.0)["clipped_fraction"] == 1.0, "the step's own bound comes first"


def test_a_record_that_is_no_number_adds_nothing_and_a_batch_without_records_divides_by_none() -> None:
    hostile = StepSummary()
    hostile.add(torch.tensor([True, True]), torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert hostile.over_ranks(alone(), 1.0)["loss"] == 0.5
    assert StepSummary().over_ranks(alone(), 1.0) == {"records": 0.0, "loss": 0.0}
    observed = StepSummary()
    observed.add(torch.tensor([False, False]), torch.tensor([7.0, math.nan]), torch.tensor([7.0, math.inf]))
    found = observed.over_ranks(alone(), 1.0)
    assert found == {"records": 0.0, "loss": 0.0, "gradient_norm": 0.0, "clipped_fraction": 0.0, "written_out": 0.0}


def test_the_sensitivity_is_the_largest_of_the_sums_and_no_other_number() -> None:
    observed, nobody = StepSummary(), (torch.zeros(1, dtype=torch.bool), torch.zeros(1), torch.zeros(1))
    assert observed.sensitivity == 0
    for given, largest in ((0.25, 0.25), (0.75, 0.75), (0.5, 0.75)):
        observed.add(*nobody, given)
        assert observed.sensitivity == largest
