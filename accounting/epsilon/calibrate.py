"""Finds the noise, the steps or the batch for a target epsilon: rounded to the safe side and accounted again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from murmuration.accounting.epsilon.accountant import Accountant, epsilon, halve, quick_epsilon, within
from murmuration.accounting.errors import AccountingError, PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.sampling import MOST_SLOTS, make_sampling, slots_for

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


def calibrate_steps(event: Event, target: float, delta: float, accountant: Accountant = "pld") -> int:
    """Most steps, or epochs, in the place of the event's own, whose re-accounted epsilon is at most `target`; at least
    1, or an error."""
    require_target(target)

    def fits(count: int, by: By) -> bool:
        return _at_most([replace(event, count=count)], target, delta, by)

    if not fits(1, accountant):
        raise AccountingError(f"a single step passes epsilon = {target:g}; use more noise or a smaller batch")
    return _largest(fits, accountant, MOST_STEPS)


def calibrate_batch(
    records: int, sigma: float, steps: int, target: float, delta: float, accountant: Accountant = "pld", bands: int = 1
) -> int:
    """Largest whole expected batch whose re-accounted epsilon is at most `target`; at least 1, or an error."""
    require_target(target)

    def fits(batch: int, by: By) -> bool:
        sampling = make_sampling("poisson", records, batch, steps, bands)
        return _at_most([sampling.event(sigma, sampling.turns(steps))], target, delta, by)

    if not fits(1, accountant):
        raise AccountingError(f"even an expected batch of 1 passes epsilon = {target:g}; use more noise or fewer steps")
    return _largest(fits, accountant, records // bands)


def calibrate_slots(
    records: int, sigma: float, steps: int, target: float, delta: float, accountant: Accountant = "pld"
) -> int:
    """Fewest steps of an epoch of random allocation, which is the largest batch, whose re-accounted epsilon is at most
    `target`; or an error. An epoch must be one that `slots_for` cuts so many steps into."""
    require_target(target)
    if steps > MOST_SLOTS:
        raise AccountingError(f"a batch is looked for in up to {MOST_SLOTS:,} steps, not {steps:,}; give one instead")

    def fits(epochs: int, by: By) -> bool:
        slots = -(-steps // epochs)
        return _at_most([Event(1 / slots, sigma, -(-steps // slots), slots=slots)], target, delta, by)

    def cut_into(slots: int) -> bool:
        try:
            return slots_for(records, records / slots, steps) == slots
        except PlanError:
            return False

    if not fits(1, accountant):
        raise AccountingError(
            f"even one epoch of all {steps} steps passes epsilon = {target:g}; use more noise or more steps"
        )
    fewest = -(-steps // _largest(fits, accountant, steps))
    # Not every number of steps is one that a batch of whole records cuts epochs into.
    return next(slots for slots in range(fewest, steps + 1) if cut_into(slots))


def require_target(target: float) -> None:
    if not (math.isfinite(target) and target > 0):
        raise AccountingError(f"the target epsilon must be finite and positive, but is {target}")
    if target > MOST_EPSILON:
        raise AccountingError(
            f"epsilon = {target:g} promises nothing, so no noise is calibrated to it; give at most {MOST_EPSILON:g} "
            "(8 is usual), or train without privacy"
        )


def _spent(events: list[Event], delta: float, by: By) -> float:
    return quick_epsilon(events, delta) if by == "quick" else epsilon(events, delta, by)


def _at_most(events: list[Event], target: float, delta: float, by: By) -> bool:
    """If an accountant gives no answer, the events count as too expensive: the safe side of a search."""
    try:
        return within(_spent(events, delta, by), target)
    except AccountingError:
        return False


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
            spent = _spent([replace(self.event, sigma=self.sigma(ticks))], self.delta, by)
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


def _largest(fits: Callable[[int, By], bool], accountant: Accountant, most: int) -> int:
    """Largest number in [1, most] that fits, given that 1 does; a quick upper bound narrows the search for PLD."""
    known = 1
    searches: tuple[By, ...] = ("quick", "pld") if accountant == "pld" else (accountant,)
    # The quick bound is never below the true one, so what fits by it fits: the dear search starts where it ends.
    for by in searches:
        stride = known if by == "quick" else max(1, known >> 12)
        low, high = known, min(most, known + stride)
        while high > low and fits(high, by):
            stride *= 2
            low, high = high, min(most, high + stride)
        known = halve(lambda value, by=by: fits(value, by), low, high)
        if not fits(known, accountant):  # the accountant gave no answer where the quick bound did
            known = 1
    return known
