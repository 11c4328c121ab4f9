"""The only home of n, q, C, sigma, T and delta.

Everything that must agree for an epsilon to be true is frozen here, once, before the first private batch. No other
object stores these numbers; the parts that act on them receive a plan and report to the ledger what they did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from murmuration.accounting.adaptive import AdaptiveRule
from murmuration.accounting.banded import BandedNoise
from murmuration.accounting.errors import PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.metrics import AnyMetric, ClippedShare, HeldOutAccuracy, metric_of_dict
from murmuration.accounting.noise import ExactGrid, IndependentNoise
from murmuration.accounting.sampling import AnySampling, sampling_of_dict, threshold_for
from murmuration.accounting.strict_json import CLOSED
from murmuration.accounting.unit import Unit, adjacency_in_words, unit_in_words

UNIT, ADJACENCY = unit_in_words(None), adjacency_in_words(None)


# What goes together and what does not, for config, library and planner alike.

MECHANISMS = {
    "banded": "correlated noise (privacy.noise)",
    "allocation": "random allocation (privacy.sampling)",
    "exact": "exact noise (run.noise)",
    "adaptive": "an adaptive C (privacy.clip.adaptive)",
    "automatic": "automatic clipping (privacy.clip.kind)",
    "groups": "clipping by groups (privacy.clip.groups)",
    "held_out": "a released accuracy (privacy.release)",
    "metrics": "released metrics (privacy.release, privacy.loss_probes)",
    "views": "several views of a record (privacy.views)",
    "units": "units of several records (data.unit)",
    "statistics": "a head that is solved from sums (trainable 'statistics')",
    "mixing": "mixing",
    "monitor": "monitor",
    "features": "features that are kept",
    "keep_key": "run.keep_key",
    "audit": "run.audit",
}
"""Every option that excludes another one, with its name in refusals."""
_ONE_STEP = "the former is one step over all records, before which there is no model"
APART = {
    ("banded", "exact"): "exact noise is whole numbers, and weighted sums of them are not",
    ("banded", "monitor"): "the latter needs the same independent noise at all steps",
    ("banded", "keep_key"): "the secret file contains the keys of the last block's steps, whose weights were released",
    ("banded", "audit"): "the key is kept until the audit is made, and contains the keys of the last block's steps",
    ("allocation", "banded"): "the former is proved for independent noise",
    ("allocation", "monitor"): "the latter's advice is for Poisson samples",
    ("allocation", "keep_key"): "the secret file may contain the key that tells in which step of the last epoch each "
    "record took part",
    ("allocation", "audit"): "the key is kept until the audit is made, and may tell in which step of the last epoch "
    "each record took part",
    ("adaptive", "audit"): "the latter holds C fixed",
    ("adaptive", "automatic"): "the former moves the one C of flat clipping",
    ("adaptive", "groups"): "the former moves one C for all parameters",
    ("adaptive", "held_out"): "the latter is measured with a fixed C",
    ("units", "held_out"): "the latter measures single records",
    ("statistics", "views"): "the former sees each record once",
    ("statistics", "banded"): _ONE_STEP,
    ("statistics", "allocation"): _ONE_STEP,
    ("statistics", "metrics"): _ONE_STEP,
    ("statistics", "mixing"): "the former's sums are no model's gradients",
    ("statistics", "monitor"): "the former's sums are no model's gradients",
    ("features", "views"): "the former are one row for each record",
    ("features", "mixing"): "the latter are pictures",
    ("features", "monitor"): "the latter measures the whole model",
}
"""Pairs that exclude each other, and why."""


def require_together(chosen: Collection[str]) -> None:
    """Refuses mechanisms that do not go together."""
    for (one, other), why in APART.items():
        if one in chosen and other in chosen:
            raise PlanError(f"{MECHANISMS[one]} and {MECHANISMS[other]} do not go together: {why}; drop one of them")


AnyNoise = IndependentNoise | ExactGrid | BandedNoise
NOISES: dict[str, type[AnyNoise]] = {each.kind: each for each in (IndependentNoise, ExactGrid, BandedNoise)}
_OF_JSON: dict[str, Callable[[dict[str, Any]], object]] = {
    "sampling": sampling_of_dict, "noise": lambda value: NOISES[value["kind"]](**value),
    "units": lambda value: Unit(**value),
}  # fmt: skip


@dataclass(frozen=True)
class PrivacyPlan:
    """Public constants of one private phase."""

    __pydantic_config__ = CLOSED
    records: int
    sampling: AnySampling
    clip_norm: float
    noise_multiplier: float
    steps: int
    delta: float
    epsilon_budget: float
    unit: str = UNIT
    adjacency: str = ADJACENCY
    metrics: tuple[AnyMetric, ...] = ()
    """Released with the gradient at every step."""
    units: Unit | None = None
    """Set where the unit is not a record: then `records` is the number of units, and so is every n."""
    noise: AnyNoise = field(default_factory=IndependentNoise)
    views: int = 1
    """How often each drawn record is seen in a step. What is clipped is the mean gradient of its views, so that neither
    C nor epsilon depends on it."""

    def __post_init__(self) -> None:
        # Plans from a ledger have them as JSON.
        found = tuple(metric_of_dict(m) if isinstance(m, dict) else m for m in self.metrics)
        object.__setattr__(self, "metrics", found)
        for name, made in _OF_JSON.items():
            if isinstance(value := getattr(self, name), dict):
                object.__setattr__(self, name, made(value))
        require_together(self.mechanisms)
        if len({m.name for m in self.metrics}) < len(self.metrics):
            raise PlanError("a metric is released twice; each can be released once")
        if self.adaptive and not self.adaptive.lowest <= self.clip_norm <= self.adaptive.highest:
            raise PlanError(f"the first clipping norm {self.clip_norm:g} lies outside the bounds of adaptive clipping")
        for name in ("clip_norm", "noise_multiplier", "epsilon_budget"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"{name} must be a finite positive number, but is {value}")
        if self.records < 1 or self.steps < 1:
            raise PlanError(f"records and steps must be at least 1, but are {self.records} and {self.steps}")
        if self.views < 1:
            raise PlanError(f"a record is seen in at least one view, not in {self.views}")
        _require_delta(self.delta, self.records)
        self.sampling.require(self.records, self.steps)
        if self.sampling.parts != self.noise.bands:
            raise PlanError(f"{self.sampling} does not go with noise of {self.noise.bands} bands, which are the parts")

    @property
    def mechanisms(self) -> frozenset[str]:
        """Those of `MECHANISMS` that a plan knows of."""
        chosen = {
            "metrics": bool(self.metrics),
            "units": self.units is not None,
            "views": self.views > 1,
        }
        parts = {self.noise.kind, self.sampling.kind, *(metric.mechanism for metric in self.metrics)}
        return frozenset(name for name, there in chosen.items() if there) | (parts & MECHANISMS.keys())

    @property
    def adaptive(self) -> AdaptiveRule | None:
        """The rule by which C moves; None if it is fixed."""
        return next((metric.rule for metric in self.metrics if isinstance(metric, ClippedShare)), None)

    @property
    def held_out(self) -> float:
        """Share of the records that are drawn but not trained on."""
        return next((metric.share for metric in self.metrics if isinstance(metric, HeldOutAccuracy)), 0.0)

    @property
    def participations(self) -> int:
        """The number of planned steps that may draw one record: the number of sampled Gaussian steps, or of epochs, to
        account for."""
        return self.sampling.turns(self.steps)

    def event(self, count: int | None = None) -> Event:
        """What the plan's steps are for one record; `count`: None means all of them."""
        turns = self.participations if count is None else count
        return self.sampling.event(self.effective_noise_multiplier, turns)

    @property
    def sampling_rate(self) -> float:
        """With independent noise it is q; with random allocation, 1 over the steps of an epoch."""
        return self.sampling.rate

    @property
    def divisor(self) -> float:
        """The expected batch q·n: the constant by which every noised sum is divided."""
        return self.sampling.divisor(self.records)

    @property
    def added_noise(self) -> float:
        """Noise on a step, in units of C: σ, or with correlated noise its root mean square over a block."""
        return self.noise_multiplier * self.noise.typical_spread

    @property
    def noise_std(self) -> float:
        """Standard deviation of each draw of noise, which with independent noise is that on each element of the clipped
        sum; for the first C, if C adapts."""
        return self.noise_multiplier * self.clip_norm

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise multiplier of gradient and metrics together, which are one event: the one to account for."""
        together = self.noise_multiplier
        if self.metrics:
            together = (self.noise_multiplier**-2 + sum((m.bound / m.std) ** 2 for m in self.metrics)) ** -0.5
        return self.charged_as(together)

    def charged_as(self, sigma: float) -> float:
        """The noise multiplier to charge, reduced by what rounding to the grid costs."""
        return sigma / (1 + self.noise.growth) if self.noise.growth else sigma

    def as_dict(self) -> dict[str, object]:
        value = asdict(self)
        names = ("metrics", "units", "views")
        optional = {name: value.pop(name) for name in names}
        optional["metrics"] = list(optional["metrics"])
        if self.views == 1:
            del optional["views"]
        # What a plan does not use is not written: a mechanism that comes later changes no line of the runs without it.
        if self.noise == IndependentNoise():
            del value["noise"]
        return value | {name: part for name, part in optional.items() if part}


def require_possible(records: int, expected_batch: float, delta: float | str | None) -> None:
    """Refuses what no noise makes possible, before any is calibrated."""
    threshold_for(records, expected_batch)
    _require_delta(parse_delta(delta, records), records)


def _require_delta(delta: float, records: int) -> None:
    # delta = 1/n is the papers' usual choice, so it is allowed; anything above it protects nobody.
    if not 0 < delta <= 1 / records:
        raise PlanError(f"delta must lie in (0, 1/n] = (0, {1 / records:.3g}], but is {delta}")


def parse_delta(text: float | str | None, records: int) -> float:
    """None means 1/(2n); '1/n' and '1/(2n)' are accepted besides plain numbers."""
    named = {"1/n": 1 / records, "1/(2n)": 1 / (2 * records), "1/2n": 1 / (2 * records)}
    if text is None:
        return named["1/(2n)"]
    if isinstance(text, str):
        key = text.replace(" ", "").lower()
        if key in named:
            return named[key]
        try:
            return float(key)
        except ValueError:
            raise PlanError(f"delta must be a number, '1/n' or '1/(2n)', but is {text!r}") from None
    return float(text)
