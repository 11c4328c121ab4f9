"""The noise of a phase: of the random bits that the run chose (`run.noise`), in the form that its plan froze."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

from murmuration.accounting.banded import BandedNoise
from murmuration.accounting.errors import PlanError
from murmuration.accounting.metrics import PlannedMetric
from murmuration.accounting.noise import NoiseKind
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.draw.poisson import StepKey
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.prefetch import NoiseAhead
from murmuration.train.noise.update import Noise


class NoiseSource(NamedTuple):
    of: Callable[[bytes | StepKey, PrivacyPlan, int], Any]
    """Of a key, the plan, and the number of elements."""
    of_metric: Callable[[bytes | StepKey, PlannedMetric, PrivacyPlan], AESNoise]
    ahead: Callable[[Any, list[Fragment]], NoiseAhead] | None
    """Draws it while micro-batches compute; None where the device draws it."""


def source_for(kind: NoiseKind, plan: PrivacyPlan) -> NoiseSource:
    """Refuses a source that does not draw what the plan charges for."""
    if kind not in get_args(NoiseKind):
        raise PlanError(f"noise {kind!r} is none of {', '.join(get_args(NoiseKind))}")
    if (kind == "exact") != (plan.noise.growth > 0):
        raise PlanError("the noise is exact if and only if the plan charges for its grid; make the plan with run.noise")
    # Each by a file that a run with other noise does not load.
    if kind == "exact":
        from murmuration.train.noise.exact import ExactNoise

        return NoiseSource(ExactNoise.of, ExactNoise.of_metric, NoiseAhead)
    if kind == "chacha20":
        from murmuration.train.noise.chacha import ChaChaNoise

        return NoiseSource(lambda key, plan, _: ChaChaNoise.of(key, plan), AESNoise.of_metric, None)
    return NoiseSource(lambda key, plan, _: AESNoise.of(key, plan), AESNoise.of_metric, NoiseAhead)


def over_steps(draws: Any, plan: PrivacyPlan, first: int) -> Noise:
    """These draws, combined as the plan says; `first` is the first step of the segment."""
    if not isinstance(plan.noise, BandedNoise):
        return draws
    from murmuration.train.noise.correlated import CorrelatedNoise

    return CorrelatedNoise(draws, plan.noise, first)
