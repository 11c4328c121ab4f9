"""The cost of choosing the best of several private runs on the same records and publishing only that one.

Trying a fixed list of settings and publishing the best is charged by adding up all runs. If the number of runs is
itself random (Papernot and Steinke 2022), far less is enough: dp_accounting's repeat-and-select bound, for RDP alone,
or the bound of `selection.py`, which follows from the deltas of one run at all epsilons. The smaller of the two counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from murmuration.accounting.epsilon.accountant import AccountingError, Event, dp_event, epsilon, merge, rdp_epsilon
from murmuration.accounting.epsilon.selection import selected_epsilon


@dataclass(frozen=True)
class Tuning:
    """`mean` runs on average: shape 0 is logarithmic, 1 geometric, infinity Poisson; if `fixed`, all are charged."""

    mean: float
    shape: float = 1.0
    fixed: bool = False
    bound: Literal["rdp", "either"] = field(default="either", compare=False)
    """Declarations that earlier versions wrote are priced by RDP alone, as their certificates were."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise AccountingError(f"the mean number of tuning runs must be at least 1, but is {self.mean}")
        if self.fixed and self.mean != int(self.mean):
            raise AccountingError(f"a fixed number of tuning runs must be whole, but is {self.mean}")
        if not self.shape >= 0:
            raise AccountingError(f"the shape of the number of runs must be at least 0, but is {self.shape}")

    def as_dict(self) -> dict[str, Any]:
        """JSON has no infinity: Poisson is written as a word. The bound stands only where there is a choice."""
        value = {**asdict(self), "shape": "poisson" if math.isinf(self.shape) else self.shape}
        if self.fixed or self.bound == "rdp":
            del value["bound"]
        return value

    @staticmethod
    def from_dict(value: dict[str, Any]) -> Tuning:
        shape = value.get("shape", 1.0)
        number = math.inf if shape == "poisson" else float(shape)
        return Tuning(value["mean"], number, bool(value.get("fixed", False)), value.get("bound", "either"))


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
    found = [_by_rdp(merged, delta, tuning)] if tuning.bound == "rdp" else _by_either(merged, delta, tuning)
    value = min(found, default=math.inf)
    if not math.isfinite(value):
        raise AccountingError("the cost of tuning did not converge; use fewer runs or more noise")
    return value


def _by_either(events: Sequence[Event], delta: float, tuning: Tuning) -> list[float]:
    """Each is a bound of its own; where one of them has no answer the other one may."""
    found = []
    for price in (_by_rdp, _by_deltas):
        with contextlib.suppress(AccountingError):
            found.append(price(events, delta, tuning))
    return found


def _by_deltas(events: Sequence[Event], delta: float, tuning: Tuning) -> float:
    return selected_epsilon(events, delta, tuning.mean, tuning.shape)


def _by_rdp(events: Sequence[Event], delta: float, tuning: Tuning) -> float:
    import dp_accounting
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    run = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(dp_event(e), e.count) for e in events])
    return rdp_epsilon([(RepeatAndSelectDpEvent(run, tuning.mean, tuning.shape), 1)], delta)
