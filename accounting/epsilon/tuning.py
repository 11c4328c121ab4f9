"""The cost of choosing the best of several private runs on the same records and publishing only that one.

Trying a fixed list of settings and publishing the best is charged by adding up all runs. If the number of runs is
itself random (Papernot and Steinke 2022), far less is enough: dp_accounting's repeat-and-select bound, for RDP alone,
or the following bound, which needs the deltas of one run at all epsilons. The smaller of the two counts.

One run gives an outcome in an order (ties are broken by lot), at random as Q says, or Q' without the record; K of them
are made, and the best is published. Let f be the generating function of K, m its mean, and S(y), S'(y) the chances that
one run beats the outcome y. The published outcome then has the density q(y) f'(1 - S(y)), and without the record
q'(y) f'(1 - S'(y)). If f'(1 - S) <= e^a f'(1 - S') for all y, with f' <= f'(1) = m, then for every epsilon

    delta of the best at epsilon + a  =  sum of [q f'(1 - S) - e^(epsilon + a) q' f'(1 - S')]+
                                     <=  sum of f'(1 - S) [q - e^epsilon q']+  <=  m · delta of one run at epsilon.

What remains is a. That one run beats y is an event, so S' <= e^x S + d(x) for every x, where d(x) is the run's delta
at x, in either direction.

- Truncated negative binomial K with shape h and parameter g: f'(1 - S) is proportional to (g + (1 - g) S)^-(h + 1).
  Choose x with d(x) <= (e^x - 1) g / (1 - g): then g + (1 - g) S' <= e^x (g + (1 - g) S), and a = (h + 1) x.
- Poisson K: f'(1 - S) = m e^(-m S), and S' - S <= d(0), so a = m d(0).

So epsilon of the best at delta is that of one run at delta / m, plus a. Nothing is assumed of the run but its deltas.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from murmuration.accounting.epsilon.accountant import deltas_at, dp_event, epsilon, merge, rdp_epsilon
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event

# Of the parameter g and of the comparison with d(x); rounding there is far smaller.
ROOM = 1e-9
MOST = 200.0
# Beyond these the parameter g, or what is computed on the way to it, leaves the numbers that a double can hold well.
MOST_MEAN, LEAST_SHAPE, MOST_SHAPE = 1e12, 1e-6, 1e4


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
        shape = math.inf if value["shape"] == "poisson" else float(value["shape"])
        return Tuning(value["mean"], shape, value["fixed"])

    def epsilon(self, events: Sequence[Event], delta: float) -> float:
        """Of publishing the best of the runs, each of which is `events`."""
        merged = merge(events)
        if self.fixed:
            runs = int(self.mean)
            return epsilon([replace(event, count=event.count * runs) for event in merged], delta)
        value = math.inf  # either bound holds by itself, and where one has no answer the other one may
        with contextlib.suppress(AccountingError):
            import dp_accounting
            from dp_accounting.dp_event import RepeatAndSelectDpEvent

            run = dp_accounting.ComposedDpEvent(
                [dp_accounting.SelfComposedDpEvent(dp_event(event), event.count) for event in merged]
            )
            value = rdp_epsilon([(RepeatAndSelectDpEvent(run, self.mean, self.shape), 1)], delta)
        with contextlib.suppress(AccountingError):
            value = min(value, selected_epsilon(merged, delta, self.mean, self.shape))
        if not math.isfinite(value):
            raise AccountingError("the cost of tuning did not converge; use fewer runs or more noise")
        return value


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


def selected_epsilon(events: Sequence[Event], delta: float, mean: float, shape: float) -> float:
    """`mean` runs on average, each of which is `events`; shape 0 is logarithmic, 1 geometric, infinity Poisson."""
    if mean > MOST_MEAN or not (shape == 0 or math.isinf(shape) or LEAST_SHAPE <= shape <= MOST_SHAPE):
        raise AccountingError(
            f"a number of runs with mean {mean:g} and shape {shape:g} has no bound here; give a mean up to "
            f"{MOST_MEAN:g} and a shape of 0, poisson, or from {LEAST_SHAPE:g} to {MOST_SHAPE:g}"
        )
    if mean == 1 and not math.isinf(shape):
        return epsilon(events, delta)  # always one run
    best = epsilon(events, delta / mean)
    if math.isinf(shape):
        return best + mean * deltas_at(events, [0.0], delta)[0]
    return best + (shape + 1) * _least(events, parameter(mean, shape) * (1 - ROOM))


def _least(events: Sequence[Event], g: float) -> float:
    """An x, close to the least one, with d(x) <= (e^x - 1) g / (1 - g)."""
    low, high = 0.0, 1.0
    while not _covers(events, g, high):
        low, high = high, 2 * high
        if high > MOST:
            raise AccountingError("the cost of tuning did not converge; use fewer runs or more noise")
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if _covers(events, g, middle) else (middle, high)
    return high


def _covers(events: Sequence[Event], g: float, x: float) -> bool:
    allowed = math.expm1(x) * g / (1 - g) * (1 - ROOM)
    return allowed >= 1 or deltas_at(events, [x], 1e-6)[0] <= allowed


def parameter(mean: float, shape: float) -> float:
    """The g in (0, 1) of the truncated negative binomial law of this shape whose mean is `mean`, which is above 1."""
    return 1 / mean if shape == 1 else math.exp(_root(lambda log_g: _mean(math.exp(log_g), shape) - mean))


def _mean(g: float, shape: float) -> float:
    spread = -math.log(g) if shape == 0 else -math.expm1(shape * math.log(g)) / shape
    return (1 - g) / (g * spread)


def _root(falling: Callable[[float], float]) -> float:
    low, high = -MOST, -1e-12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return low
