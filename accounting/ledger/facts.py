"""Facts about a step that the parts which make it report to the ledger: what each did, not what a config says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from murmuration.accounting.adaptive import ROUNDING
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event
from murmuration.accounting.noise import GENERATORS, CorrelationFact
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import AnySampling
from murmuration.accounting.strict_json import CLOSED

RULES = ("flat", "automatic")


@dataclass(frozen=True, order=True)
class StepId:
    phase: int
    segment: int
    step: int


@dataclass(frozen=True)
class SamplingFact:
    """Reported by the sampler: the rule that it drew by, from how many records, and a keyed digest of who took part."""

    __pydantic_config__ = CLOSED
    rule: AnySampling
    records: int
    digest: str


@dataclass(frozen=True)
class ClippingFact:
    """Reported by the clip engine: the most that one record moves the sum."""

    __pydantic_config__ = CLOSED
    rule: str
    sensitivity: float


@dataclass(frozen=True)
class NoiseFact:
    """Reported by the noise mechanism: the standard deviation of its draws and the source of their random bits, the
    number of elements that got a draw, the constant it divided by, the grid of exact noise (0 for any other), and how
    draws of several steps were combined (None if they were not)."""

    __pydantic_config__ = CLOSED
    std: float
    divisor: float
    elements: int
    generator: str = "aes-256-ctr"
    grid: float = 0.0
    correlation: CorrelationFact | None = None


@dataclass(frozen=True)
class MetricFact:
    """Reported by the part that releases a noised metric of the same draw: its name, how far one record moves it, its
    noise, and the grid of exact noise."""

    __pydantic_config__ = CLOSED
    name: str
    sensitivity: float
    std: float
    grid: float = 0.0


@dataclass(frozen=True)
class StepFacts:
    __pydantic_config__ = CLOSED
    sampling: SamplingFact
    clipping: ClippingFact
    noise: NoiseFact
    metrics: tuple[MetricFact, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        value = asdict(self)
        metrics = list(value.pop("metrics"))
        for part in (value["noise"], *metrics):
            if not part["grid"]:
                del part["grid"]
        if self.noise.correlation is None:
            del value["noise"]["correlation"]
        return {**value, "metrics": metrics} if metrics else value

    def event(self) -> Event:
        """The mechanism that these facts describe, where records are allocated that of the step's whole epoch; a step
        without noise is no mechanism at all."""
        released = [(self.clipping.sensitivity, self.noise.std)]
        released += [(metric.sensitivity, metric.std) for metric in self.metrics]
        return self.sampling.rule.event(combined_sigma(released), 1)

    def departure_from(self, plan: PrivacyPlan) -> str | None:
        """How an announced step contradicts its frozen plan; None if it does not. `NormTrail` checks an adaptive C."""
        if self.clipping.rule not in RULES:
            return f"clips by the rule {self.clipping.rule!r}, which is unknown here; read it with a newer version"
        if self.noise.generator not in GENERATORS:
            return f"draws noise from {self.noise.generator!r}, which is unknown here; read it with a newer version"
        if self.noise.elements < 1:
            return "announces noise for no element"
        grids = [(self.noise.grid, self.noise.elements, self.clipping.sensitivity)]
        grids += [(metric.grid, 1, metric.sensitivity) for metric in self.metrics]
        if (departure := plan.noise.departure(self.noise.generator, grids)) is not None:
            return departure
        if self.sampling.rule != plan.sampling:
            return f"draws {self.sampling.rule}, but its plan says {plan.sampling}"
        fixed: list[tuple[str, float, float]] = [
            ("n", self.sampling.records, plan.records),
            ("the divisor", self.noise.divisor, plan.divisor),
        ]
        if plan.adaptive is None:
            fixed.append(("the deviation of the noise", self.noise.std, plan.noise_std))
        for name, stated, planned in fixed:
            if stated != planned:
                return f"states {name} = {stated}, but its plan says {planned}"
        if plan.adaptive is None and abs(self.clipping.sensitivity - plan.clip_norm) > ROUNDING * plan.clip_norm:
            return f"states the sensitivity {self.clipping.sensitivity}, but its plan says {plan.clip_norm}"
        if [(m.name, m.sensitivity, m.std) for m in self.metrics] != [(m.name, m.bound, m.std) for m in plan.metrics]:
            return "publishes metrics of its records that differ from its plan"
        return None

    def fault_of(self, done: StepFacts) -> str | None:
        """Why a step announced like this cannot be accounted for; None if it can. Merely weaker noise is charged."""
        if done.sampling != self.sampling:
            return "used other records than were announced"
        if done.noise.elements != self.noise.elements:
            return f"put noise on {done.noise.elements} elements and not on the announced {self.noise.elements}"
        if done.noise.divisor != self.noise.divisor:
            return "was divided by another number than was announced"
        if (done.clipping.rule, done.noise.generator) != (self.clipping.rule, self.noise.generator):
            return "used another clipping rule or source of noise than was announced"
        if done.noise.correlation != self.noise.correlation:
            return "had noise of another matrix than was announced"
        if [done.noise.grid, *(m.grid for m in done.metrics)] != [self.noise.grid, *(m.grid for m in self.metrics)]:
            return "was rounded to another grid than was announced"
        try:
            done.event()
        except (AccountingError, ArithmeticError) as error:
            return f"was not a noised step ({error})"
        return None


def combined_sigma(released: Sequence[tuple[float, float]]) -> float:
    """Noise multiplier of everything released from one draw: (sensitivity, std) of each, joined as one vector.

    One draw is one event. Charging its parts as separate events would count the sampling once for each of them.
    """
    if not all(sensitivity > 0 and std > 0 for sensitivity, std in released):
        return math.nan
    if len(released) == 1:  # the plain ratio, without the rounding of squares and roots
        return released[0][1] / released[0][0]
    return sum((sensitivity / std) ** 2 for sensitivity, std in released) ** -0.5


@dataclass(frozen=True)
class Segment:
    """A stretch of steps that share their keys and everything that shapes a release."""

    __pydantic_config__ = CLOSED
    phase: int
    number: int
    salt: str
    config_digest: str
    manifest_digest: str
    from_step: int
    reason: str
    keys: Literal["ratchet"]
    """How the keys of its steps are derived: from a chain that forgets."""

    @property
    def key_name(self) -> str:
        return f"{self.number}:{self.salt}"

    @property
    def chain_name(self) -> str:
        """The name of its chain of keys in the secret file."""
        return f"phase {self.phase}, segment {self.key_name}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Charge:
    """Steps of one phase that are the same mechanism; with `slots` above 1, epochs of so many steps."""

    __pydantic_config__ = CLOSED
    phase: int
    rate: float
    sigma: float
    count: int
    slots: int = 1

    @staticmethod
    def of(phase: int, event: Event) -> Charge:
        return Charge(phase, event.rate, event.sigma, event.count, event.slots)

    def event(self) -> Event:
        return Event(self.rate, self.sigma, self.count, slots=self.slots)

    def as_dict(self) -> dict[str, Any]:
        return {"phase": self.phase, **self.event().as_dict()}


@dataclass(frozen=True)
class Head:
    """A ledger's last line, and what the ledger charged up to it. `ledger_of` is the run's id."""

    __pydantic_config__ = CLOSED
    ledger_of: str
    length: int
    head: str
    charged: tuple[Charge, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"charged": [each.as_dict() for each in self.charged]}


@dataclass(frozen=True)
class CheckpointMark:
    __pydantic_config__ = CLOSED
    phase: int
    segment: int
    step: int
    digest: str
