"""What accountants are asked about: sampled Gaussian mechanisms, and how often each of them acted on one record."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from murmuration.accounting.errors import AccountingError

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

    @property
    def kind(self) -> Event:
        """The mechanism alone."""
        return replace(self, count=0)

    @property
    def mechanism(self) -> str:
        """As certificates name it."""
        if self.slots > 1:
            return "epochs of Gaussian steps, each record in one of them"
        return "Poisson-subsampled Gaussian"

    def as_dict(self) -> dict[str, Any]:
        """As certificates state it."""
        found: dict[str, Any] = {"rate": self.rate, "sigma": self.sigma, "count": self.count}
        return found if self.slots == 1 else {**found, "slots": self.slots}

    @staticmethod
    def of_dict(value: dict[str, Any]) -> Event:
        return Event(value["rate"], value["sigma"], value["count"], slots=value.get("slots", 1))
