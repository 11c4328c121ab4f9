"""The only home of n, q, C, sigma, T and delta.

Everything that must agree for an epsilon to be true is frozen here, once, before the first private batch. No other
object stores these numbers; the parts that act on them receive a plan and report to the ledger what they did.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from murmuration.accounting.adaptive import METRIC, SENSITIVITY, AdaptiveRule
from murmuration.accounting.banded import BandedNoise
from murmuration.accounting.errors import AccountingError, RunError
from murmuration.accounting.strict_json import CLOSED
from murmuration.accounting.unit import Unit, adjacency_in_words, unit_in_words

RATE_DENOMINATOR = 2**32
Sampling = Literal["poisson", "allocation"]
ACCURACY = "accuracy"
SLOPE, CURVATURE = "loss_slope", "loss_curvature"
"""Released where the learning rate follows probes of the loss (`privacy.loss_probes`)."""
UNIT, ADJACENCY = unit_in_words(None), adjacency_in_words(None)
GRID_GROWTH = 1e-6
"""With exact noise: the share of C by which rounding to a grid may at most enlarge one record's effect on a sum."""


class PlanError(RunError, ValueError):
    """The numbers of a plan cannot give the promise; the message says which and what to change."""


def threshold_for(records: int, expected_batch: float, parts: int = 1) -> int:
    """K with q = K / 2^32 nearest to expected_batch / records; times `parts`, where a step draws from one of them."""
    if records < 1:
        raise PlanError(f"a private phase needs at least one record, but the index has {records}")
    if not 0 < expected_batch <= records:
        raise PlanError(f"expected_batch must lie in (0, {records}], the number of records, but is {expected_batch:g}")
    rate = expected_batch / records * parts
    if parts > 1 and rate > 1 + 1e-12:  # a quotient of n, times the parts, may be rounded upwards
        raise PlanError(
            f"each of {parts} parts of the {records} records must hold the expected batch, {expected_batch:g}; use at "
            f"most {math.floor(records / expected_batch)} bands"
        )
    return min(RATE_DENOMINATOR, max(1, round(rate * RATE_DENOMINATOR)))


# What goes together and what does not, for config, library and planner alike.

MECHANISMS = {
    "bands": "correlated noise (privacy.noise)",
    "allocation": "random allocation (privacy.sampling)",
    "exact": "exact noise (run.noise)",
    "tan": "a TAN simulation (privacy.tan)",
    "adaptive": "an adaptive C (privacy.clip.adaptive)",
    "automatic": "automatic clipping (privacy.clip.kind)",
    "groups": "clipping by groups (privacy.clip.groups)",
    "held_out": "a released accuracy (privacy.release)",
    "metrics": "released metrics (privacy.release, privacy.loss_probes)",
    "views": "several views of a record (privacy.views)",
    "units": "units of several records (data.unit)",
    "statistics": "a head that is solved from sums (trainable 'statistics')",
    "noise_floor": "optimizer.params.noise_floor",
    "mixing": "mixing",
    "monitor": "monitor",
    "until_budget": "until_budget",
    "features": "features that are kept",
    "keep_key": "run.keep_key",
}
"""Every option that excludes another one, with its name in refusals."""
_INDEPENDENT = "the latter needs the same independent noise at all steps"
_ONE_STEP = "the former is one step over all records, before which there is no model"
APART = {
    ("bands", "exact"): "exact noise is whole numbers, and weighted sums of them are not",
    ("bands", "tan"): "the latter scales the independent noise of steps",
    ("bands", "noise_floor"): _INDEPENDENT,
    ("bands", "monitor"): _INDEPENDENT,
    ("bands", "keep_key"): "the secret file contains the keys of the last block's steps, whose weights were released",
    ("allocation", "bands"): "the former is proved for independent noise",
    ("allocation", "tan"): "the latter is proved for Poisson samples",
    ("allocation", "monitor"): "the latter's advice is for Poisson samples",
    ("allocation", "until_budget"): "records are allocated to a fixed number of steps; give steps or epochs",
    ("allocation", "keep_key"): "the secret file may contain the key that tells in which step of the last epoch each "
    "record took part",
    ("tan", "metrics"): "the former scales the noise of gradients alone",
    ("tan", "adaptive"): "the former scales the noise of gradients alone",
    ("tan", "until_budget"): "the former simulates a run of a fixed number of steps; give `steps`",
    ("adaptive", "automatic"): "the former moves the one C of flat clipping",
    ("adaptive", "groups"): "the former moves one C for all parameters",
    ("adaptive", "noise_floor"): "the latter subtracts a constant noise, and with the former it changes with C",
    ("adaptive", "held_out"): "the latter is measured with a fixed C",
    ("mixing", "noise_floor"): "the former weakens the noise that the latter subtracts",
    ("units", "held_out"): "the latter measures single records",
    ("units", "features"): "the latter are of single records",
    ("statistics", "units"): "the former adds up single records",
    ("statistics", "views"): "the former sees each record once",
    ("statistics", "bands"): _ONE_STEP,
    ("statistics", "allocation"): _ONE_STEP,
    ("statistics", "metrics"): _ONE_STEP,
    ("statistics", "tan"): _ONE_STEP,
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


MOST_SLOTS = 2**20
MOST_OFF = 0.1
"""The largest share by which random allocation may change the expected batch that was asked for."""


def threshold_of(slots: int) -> int:
    """The threshold nearest to the rate of random allocation to so many steps."""
    return max(1, round(RATE_DENOMINATOR / slots))


def slots_for(records: int, expected_batch: float, steps: int) -> int:
    """The steps of an epoch of random allocation: so many that the number of epochs, the last of which may be cut, is
    the whole number nearest to how often `expected_batch` lets a record take part."""
    threshold_for(records, expected_batch)  # refused if the batch does not fit
    often = steps * expected_batch / records
    slots = -(-steps // max(1, round(often)))
    if abs(records / slots / expected_batch - 1) > MOST_OFF:
        other = max(1, round(records / expected_batch))
        raise PlanError(
            f"random allocation lets each record take part a whole number of times, but {steps} steps of "
            f"{expected_batch:g} records are {often:.3g} times; use expected_batch = {records / slots:.6g}, or "
            f"{records / other:.6g} with steps = {other * max(1, round(often))}, or Poisson sampling"
        )
    return slots


def draws_for(sampling: Sampling, records: int, expected_batch: float, steps: int, bands: int = 1) -> tuple[int, int]:
    """The threshold of a plan, and the steps of an epoch: 1 with Poisson samples, and where allocation has so large a
    batch that each step takes all records."""
    if sampling == "poisson":
        return threshold_for(records, expected_batch, bands), 1
    slots = slots_for(records, expected_batch, steps)
    return threshold_of(slots), slots


def rate_of(threshold: int, slots: int) -> float:
    """The rate at which a step draws the records whose turn it is, exactly: K / 2^32 has at most 33 bits and fits a
    double."""
    return threshold / RATE_DENOMINATOR if slots == 1 else 1 / slots


def turns_for(steps: int, bands: int, slots: int) -> int:
    """How often one record can take part in so many successive steps, from the beginning of a block or epoch on: with
    bands, once in each block, and with slots, once in each epoch, of which a cut one counts as whole."""
    return -(-steps // (bands * slots))


@dataclass(frozen=True)
class PlannedMetric:
    """A number that is published with noise at every step; each record adds at most `bound` to it."""

    __pydantic_config__ = CLOSED
    name: str
    bound: float
    std: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value > 0 for value in (self.bound, self.std)):
            raise PlanError(f"metric {self.name!r} needs a finite positive bound and noise: {self.bound}, {self.std}")


@dataclass(frozen=True)
class StandIn:
    """For a TAN simulation: the budget of the run that it stands for, and what batch and noise were divided by."""

    __pydantic_config__ = CLOSED
    epsilon: float
    scale: float

    def __str__(self) -> str:
        return f"NOT PRIVATE at ε = {self.epsilon:g}: a TAN simulation, batch and noise divided by {self.scale:g}"


_PARTS = {"adaptive": AdaptiveRule, "stands_for": StandIn, "units": Unit, "banded": BandedNoise}


@dataclass(frozen=True)
class PrivacyPlan:
    """Public constants of one private phase."""

    __pydantic_config__ = CLOSED
    records: int
    threshold: int
    clip_norm: float
    noise_multiplier: float
    steps: int
    delta: float
    epsilon_budget: float
    unit: str = UNIT
    adjacency: str = ADJACENCY
    metrics: tuple[PlannedMetric, ...] = ()
    adaptive: AdaptiveRule | None = None
    """The rule for clipping norms after the first; `clip_norm` is the first."""
    stands_for: StandIn | None = None
    """Set in a TAN simulation; all other numbers are those of the run itself."""
    held_out: float | None = None
    """Share of the records that are drawn but not trained on in this phase; the metric `accuracy` is about them."""
    units: Unit | None = None
    """Set where the unit is not a record: then `records` is the number of units, and so is every n."""
    grid_growth: float = 0.0
    """Above 0 if and only if the noise is exact: sums are rounded to a grid before the noise, which may add this share
    of C (and of a metric's bound) to one record's effect. All noise multipliers are charged as that much smaller."""
    banded: BandedNoise | None = None
    """Set if the noise of the steps is correlated. Each step then draws from one part of the records, and `threshold`
    is the one within that part."""
    views: int = 1
    """How often each drawn record is seen in a step. What is clipped is the mean gradient of its views, so that neither
    C nor epsilon depends on it."""
    slots: int = 1
    """Above 1: random allocation. The steps are cut into epochs of so many, and each record takes part in exactly one
    step of every epoch; the last epoch may be cut. `threshold` is then the nearest to 2^32 / slots."""

    def __post_init__(self) -> None:
        # Plans from a ledger have them as JSON.
        found = tuple(m if isinstance(m, PlannedMetric) else PlannedMetric(**m) for m in self.metrics)
        object.__setattr__(self, "metrics", found)
        for name, kind in _PARTS.items():
            if isinstance(value := getattr(self, name), dict):
                object.__setattr__(self, name, kind(**value))
        require_together(self.mechanisms)
        self._require_sound_holdout()
        counted = [m.bound for m in self.metrics if m.name == METRIC]
        if counted != ([SENSITIVITY] if self.adaptive else []):
            raise PlanError(f"adaptive clipping and the metric {METRIC!r} of bound {SENSITIVITY} need each other")
        if self.adaptive and not self.adaptive.lowest <= self.clip_norm <= self.adaptive.highest:
            raise PlanError(f"the first clipping norm {self.clip_norm:g} lies outside the bounds of adaptive clipping")
        if not 1 <= self.threshold <= RATE_DENOMINATOR:
            raise PlanError(f"the sampling threshold K must lie in [1, 2^32], but is {self.threshold}")
        for name in ("clip_norm", "noise_multiplier", "epsilon_budget"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"{name} must be a finite positive number, but is {value}")
        if self.records < 1 or self.steps < 1:
            raise PlanError(f"records and steps must be at least 1, but are {self.records} and {self.steps}")
        self._require_small()
        self._require_turns()

    def _require_small(self) -> None:
        if self.views < 1:
            raise PlanError(f"a record is seen in at least one view, not in {self.views}")
        if not 0 <= self.grid_growth <= GRID_GROWTH:
            raise PlanError(f"grid_growth must lie in [0, {GRID_GROWTH:g}], but is {self.grid_growth}")
        # delta = 1/n is the papers' usual choice, so it is allowed; anything above it protects nobody.
        if not 0 < self.delta <= 1 / self.records:
            raise PlanError(f"delta must lie in (0, 1/n] = (0, {1 / self.records:.3g}], but is {self.delta}")

    def _require_sound_holdout(self) -> None:
        asked = [m.bound for m in self.metrics if m.name == ACCURACY]
        if asked != ([] if self.held_out is None else [1.0]):
            raise PlanError(f"held-out records and the metric {ACCURACY!r} of bound 1 need each other")
        if self.held_out is not None and not 0 < self.held_out <= 0.5:
            raise PlanError(f"at most half of the records can be held out, not {self.held_out}")

    def _require_turns(self) -> None:
        if self.bands > min(self.records, self.steps):
            raise PlanError(f"{self.bands} bands need as many records and steps, not {self.records} and {self.steps}")
        if self.slots == 1:
            return
        if not 1 < self.slots <= min(self.steps, MOST_SLOTS):
            raise PlanError(
                f"an epoch of random allocation has at most {MOST_SLOTS:,} steps, and no more than there are: "
                f"{self.slots} of {self.steps}"
            )
        if self.threshold != threshold_of(self.slots):
            raise PlanError(f"the threshold {self.threshold} is not that of an allocation to {self.slots} steps")

    @property
    def mechanisms(self) -> frozenset[str]:
        """Those of `MECHANISMS` that a plan knows of."""
        chosen = {
            "bands": self.banded is not None,
            "allocation": self.slots != 1,
            "exact": self.grid_growth > 0,
            "tan": self.stands_for is not None,
            "adaptive": self.adaptive is not None,
            "held_out": self.held_out is not None,
            "metrics": bool(self.metrics),
            "units": self.units is not None,
            "views": self.views > 1,
        }
        return frozenset(name for name, there in chosen.items() if there)

    @property
    def bands(self) -> int:
        """How many parts the records are dealt into, whose turns follow each other; 1 with independent noise."""
        return 1 if self.banded is None else self.banded.bands

    @property
    def participations(self) -> int:
        """The number of planned steps that may draw one record: the number of sampled Gaussian steps, or of epochs, to
        account for."""
        return self.turns_of(self.steps)

    def turns_of(self, steps: int) -> int:
        """The most that so many successive steps, from the beginning of a block or epoch on, add to what is charged."""
        return turns_for(steps, self.bands, self.slots)

    def epoch_of(self, step: int) -> int:
        """The number, from 0, of the epoch of random allocation that a step belongs to."""
        return (step - 1) // self.slots

    @property
    def sampling_rate(self) -> float:
        """With independent noise it is q; with random allocation, 1 over the steps of an epoch."""
        return rate_of(self.threshold, self.slots)

    @property
    def divisor(self) -> float:
        """The expected batch q·n: the constant by which every noised sum is divided."""
        if self.slots > 1:
            return self.records / self.slots
        return self.sampling_rate * self.records / self.bands

    @property
    def added_noise(self) -> float:
        """Noise on a step, in units of C: σ, or with correlated noise its root mean square over a block."""
        return self.noise_multiplier * (1 if self.banded is None else self.banded.typical_spread)

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
        return sigma / (1 + self.grid_growth) if self.grid_growth else sigma

    @property
    def counted(self) -> list[tuple[float, float]]:
        """How far one record moves the count that C adapts to, and the noise on that count; empty if C is fixed."""
        return [(m.bound, m.std) for m in self.metrics if m.name == METRIC]

    def as_dict(self) -> dict[str, object]:
        value = asdict(self)
        names = ("metrics", "adaptive", "stands_for", "held_out", "units", "grid_growth", "banded", "views", "slots")
        optional = {name: value.pop(name) for name in names}
        optional["metrics"] = list(optional["metrics"])
        for name in ("views", "slots"):
            if optional[name] == 1:
                del optional[name]
        return value | {name: part for name, part in optional.items() if part}


# Beyond these, squares overflow or underflow; no real training run uses such values.
LEAST_SIGMA, MOST_SIGMA = 1e-9, 1e9


@dataclass(frozen=True)
class Event:
    """`count` steps in which each record took part with probability `rate`, noised with `sigma` = std / sensitivity.

    With a `cap`, at most that many of the `records` took part, chosen uniformly among those that were drawn. With
    `slots` above 1 it is `count` epochs of so many steps: each record took part in one of them, chosen uniformly, so
    that the rate is 1 / `slots`.
    """

    rate: float
    sigma: float
    count: int
    cap: int | None = None
    records: int | None = None
    slots: int = 1

    def __post_init__(self) -> None:
        if self.slots < 1 or (self.slots > 1 and (self.rate != 1 / self.slots or self.cap is not None)):
            raise AccountingError(f"an epoch of random allocation has a rate of 1 over its steps and no cap: {self}")
        if not 0 < self.rate <= 1:
            raise AccountingError(f"a sampling rate must lie in (0, 1], but is {self.rate}")
        if not (math.isfinite(self.sigma) and self.sigma > 0):
            raise AccountingError(f"a noise multiplier must be finite and positive, but is {self.sigma}")
        if not LEAST_SIGMA <= self.sigma <= MOST_SIGMA:
            raise AccountingError(
                f"a noise multiplier can be accounted between {LEAST_SIGMA:g} and {MOST_SIGMA:g}, but is {self.sigma}"
            )
        if self.count < 0:
            raise AccountingError(f"a step count cannot be negative, but is {self.count}")
        given = [number for number in (self.cap, self.records) if number is not None]
        if len(given) == 1 or any(number < 1 for number in given):
            raise AccountingError(f"a capped batch needs a cap and a record count of at least 1: {self}")

    @staticmethod
    def of_plan(plan: PrivacyPlan, count: int | None = None) -> Event:
        """What a plan's steps are for one record; `count`: None means all of them."""
        turns = plan.participations if count is None else count
        return Event(plan.sampling_rate, plan.effective_noise_multiplier, turns, slots=plan.slots)

    @property
    def kind(self) -> Event:
        """The mechanism alone."""
        return replace(self, count=0)

    def as_dict(self) -> dict[str, Any]:
        """As certificates state it."""
        found: dict[str, Any] = {"rate": self.rate, "sigma": self.sigma, "count": self.count}
        return found if self.slots == 1 else {**found, "slots": self.slots}

    @staticmethod
    def of_dict(value: dict[str, Any]) -> Event:
        return Event(value["rate"], value["sigma"], value["count"], slots=value.get("slots", 1))


def fits_grid(grid: float, elements: int, most: float) -> bool:
    """Whether rounding `elements` numbers to multiples of `grid`, a power of two, adds at most `most` to a distance."""
    return 0 < grid < math.inf and math.frexp(grid)[0] == 0.5 and grid * math.sqrt(elements) <= most


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
