"""Finds the most steps, or the largest batch, that a target epsilon affords: accounted again, like calibrated noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from murmuration.accounting.epsilon.accountant import Accountant, halve, within
from murmuration.accounting.epsilon.calibrate import MOST_STEPS, By, require_target, spent_by
from murmuration.accounting.errors import AccountingError, PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.sampling import MOST_SLOTS, make_sampling, slots_for


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


def _at_most(events: list[Event], target: float, delta: float, by: By) -> bool:
    """If an accountant gives no answer, the events count as too expensive: the safe side of a search."""
    try:
        return within(spent_by(events, delta, by), target)
    except AccountingError:
        return False


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
