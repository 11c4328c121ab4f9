"""What the acting parts report to the ledger about a step: each writes down what it did, not what a config says."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from accounting.accountant import Event
from accounting.plan import RATE_DENOMINATOR


@dataclass(frozen=True)
class SamplingFact:
    """By the sampler: who could take part, how likely, and a keyed digest of who did."""

    threshold: int
    records: int
    digest: str


@dataclass(frozen=True)
class ClippingFact:
    """By the clip engine: the most that one record moves the sum."""

    rule: str
    sensitivity: float


@dataclass(frozen=True)
class NoiseFact:
    """By the noise mechanism: the deviation it drew, the elements that got a draw, the constant it divided by."""

    std: float
    divisor: float
    elements: int


@dataclass(frozen=True)
class StepFacts:
    sampling: SamplingFact
    clipping: ClippingFact
    noise: NoiseFact

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(value: dict[str, Any]) -> StepFacts:
        return StepFacts(
            SamplingFact(**value["sampling"]), ClippingFact(**value["clipping"]), NoiseFact(**value["noise"])
        )

    def event(self) -> Event:
        """The mechanism that these facts describe; a step without noise is no mechanism at all."""
        sigma = self.noise.std / self.clipping.sensitivity if self.clipping.sensitivity > 0 else math.nan
        return Event(self.sampling.threshold / RATE_DENOMINATOR, sigma, 1)
