"""From a target epsilon to the noise or the number of steps, always rounded to the safe side and accounted again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from accounting.accountant import Accountant, AccountingError, Event, epsilon

DIGITS = 5


def calibrate_sigma(rate: float, steps: int, target: float, delta: float, accountant: Accountant = "pld") -> float:
    """Smallest noise multiplier with 5 decimals whose re-accounted epsilon is at most `target`."""
    if not (math.isfinite(target) and target > 0):
        raise AccountingError(f"the target epsilon must be finite and positive, but is {target}")

    def sigma_at(ticks: int) -> float:
        return round(ticks * 10.0**-DIGITS, DIGITS)

    def excess(ticks: int, by: Accountant = accountant) -> float:
        """Log ratio to the target: nearly linear in log sigma, so that interpolation lands close."""
        try:
            spent = epsilon([Event(rate, sigma_at(ticks), steps)], delta, by)
        except AccountingError:
            # Far too little noise is where accountants stop converging: that is over the budget.
            if ticks > 50 * 10**DIGITS:
                raise
            return math.inf
        return math.log(max(spent, 1e-12) / target)

    # RDP is quick and pessimistic: its crossing is a close upper bracket for PLD as well.
    low, high = 1, 10**DIGITS
    while excess(high, "rdp") > 0:
        low, high = high, high * 2
        if high > 10 ** (DIGITS + 5):
            raise AccountingError(f"no noise multiplier up to 1e5 reaches epsilon = {target} at delta = {delta}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if excess(middle, "rdp") > 0 else (low, middle)
    if accountant == "rdp":
        return sigma_at(high)

    while (above := excess(high)) > 0:
        high *= 2
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


def affordable_steps(
    charged: Sequence[Event], rate: float, sigma: float, wanted: int, budget: float, delta: float,
    accountant: Accountant = "pld",
) -> int:  # fmt: skip
    """How many of `wanted` further steps fit the budget after `charged`."""

    def fits(count: int) -> bool:
        return epsilon([*charged, Event(rate, sigma, count)], delta, accountant) <= budget

    if wanted <= 0 or not fits(1):
        return 0
    if fits(wanted):
        return wanted
    low, high = 1, wanted
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
