"""Numbers of a step's records that are released with noise, in the same event as the gradient.

Each metric is one object: its bound and noise, what its number is about, and what goes with it in the plan. What
measures it is in `train/noise/metrics.py`, and in `train/engines/measures.py` where that takes a pass of its own. A
new one is a class here, an entry of `METRICS`, and its measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from murmuration.accounting.adaptive import METRIC, SENSITIVITY, AdaptiveRule
from murmuration.accounting.errors import PlanError
from murmuration.accounting.strict_json import CLOSED

ACCURACY = "accuracy"
SLOPE, CURVATURE = "loss_slope", "loss_curvature"
"""Released where the learning rate follows probes of the loss (`privacy.loss_probes`)."""


@dataclass(frozen=True)
class PlannedMetric:
    """A number that is published with noise at every step; each record adds at most `bound` to it."""

    __pydantic_config__ = CLOSED
    mechanism: ClassVar[str] = "metrics"
    """What refusals call it (`plan.MECHANISMS`)."""
    signed: ClassVar[bool] = False
    """Whether a record adds between -bound and bound, or between 0 and bound."""
    offset: ClassVar[float] = 0.0
    """What is added to the number that is released: a public constant."""
    apart: ClassVar[bool] = False
    """Whether a pass of its own measures it, beside the one that makes the gradients."""
    name: str
    bound: float
    std: float

    def __post_init__(self) -> None:
        if METRICS.get(self.name, PlannedMetric) is not type(self):
            raise PlanError(f"a metric named {self.name!r} is a {METRICS.get(self.name, PlannedMetric).__name__}")
        if not all(math.isfinite(value) and value > 0 for value in (self.bound, self.std)):
            raise PlanError(f"metric {self.name!r} needs a finite positive bound and noise: {self.bound}, {self.std}")

    def expected(self, batch: float, held_out: float) -> float:
        """How many records of an expected batch it is about, some of which are held out: a public constant."""
        return batch * (1 - held_out)

    def in_a_certificate(self, phase: str) -> list[str]:
        return []


@dataclass(frozen=True)
class LossProbe(PlannedMetric):
    """The slope or the curvature of the loss along the last move of the weights."""

    __pydantic_config__ = CLOSED
    signed = apart = True


@dataclass(frozen=True)
class HeldOutAccuracy(PlannedMetric):
    """The share of right answers about records that are drawn but not trained on in this phase."""

    __pydantic_config__ = CLOSED
    mechanism = "held_out"
    apart = True
    share: float
    """Of the records, how many are held out."""

    @staticmethod
    def of(std: float, share: float) -> HeldOutAccuracy:
        return HeldOutAccuracy(ACCURACY, 1.0, std, share)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound != 1.0:
            raise PlanError(f"an answer about held-out records is right or not, so its bound is 1, not {self.bound}")
        if not 0 < self.share <= 0.5:
            raise PlanError(f"at most half of the records can be held out, not {self.share}")

    def expected(self, batch: float, held_out: float) -> float:
        return batch * held_out

    def in_a_certificate(self, phase: str) -> list[str]:
        return [
            f"held out in {phase}: {self.share:.3%} of the records, drawn like all others, not trained on in it; of "
            "them, the accuracy of each step is released with noise, charged as one event with the gradient"
        ]


@dataclass(frozen=True)
class ClippedShare(PlannedMetric):
    """The share of records whose gradient was longer than C_t, from which the next C follows (`adaptive.py`)."""

    __pydantic_config__ = CLOSED
    mechanism = "adaptive"
    signed = True
    offset = 0.5  # each record was counted as 1/2 or -1/2
    rule: AdaptiveRule
    """For clipping norms after the first; the plan's `clip_norm` is the first."""

    @staticmethod
    def of(std: float, rule: AdaptiveRule) -> ClippedShare:
        return ClippedShare(METRIC, SENSITIVITY, std, rule)

    def __post_init__(self) -> None:
        if isinstance(self.rule, dict):  # as a ledger has it
            object.__setattr__(self, "rule", AdaptiveRule(**self.rule))
        super().__post_init__()
        if self.bound != SENSITIVITY:
            raise PlanError(f"a record moves the count of clipped ones by {SENSITIVITY}, not by {self.bound}")


AnyMetric = PlannedMetric | LossProbe | HeldOutAccuracy | ClippedShare
METRICS: dict[str, type[PlannedMetric]] = {
    METRIC: ClippedShare, ACCURACY: HeldOutAccuracy, SLOPE: LossProbe, CURVATURE: LossProbe
}  # fmt: skip


def metric_of_dict(value: dict[str, Any]) -> PlannedMetric:
    """As a ledger states it."""
    return METRICS.get(value["name"], PlannedMetric)(**value)
