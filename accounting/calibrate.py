"""From a target epsilon to the noise, the steps or the batch: rounded to the safe side and accounted again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from accounting.accountant import Accountant, AccountingError, Event, epsilon
from accounting.plan import RATE_DENOMINATOR, threshold_for

DIGITS = 5
# Processors round differently: what is calibrated on one keeps its budget on all others.
MARGIN = 1e-8
MOST_STEPS = 10**9


@lru_cache(maxsize=256)
def calibrate_sigma(
    rate: float, steps: int, target: float, delta: float, accountant: Accountant = "pld", digits: int = DIGITS
) -> float:
    """Smallest noise multiplier with so many decimals whose re-accounted epsilon is at most `target`."""
    _require_target(target)

    def sigma_at(ticks: int) -> float:
        return round(ticks * 10.0**-digits, digits)

    def excess(ticks: int, by: Accountant = accountant) -> float:
        """Log ratio to the target: nearly linear in log sigma, so that interpolation lands close."""
        try:
            spent = epsilon([Event(rate, sigma_at(ticks), steps)], delta, by)
        except AccountingError:
            # Far too little noise is where accountants stop converging: that is over the budget.
            if ticks > 50 * 10**digits:
                raise
            return math.inf
        ratio = math.log(max(spent, 1e-12) / target)
        # The logarithm may round an excess away; the comparison itself decides.
        return min(ratio, 0.0) if _within(spent, target) else max(ratio, 1e-300)

    # RDP is quick and pessimistic: its crossing is a close upper bracket for PLD as well.
    try:
        high = _first_tick(lambda ticks: excess(ticks, "rdp") <= 0, target, digits)
    except AccountingError:
        if accountant == "rdp":
            raise
        high = 10**digits  # RDP has no answer there (a tiny epsilon): PLD searches alone
    if accountant == "rdp":
        return sigma_at(high)

    while (above := excess(high)) > 0:
        high *= 2
        if high > 10 ** (digits + 5):
            raise AccountingError(f"no noise multiplier up to 1e5 reaches epsilon = {target}; allow a larger epsilon")
    low = max(1, int(high * 0.85))
    while (below := excess(low)) <= 0:
        high, above, low = low, below, max(1, int(low * 0.7))
        if low == high:
            return sigma_at(high)
    pulled_low = pulled_high = 0
    while high - low > 1:
        if math.isfinite(below) and max(pulled_low, pulled_high) < 3:
            guess = low + round((high - low) * below / (below - above))
            middle = min(high - 1, max(low + 1, guess))
        else:  # interpolation keeps landing on one side: halve instead
            middle, pulled_low, pulled_high = (low + high) // 2, 0, 0
        if (value := excess(middle)) > 0:
            low, below, pulled_low, pulled_high = middle, value, pulled_low + 1, 0
        else:
            high, above, pulled_low, pulled_high = middle, value, 0, pulled_high + 1
    return sigma_at(high)


def calibrate_steps(rate: float, sigma: float, target: float, delta: float, accountant: Accountant = "pld") -> int:
    """Most steps whose re-accounted epsilon is at most `target`; at least 1, or an error."""
    _require_target(target)

    def fits(count: int, by: Accountant) -> bool:
        return _at_most([Event(rate, sigma, count)], target, delta, by)

    if not fits(1, accountant):
        raise AccountingError(f"a single step passes epsilon = {target:g}; use more noise or a smaller batch")
    return _largest(fits, accountant, MOST_STEPS)


def calibrate_batch(
    records: int, sigma: float, steps: int, target: float, delta: float, accountant: Accountant = "pld"
) -> int:
    """Largest whole expected batch whose re-accounted epsilon is at most `target`; at least 1, or an error."""
    _require_target(target)

    def fits(batch: int, by: Accountant) -> bool:
        rate = threshold_for(records, batch) / RATE_DENOMINATOR
        return _at_most([Event(rate, sigma, steps)], target, delta, by)

    if not fits(1, accountant):
        raise AccountingError(f"even an expected batch of 1 passes epsilon = {target:g}; use more noise or fewer steps")
    return _largest(fits, accountant, records)


def affordable_steps(
    charged: Sequence[Event], rate: float, sigma: float, wanted: int, budget: float, delta: float,
    accountant: Accountant = "pld",
) -> int:  # fmt: skip
    """How many of `wanted` further steps fit the budget after `charged`."""

    def fits(count: int) -> bool:
        return _within(epsilon([*charged, Event(rate, sigma, count)], delta, accountant), budget)

    if wanted <= 0 or not fits(1):
        return 0
    if fits(wanted):
        return wanted
    return _halve(fits, 1, wanted)


def _require_target(target: float) -> None:
    if not (math.isfinite(target) and target > 0):
        raise AccountingError(f"the target epsilon must be finite and positive, but is {target}")


def _within(spent: float, target: float) -> bool:
    return spent <= target * (1 - MARGIN)


def _at_most(events: list[Event], target: float, delta: float, by: Accountant) -> bool:
    """Where an accountant does not answer, the events count as too expensive: the safe side of a search."""
    try:
        return _within(epsilon(events, delta, by), target)
    except AccountingError:
        return False


def _first_tick(fits: Callable[[int], bool], target: float, digits: int) -> int:
    low, high = 1, 10**digits
    while not fits(high):
        low, high = high, high * 2
        if high > 10 ** (digits + 5):
            raise AccountingError(f"no noise multiplier up to 1e5 reaches epsilon = {target}; allow a larger epsilon")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _largest(fits: Callable[[int, Accountant], bool], accountant: Accountant, most: int) -> int:
    """Largest number in [1, most] that fits, 1 being known to; RDP, quick and pessimistic, brings the search close."""
    known = 1
    for by in ("rdp", accountant):
        low, high = known, min(most, max(2, known + known // 8))
        while high > low and fits(high, by):
            if high == most:
                return most if by == accountant else _largest_from(fits, accountant, most)
            low, high = high, min(most, high * 2 if by == "rdp" else high + max(1, high // 8))
        known = _halve(lambda value, by=by: fits(value, by), low, high)
        if not fits(known, accountant):
            known = 1
    return known


def _largest_from(fits: Callable[[int, Accountant], bool], accountant: Accountant, most: int) -> int:
    return most if fits(most, accountant) else _halve(lambda value: fits(value, accountant), 1, most)


def _halve(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Largest number that fits between `low`, which does, and `high`, which does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
