"""Makes a plan from a request: works out the numbers that follow from others, and σ where only a budget was given.

The config's phases, the library, the planner and audits all make their plans here, so that the same request gives the
same plan, to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from murmuration.accounting.adaptive import SENSITIVITY, AdaptiveRule
from murmuration.accounting.banded import BandedNoise, best_banded
from murmuration.accounting.epsilon.calibrate import MOST_STEPS, calibrate_sigma, enlarged
from murmuration.accounting.errors import PlanError
from murmuration.accounting.metrics import CURVATURE, SLOPE, ClippedShare, LossProbe, PlannedMetric
from murmuration.accounting.noise import ExactGrid, IndependentNoise
from murmuration.accounting.plan import (
    MECHANISMS,
    AnyNoise,
    PrivacyPlan,
    parse_delta,
    require_possible,
    require_together,
)
from murmuration.accounting.sampling import SamplingKind, make_sampling
from murmuration.accounting.unit import Unit, adjacency_in_words, unit_in_words

LEAST_SIGMA = 0.1
"""Below it, accounting takes minutes and its answers are in the hundreds."""

ADAPTIVE_SPAN = 1e4
"""An adaptive C stays between norm / ADAPTIVE_SPAN and norm · ADAPTIVE_SPAN."""


@dataclass(frozen=True)
class AdaptiveRequest:
    """C follows a quantile of the gradient norms."""

    quantile: float
    learning_rate: float
    noise_multiplier: float | None = None
    """Noise on the count of clipped records, in units of the 1/2 that one record adds; None: a tenth of the batch."""


@dataclass(frozen=True)
class PlanRequest:
    """What a user decides about one private phase."""

    records: int
    """Their number, or that of the units where several records are protected as one."""
    expected_batch: float
    steps: int
    epsilon: float
    delta: float | str | None = None
    noise_multiplier: float | None = None
    """None: the smallest that keeps the budget."""
    clip_norm: float = 1.0
    adaptive: AdaptiveRequest | None = None
    sampling: SamplingKind = "poisson"
    bands: int = 1
    horizon: int | None = None
    """The number of steps for which correlated noise is optimised; None: all."""
    exact: bool = False
    metrics: tuple[PlannedMetric, ...] = ()
    """In addition to those that adaptive clipping and loss probes need."""
    loss_probes: tuple[float, float] | None = None
    """Their bound, and the noise on either sum in units of it."""
    units: Unit | None = None
    views: int = 1

    @property
    def mechanisms(self) -> frozenset[str]:
        """As `plan.APART` names them."""
        chosen = {
            "banded": self.bands > 1,
            "exact": self.exact,
            "adaptive": self.adaptive is not None,
            "metrics": bool(self.metrics) or self.loss_probes is not None,
            "units": self.units is not None,
        }
        named = {self.sampling, *(metric.mechanism for metric in self.metrics)} & MECHANISMS.keys()
        return frozenset(name for name, given in chosen.items() if given) | named

    def released(self) -> tuple[PlannedMetric, ...]:
        """All that is released with the gradient."""
        found = list(self.metrics)
        if self.loss_probes is not None:
            bound, noise = self.loss_probes
            found += [LossProbe(name, bound, bound * noise) for name in (SLOPE, CURVATURE)]
        if (asked := self.adaptive) is not None:
            counted = asked.noise_multiplier or self.expected_batch / 10
            lowest, highest = self.clip_norm / ADAPTIVE_SPAN, self.clip_norm * ADAPTIVE_SPAN
            rule = AdaptiveRule(asked.quantile, asked.learning_rate, lowest, highest)
            found.append(ClippedShare.of(SENSITIVITY * counted, rule))
        return tuple(found)


def make_plan(request: PlanRequest, known: PrivacyPlan | None = None) -> PrivacyPlan:
    """`known`: the plan that a ledger has frozen for this phase. Where it answers the same request, its σ and its
    matrix are kept: another processor may find ones that differ in the last digit."""
    require_together(request.mechanisms)
    require_possible(request.records, request.expected_batch, request.delta)
    sampling = make_sampling(request.sampling, request.records, request.expected_batch, request.steps, request.bands)
    delta, metrics = parse_delta(request.delta, request.records), request.released()
    noise = _noise(request, known)
    fixed: dict[str, Any] = dict(
        records=request.records, sampling=sampling, clip_norm=request.clip_norm, steps=request.steps, delta=delta,
        epsilon_budget=request.epsilon, metrics=metrics, noise=noise, views=request.views, units=request.units,
        unit=unit_in_words(request.units), adjacency=adjacency_in_words(request.units),
    )  # fmt: skip
    sigma = request.noise_multiplier
    if sigma is None and known is not None and all(getattr(known, name) == value for name, value in fixed.items()):
        sigma = known.noise_multiplier
    if sigma is None:
        steps = sampling.event(1.0, sampling.turns(request.steps))
        together = calibrate_sigma(steps, request.epsilon, delta)
        sigma = _share_of_gradient(enlarged(together, noise.growth), metrics)
    return PrivacyPlan(noise_multiplier=sigma, **fixed)


def steps_of(epochs: float, records: int, batch: float, sampling: SamplingKind) -> int:
    """Rounded up; whole epochs of random allocation are not cut, since a cut one is paid for whole."""
    steps = steps_of_passes(epochs, records, batch)
    if sampling == "allocation" and epochs == int(epochs):
        return int(epochs) * max(1, round(records / batch))
    return math.ceil(steps)


def steps_of_passes(passes: float, records: int, batch: float) -> float:
    steps = passes * records / batch
    if not steps <= MOST_STEPS:
        raise PlanError(
            f"{passes:g} passes over {records:,} records by {batch:g} at a time are {steps:.3g} steps, and a phase has "
            f"at most {MOST_STEPS:,}; make fewer passes, or larger batches"
        )
    return steps


def _noise(request: PlanRequest, known: PrivacyPlan | None) -> AnyNoise:
    if request.bands == 1:
        return ExactGrid() if request.exact else IndependentNoise()
    horizon = request.horizon or request.steps
    kept = None if known is None else known.noise
    if isinstance(kept, BandedNoise) and (kept.bands, kept.horizon) == (request.bands, horizon):
        return kept
    return best_banded(request.bands, horizon)


def _share_of_gradient(together: float, metrics: tuple[PlannedMetric, ...]) -> float:
    """The gradient's noise multiplier such that gradient and metrics, which are one event, have the noise multiplier
    `together`."""
    if not metrics:
        return together
    left = together**-2 - sum((m.bound / m.std) ** 2 for m in metrics)
    if left <= 0:
        raise PlanError(f"the released metrics alone need more than the budget; their noise must exceed {together:g}")
    return math.ceil(left**-0.5 * 1e5) / 1e5
