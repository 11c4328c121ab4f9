"""Finds the noise for a target epsilon: rounded to the safe side and accounted again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from murmuration.accounting.epsilon.accountant import Accountant, epsilon, quick_epsilon, within
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event

DIGITS = 5
MOST_STEPS = 10**9
MOST_EPSILON = 100.0
"""The largest target: a larger one promises nothing, and its tiny noise takes minutes to account."""

By = Accountant | Literal["quick"]


@lru_cache(maxsize=256)
def calibrate_sigma(
    event: Event, target: float, delta: float, accountant: Accountant = "pld", digits: int = DIGITS
) -> float:  # fmt: skip
    """Smallest noise multiplier with `digits` decimals, in the place of the event's own, whose re-accounted epsilon is
    at most `target`."""
    require_target(target)
    ladder = _SigmaLadder(event, target, delta, digits)
    if accountant == "rdp":
        return ladder.sigma(_first_tick(lambda ticks: ladder.excess(ticks, "rdp") <= 0, ladder))
    # A quick upper bound finds where the answer is, up to a few ticks, and the accountant itself decides among those.
    near = _interpolated(*_bracket(10**digits, ladder, "quick"), ladder, "quick")
    return ladder.sigma(_interpolated(*_around(near, ladder, accountant), ladder, accountant))


def enlarged(sigma: float, growth: float) -> float:
    """The smallest noise multiplier, to `DIGITS` decimals, that is at least `sigma` after division by 1 + `growth`."""
    return math.ceil(sigma * (1 + growth) * 10**DIGITS) / 10**DIGITS if growth else sigma


def require_target(target: float) -> None:
    if not (math.isfinite(target) and target > 0):
        raise AccountingError(f"the target epsilon must be finite and positive, but is {target}")
    if target > MOST_EPSILON:
        raise AccountingError(
            f"epsilon = {target:g} promises nothing, so no noise is calibrated to it; give at most {MOST_EPSILON:g} "
            "(8 is usual), or train without privacy"
        )


def spent_by(events: list[Event], delta: float, by: By) -> float:
    return quick_epsilon(events, delta) if by == "quick" else epsilon(events, delta, by)


@dataclass(frozen=True)
class _SigmaLadder:
    """Noise multipliers as whole ticks of their last decimal, and how far above the target each one's epsilon is."""

    event: Event
    target: float
    delta: float
    digits: int

    def sigma(self, ticks: int) -> float:
        return round(ticks * 10.0**-self.digits, self.digits)

    def excess(self, ticks: int, by: By) -> float:
        """Log ratio to the target: nearly linear in log sigma, so that interpolation lands close."""
        try:
            spent = spent_by([replace(self.event, sigma=self.sigma(ticks))], self.delta, by)
        except AccountingError:
            # Accountants stop converging where there is far too little noise: that is over the budget.
            if ticks > 50 * 10**self.digits:
                raise
            return math.inf
        ratio = math.log(max(spent, 1e-12) / self.target)
        # The logarithm may round an excess away; the comparison itself decides.
        return min(ratio, 0.0) if within(spent, self.target) else max(ratio, 1e-300)

    def doubled(self, ticks: int) -> int:
        if 2 * ticks > 10 ** (self.digits + 5):
            raise AccountingError(
                f"no noise multiplier up to 1e5 reaches epsilon = {self.target}; allow a larger epsilon"
            )
        return 2 * ticks


class _Probe(NamedTuple):
    """A point on the ladder whose epsilon was computed."""

    ticks: int
    excess: float


def _first_tick(fits: Callable[[int], bool], ladder: _SigmaLadder) -> int:
    low, high = 1, 10**ladder.digits
    while not fits(high):
        low, high = high, ladder.doubled(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _bracket(near: int, ladder: _SigmaLadder, by: By) -> tuple[_Probe, _Probe]:
    """A probe with too little noise and one with enough; the same probe twice if the lowest tick has enough."""
    high = _Probe(near, ladder.excess(near, by))
    while high.excess > 0:
        ticks = ladder.doubled(high.ticks)
        high = _Probe(ticks, ladder.excess(ticks, by))
    ticks = max(1, int(high.ticks * 0.85))
    low = _Probe(ticks, ladder.excess(ticks, by))
    while low.excess <= 0:
        high, ticks = low, max(1, int(low.ticks * 0.7))
        if ticks == high.ticks:
            return high, high
        low = _Probe(ticks, ladder.excess(ticks, by))
    return low, high


def _around(near: int, ladder: _SigmaLadder, by: By) -> tuple[_Probe, _Probe]:
    """As `_bracket`, but close: how fast the quick bound falls there says where the answer lies beside `near`."""
    beside = near + max(2, near // 16)
    here, there = ladder.excess(near, "quick"), ladder.excess(beside, "quick")
    slope = (here - there) / math.log(beside / near)
    first = _Probe(near, ladder.excess(near, by))
    if not (math.isfinite(first.excess) and math.isfinite(slope) and slope > 0.1):
        return _bracket(near, ladder, by)
    stride, up = near * abs(math.expm1(first.excess / slope)), first.excess > 0
    stride = math.ceil(min(stride, near / 4)) + 1
    while True:
        ticks = max(1, first.ticks + stride if up else first.ticks - stride)
        if ticks == first.ticks:
            return first, first
        second = _Probe(ticks, ladder.excess(ticks, by))
        if (second.excess > 0) != up:
            return (first, second) if up else (second, first)
        first, stride = second, 2 * stride


def _interpolated(low: _Probe, high: _Probe, ladder: _SigmaLadder, by: By) -> int:
    """The first tick with enough noise between the two probes."""
    pulled_low = pulled_high = 0
    while (gap := high.ticks - low.ticks) > 1:
        if math.isfinite(low.excess) and max(pulled_low, pulled_high) < 3:
            guess = low.ticks + round(gap * low.excess / (low.excess - high.excess))
            ticks = min(high.ticks - 1, max(low.ticks + 1, guess))
        else:  # interpolation keeps landing on one side: halve instead
            ticks, pulled_low, pulled_high = (low.ticks + high.ticks) // 2, 0, 0
        middle = _Probe(ticks, ladder.excess(ticks, by))
        if middle.excess > 0:
            low, pulled_low, pulled_high = middle, pulled_low + 1, 0
        else:
            high, pulled_low, pulled_high = middle, 0, pulled_high + 1
    return high.ticks
