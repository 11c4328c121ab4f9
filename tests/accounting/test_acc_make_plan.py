"""From a request to a plan: each number that follows from others, and σ from a budget."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from murmuration.accounting import make_plan as module
from murmuration.accounting.banded import best_banded
from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.epsilon.calibrate import MOST_STEPS
from murmuration.accounting.errors import PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.make_plan import (
    ADAPTIVE_SPAN,
    AdaptiveRequest,
    PlanRequest,
    make_plan,
    steps_of,
)  # fmt: skip
from murmuration.accounting.metrics import ClippedShare, HeldOutAccuracy, LossProbe, PlannedMetric
from murmuration.accounting.noise import ExactGrid, IndependentNoise
from murmuration.accounting.unit import Unit

# One step at q = 1, where the Gaussian mechanism's epsilon is exact and takes no time.
ONE = PlanRequest(records=100, expected_batch=100, steps=1, epsilon=1.0, delta=1e-3)
GIVEN = replace(ONE, noise_multiplier=5.0)
LOSS = PlannedMetric("loss", 1.0, 9.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, set()), ({"bands": 2}, {"banded"}), ({"exact": True}, {"exact"}),
        ({"sampling": "allocation"}, {"allocation"}), ({"units": Unit("patient")}, {"units"}),
        ({"metrics": (LOSS,)}, {"metrics"}), ({"loss_probes": (1.0, 9.0)}, {"metrics"}),
        ({"metrics": (HeldOutAccuracy.of(9.0, 0.1),)}, {"metrics", "held_out"}),
        ({"adaptive": AdaptiveRequest(0.5, 0.1)}, {"adaptive"}),
    ],
)  # fmt: skip
def test_a_request_names_the_mechanisms_that_it_asks_for_and_no_others(
    changes: dict[str, Any], named: set[str]
) -> None:
    """What does not go together is refused by these names."""
    assert replace(ONE, **changes).mechanisms == named


@pytest.mark.parametrize(
    ("epochs", "records", "batch", "sampling", "steps"),
    [
        (2.0, 1000, 300.0, "poisson", 7), (2.0, 1000, 300.0, "allocation", 6), (1.2, 1000, 300.0, "allocation", 4),
        (3.0, 10, 25.0, "allocation", 3), (1.0, MOST_STEPS, 1.0, "poisson", MOST_STEPS),
    ],
)  # fmt: skip
def test_steps_of_epochs(epochs: float, records: int, batch: float, sampling: Any, steps: int) -> None:
    assert steps_of(epochs, records, batch, sampling) == steps


@pytest.mark.parametrize("epochs", [1 + 1 / MOST_STEPS, math.inf, math.nan])
def test_more_steps_than_are_accounted_for_are_refused(epochs: float) -> None:
    with pytest.raises(PlanError, match="at most"):
        steps_of(epochs, MOST_STEPS, 1.0, "poisson")


def test_metrics_share_the_noise_of_the_budget_with_the_gradient() -> None:
    alone = make_plan(ONE).noise_multiplier
    for metrics in ((LOSS,), (LOSS, HeldOutAccuracy.of(5.0, 0.1))):
        plan = make_plan(replace(ONE, metrics=metrics))
        together = (plan.noise_multiplier**-2 + sum((m.bound / m.std) ** 2 for m in metrics)) ** -0.5
        assert epsilon([Event(1.0, together, 1)], 1e-3) <= 1.0 < epsilon([Event(1.0, 0.9999 * together, 1)], 1e-3)
        assert plan.noise_multiplier > alone


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_metrics_that_leave_no_noise_for_the_gradient_are_refused(part: float) -> None:
    """Also where they take exactly all: σ⁻² of the gradient would be 0."""
    all_of_it = make_plan(ONE).noise_multiplier
    with pytest.raises(PlanError, match="the released metrics alone need more than the budget"):
        make_plan(replace(ONE, metrics=(PlannedMetric("loss", 1.0, part * all_of_it),)))


def test_what_is_released_has_the_noise_that_was_asked_for() -> None:
    asked = AdaptiveRequest(0.5, 0.1, noise_multiplier=4.0)
    probed = replace(GIVEN, metrics=(LOSS,), loss_probes=(3.0, 7.0), clip_norm=2.0, adaptive=asked)
    loss, slope, curvature, clipped = probed.released()
    assert loss is LOSS and [slope.name, curvature.name] == ["loss_slope", "loss_curvature"]
    assert all(type(probe) is LossProbe and (probe.bound, probe.std) == (3.0, 21.0) for probe in (slope, curvature))
    assert isinstance(clipped, ClippedShare) and (clipped.bound, clipped.std) == (0.5, 2.0)
    rule = clipped.rule
    assert (rule.quantile, rule.lowest, rule.highest) == (0.5, 2.0 / ADAPTIVE_SPAN, 2.0 * ADAPTIVE_SPAN)
    tenth = replace(probed, adaptive=replace(asked, noise_multiplier=None)).released()[-1]
    assert tenth.std == 0.5 * probed.expected_batch / 10


@pytest.mark.parametrize(
    "changes",
    [{"records": 101}, {"expected_batch": 50.0}, {"steps": 2}, {"epsilon": 2.0}, {"delta": 2e-3}, {"clip_norm": 2.0},
     {"metrics": (LOSS,)}, {"exact": True}, {"units": Unit("patient")}, {"views": 2}],
)  # fmt: skip
def test_a_frozen_sigma_is_kept_for_the_same_request_alone(changes: dict[str, Any]) -> None:
    """Otherwise a run would go on with the noise of another plan, which may be too little."""
    known = replace(make_plan(ONE), noise_multiplier=77.0)
    assert make_plan(ONE, known) == known
    assert make_plan(replace(ONE, **changes), known).noise_multiplier < 50


def test_noise_is_of_the_kind_that_was_asked_for_and_a_frozen_matrix_is_kept_where_it_fits() -> None:
    assert isinstance(make_plan(GIVEN).noise, IndependentNoise)
    assert isinstance(make_plan(replace(GIVEN, exact=True)).noise, ExactGrid)
    banded = replace(GIVEN, expected_batch=25.0, steps=8, bands=2)
    found = make_plan(banded)
    assert found.noise == best_banded(2, 8) and make_plan(replace(banded, horizon=4)).noise == best_banded(2, 4)
    # As another processor finds it.
    rows = ((2.0,), (-1.0, 2.0))
    kept = replace(found, noise=replace(found.noise, rows=rows))
    assert make_plan(banded, kept).noise.rows == rows
    for changes in ({"horizon": 4}, {"bands": 3}):
        assert make_plan(replace(banded, **changes), kept).noise.rows != rows


@pytest.mark.parametrize("changes", [{"delta": 0.011}, {"delta": 0.0}, {"expected_batch": 101}])
def test_what_no_noise_makes_possible_is_refused_before_any_is_calibrated(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrated(*given: object, **options: object) -> float:
        raise AssertionError("calibrating takes seconds, or for ever")

    monkeypatch.setattr(module, "calibrate_sigma", calibrated)
    with pytest.raises(PlanError):
        make_plan(replace(ONE, **changes))
