"""The only home of n, q, C, sigma, T and delta.

Everything that must agree for an epsilon to be true is frozen here, once, before the first private batch. No other
object stores these numbers; the parts that act on them receive a plan and report to the ledger what they did.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

from murmuration.accounting.adaptive import METRIC, SENSITIVITY, AdaptiveRule
from murmuration.accounting.banded import BandedNoise
from murmuration.accounting.errors import RunError
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
        self._require_plain_if_banded()
        self._require_plain_if_allocated()

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
        if self.held_out is not None and not (0 < self.held_out <= 0.5 and self.adaptive is None):
            raise PlanError(f"at most half of the records can be held out, with a fixed C: {self.held_out}")
        if self.held_out is not None and self.units is not None:
            raise PlanError("held_out measures single records, which a plan for units of several does not; drop one")

    def _require_plain_if_banded(self) -> None:
        if self.banded is None:
            return
        if self.grid_growth:
            raise PlanError(
                "exact noise is whole numbers, and weighted sums of them are not; use other noise, or no bands"
            )
        if self.stands_for is not None:
            raise PlanError("tan scales the independent noise of steps; leave banded noise out of the simulation")
        if self.bands > min(self.records, self.steps):
            raise PlanError(f"{self.bands} bands need as many records and steps, not {self.records} and {self.steps}")

    def _require_plain_if_allocated(self) -> None:
        if self.slots == 1:
            return
        if not 1 < self.slots <= min(self.steps, MOST_SLOTS):
            raise PlanError(
                f"an epoch of random allocation has at most {MOST_SLOTS:,} steps, and no more than there are: "
                f"{self.slots} of {self.steps}"
            )
        if self.threshold != threshold_of(self.slots):
            raise PlanError(f"the threshold {self.threshold} is not that of an allocation to {self.slots} steps")
        if self.banded is not None or self.stands_for is not None:
            raise PlanError("random allocation is proved for the independent noise of one run; leave bands and tan out")

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
            if optional[name] == 1:  # as in plans from before there was a choice
                del optional[name]
        return value | {name: part for name, part in optional.items() if part}


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
