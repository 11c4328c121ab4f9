"""Noised training metrics: bounded per record, one event with the gradient, held back until weights are durable."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.errors import PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.facts import MetricFact
from murmuration.accounting.metrics import PlannedMetric
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import Poisson
from murmuration.train.clip.engine import Observation
from murmuration.train.config.privacy import ReleasedMetric
from murmuration.train.noise.metrics import MetricRelease
from murmuration.train.recipe.ready_phase import RecipeError, planned_epsilon
from tests.support.config_base import plan_of, private_phase
from tests.support.step_world import METRIC_KEY, journal_at, step_of
from tests.support.train_helpers import alone, on_ranks, plan_for

LOSS, CLIPPED = PlannedMetric("loss", 4.0, 12.0), PlannedMetric("clipped", 1.0, 5.0)


@pytest.fixture
def plan() -> PrivacyPlan:
    return replace(plan_for(), metrics=(LOSS, CLIPPED))


def quiet(plan: PrivacyPlan) -> PrivacyPlan:
    """So little noise that the sums can be read."""
    return replace(plan, metrics=tuple(replace(metric, std=1e-9) for metric in plan.metrics))


def test_each_record_adds_a_bounded_number_and_hostile_or_absent_ones_nothing(plan: PrivacyPlan) -> None:
    release = MetricRelease(METRIC_KEY, quiet(plan), ranks=alone())
    losses = torch.tensor([1.0, 1e30, -5.0, math.nan, math.inf, 2.0])
    norms = torch.tensor([0.5, 2.0, 3.0, math.nan, math.inf, 9.0])
    present = torch.tensor([True, True, True, True, True, False])
    release.add(present, Observation(losses, norms, 1.0), bound=1.0)
    found = release.release(1)
    assert found["noised_loss"] * plan.divisor == pytest.approx(1.0 + 4.0, abs=1e-6)
    assert found["noised_clipped"] * plan.divisor == pytest.approx(3.0, abs=1e-6)
    assert release.release(2)["noised_loss"] * plan.divisor == pytest.approx(0.0, abs=1e-6), (
        "a step leaks into the next"
    )


def test_the_last_bits_of_a_release_do_not_show_the_sum(plan: PrivacyPlan) -> None:
    """Noise drawn in fp32 and added in fp64 leaves the sum bare below its last bit: whoever guesses it, knows it."""
    draw = torch.Generator().manual_seed(1)
    fits = 0
    for step in range(1, 101):
        losses = torch.rand(7, generator=draw, dtype=torch.float64) * 4
        release = MetricRelease(step.to_bytes(32, "big"), plan, ranks=alone())
        release.add(torch.ones(7, dtype=torch.bool), Observation(losses, losses, 1.0), bound=1.0)
        told = release.release(step)["noised_loss"]
        assert float(np.float32(told)) == told
        rest = told * plan.divisor - float(losses.sum())
        fits += abs(float(np.float32(rest)) - rest) <= 1e-14 * abs(told * plan.divisor)
    assert fits <= 5, "a release less the true sum looks like an fp32 draw"


def test_one_record_moves_no_metric_by_more_than_its_bound(plan: PrivacyPlan) -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        losses, norms = torch.randn(5, generator=draw) * 100, torch.rand(5, generator=draw) * 2
        sums = []
        for last in (True, False):
            release = MetricRelease(METRIC_KEY, quiet(plan), ranks=alone())
            release.add(torch.tensor([True] * 4 + [last]), Observation(losses, norms, 1.0), bound=1.0)
            sums.append(release.release(1))
        for metric in plan.metrics:
            moved = abs(sums[0][f"noised_{metric.name}"] - sums[1][f"noised_{metric.name}"]) * plan.divisor
            assert moved <= metric.bound * (1 + 1e-6)


def test_a_record_moves_the_sum_by_what_it_adds_however_many_others_there_are(plan: PrivacyPlan) -> None:
    """fp64 rounds a sum of 200,000 thirds. If it did so here, a record would also change the rounding of the others."""
    draw = torch.Generator().manual_seed(3)
    losses = torch.rand(200_000, generator=draw, dtype=torch.float64) * 3.9 + 0.01
    assert sum(losses.tolist()) != math.fsum(losses.tolist()), "nothing is rounded, so this test shows nothing"

    def total(present: torch.Tensor, order: torch.Tensor) -> float:
        release = MetricRelease(METRIC_KEY, plan, ranks=alone())
        for part in order.split(1000):
            release.add(present[part], Observation(losses[part], losses[part], 1.0), bound=1.0)
        return float(release._sums[0])

    everyone, order = torch.ones(len(losses), dtype=torch.bool), torch.arange(len(losses))
    alone_sums = []
    for one in (7, 99_999, 123_456):
        others = everyone.clone()
        others[one] = False
        alone_sums.append(total(~others, order))
        assert total(everyone, order) - total(others, order) == alone_sums[-1]
        assert alone_sums[-1] == pytest.approx(float(losses[one]), abs=4e-9)
    shuffled = torch.randperm(len(losses), generator=draw)
    assert total(everyone, shuffled) == total(everyone, order)


@pytest.mark.parametrize("bound", [0.5, 1.0, 2.3, 12.0, 1e-3])
def test_the_bound_is_one_on_the_grid_of_sums_too(plan: PrivacyPlan, bound: float) -> None:
    wide = replace(plan, metrics=(PlannedMetric("loss", bound, 12.0),))
    release = MetricRelease(METRIC_KEY, wide, ranks=alone())
    release.add(torch.ones(1, dtype=torch.bool), Observation(torch.tensor([1e9]), torch.ones(1), 1.0), bound=1.0)
    assert bound * (1 - 1e-8) <= float(release._sums[0]) <= bound


def test_batches_whose_sums_fp64_would_round_are_refused(plan: PrivacyPlan) -> None:
    huge = replace(plan, records=2**31, sampling=Poisson(2**23), delta=1e-10)
    assert MetricRelease(METRIC_KEY, huge, ranks=alone())
    with pytest.raises(PlanError, match=r"at most 8,388,608 records exactly.*expected_batch"):
        MetricRelease(METRIC_KEY, replace(huge, sampling=Poisson(2**23 + 4)), ranks=alone())


def test_the_noise_is_the_planned_one_once_for_all_ranks_and_new_at_each_step(plan: PrivacyPlan) -> None:
    def released(ranks: Any) -> list[float]:
        release = MetricRelease(METRIC_KEY, plan, ranks=ranks)
        return [release.release(step)["noised_loss"] * plan.divisor for step in range(1, 401)]

    single = released(alone())
    assert on_ranks(2, released) == [single, single], "ranks must publish one number, with one draw of noise"
    deviation = float(np.std(single))
    # 400 draws: the deviation is known to 3.5 %, so that 0.8 and 1.25 of the plan are told apart.
    assert 0.87 * LOSS.std < deviation < 1.13 * LOSS.std
    assert len(set(single)) == 400


def test_gradient_and_metrics_of_a_step_are_charged_as_one_event(tmp_path: Path, plan: PrivacyPlan) -> None:
    journal = journal_at(tmp_path, plan)
    step, _ = step_of(alone(), journal, plan)
    release = step.metrics
    assert release is not None
    observed = step.run(1, 1e-2)
    assert set(observed.released) == {"noised_loss", "noised_clipped"}
    entry = journal.ledger.entries[-1]
    assert entry.kind == "commit" and len(entry.fields["facts"]["metrics"]) == 2
    charged = journal.history.charged()
    assert charged[0].sigma == pytest.approx(plan.effective_noise_multiplier, rel=1e-9)
    assert charged[0].sigma < plan.noise_multiplier and charged[0].count == 1
    # A mechanism that drew less than it planned is charged with what it drew.
    assert release.facts()[0] == MetricFact("loss", 4.0, 12.0)
    release._noise[0].std = 1.0
    assert release.facts()[0].std == 1.0


def test_calibration_pays_for_the_metrics_out_of_the_gradient() -> None:
    bare = private_phase()
    phase = private_phase({"release": [{"name": "loss", "bound": 8.0, "noise_multiplier": 6.0}]})
    alone_plan = plan_of(bare)
    plan = plan_of(phase)
    assert plan.noise_multiplier > alone_plan.noise_multiplier
    assert planned_epsilon(plan) <= 4.0
    unpaid = epsilon([Event(plan.sampling_rate, plan.noise_multiplier, plan.steps)], plan.delta)
    assert unpaid < planned_epsilon(plan), "the metrics were not charged"


def test_metrics_that_alone_pass_the_budget_are_refused() -> None:
    phase = private_phase({"release": [{"name": "loss", "bound": 8.0, "noise_multiplier": 0.1}]})
    with pytest.raises(RecipeError, match="metrics alone need more than the budget"):
        plan_of(phase)


def test_a_metric_named_twice_or_a_share_above_one_is_refused() -> None:
    twice = [{"name": "loss", "noise_multiplier": 5.0}] * 2
    with pytest.raises(ValueError, match="names a metric twice"):
        private_phase({"release": twice})
    with pytest.raises(ValueError, match="bound of the metric 'clipped' is 1"):
        private_phase({"release": [{"name": "clipped", "bound": 2.0, "noise_multiplier": 5.0}]})
    assert ReleasedMetric(name="loss", noise_multiplier=1.0).bound == 1.0
