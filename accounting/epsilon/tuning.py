"""The cost of choosing the best of several private runs on the same records and publishing only that one.

Trying a fixed list of settings and publishing the best is charged by adding up all runs. If the number of runs is
itself random (Papernot and Steinke 2022), dp_accounting's repeat-and-select bound is far smaller; only RDP supports it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from murmuration.accounting.epsilon.accountant import AccountingError, Event, dp_event, epsilon, merge, rdp_epsilon


@dataclass(frozen=True)
class Tuning:
    """`mean` runs on average: shape 0 is logarithmic, 1 geometric, infinity Poisson; if `fixed`, all are charged."""

    mean: float
    shape: float = 1.0
    fixed: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise AccountingError(f"the mean number of tuning runs must be at least 1, but is {self.mean}")
        if self.fixed and self.mean != int(self.mean):
            raise AccountingError(f"a fixed number of tuning runs must be whole, but is {self.mean}")
        if not self.shape >= 0:
            raise AccountingError(f"the shape of the number of runs must be at least 0, but is {self.shape}")

    def as_dict(self) -> dict[str, Any]:
        """JSON has no infinity: Poisson is written as a word."""
        return {**asdict(self), "shape": "poisson" if math.isinf(self.shape) else self.shape}

    @staticmethod
    def from_dict(value: dict[str, Any]) -> Tuning:
        shape = value.get("shape", 1.0)
        return Tuning(value["mean"], math.inf if shape == "poisson" else float(shape), bool(value.get("fixed", False)))


@dataclass(frozen=True)
class Declared:
    """A statement of what was chosen by the outputs of private runs; charged if the number of runs is known."""

    statement: str
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.statement, str) and self.statement):
            raise AccountingError("a declaration of tuning must say in words what was tried and how it was chosen")

    def as_dict(self) -> dict[str, Any]:
        return {"statement": self.statement, "runs": self.tuning.as_dict() if self.tuning else None}

    @staticmethod
    def from_dict(value: dict[str, Any]) -> Declared:
        runs = value["runs"]
        return Declared(value["statement"], None if runs is None else Tuning.from_dict(runs))


def tuned_epsilon(events: Sequence[Event], delta: float, tuning: Tuning) -> float:
    """Epsilon of publishing the best of the runs, each of which is `events`."""
    merged = merge(events)
    if tuning.fixed:
        runs = int(tuning.mean)
        return epsilon([replace(event, count=event.count * runs) for event in merged], delta)
    import dp_accounting
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    run = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(dp_event(e), e.count) for e in merged])
    value = rdp_epsilon([(RepeatAndSelectDpEvent(run, tuning.mean, tuning.shape), 1)], delta)
    if not math.isfinite(value):
        raise AccountingError("the cost of tuning did not converge; use fewer runs or more noise")
    return value
