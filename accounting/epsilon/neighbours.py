"""Epsilon for neighbours other than one record that is present or blank: a person's records, an exchanged record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from murmuration.accounting.epsilon.accountant import (
    MOST_WORK,
    epsilon,
    interval_for,
    larger_epsilon,
    merge,
    plain_sigma,
)
from murmuration.accounting.epsilon.composition import Composition
from murmuration.accounting.epsilon.gaussian import gaussian_epsilon
from murmuration.accounting.epsilon.other_pairs import Group, Pair, Replacement, cells, dominating
from murmuration.accounting.epsilon.trade_off import TradeOff, of_events, up_to
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event


def group_epsilon(events: Sequence[Event], delta: float, records: int) -> float:
    """Epsilon at the same `delta` for a person with `records` records, all of them present or all of them blank.

    Composed like the epsilon of one record, but from the pair of a group. It is more than `records` times the epsilon
    of one record wherever that is limited by the noise, and less where it is limited by the sampling.
    """
    return epsilon(events, delta) if _one(records) else _composed(events, delta, *_group(records))[0]


def group_curve(events: Sequence[Event], delta: float, records: int) -> TradeOff:
    """What tests find out about all the records of such a person together."""
    return of_events(events, delta) if _one(records) else _curve(events, delta, *_group(records))


def replacement_epsilon(events: Sequence[Event], delta: float) -> float:
    """Epsilon at `delta` if one record is exchanged for another, or gets another label."""
    return _composed(events, delta, 2, _exchanged)[0]


def replacement_curve(events: Sequence[Event], delta: float) -> TradeOff:
    return _curve(events, delta, 2, _exchanged)


def _one(records: int) -> bool:
    if records < 1:
        raise AccountingError(f"a person has at least 1 record, not {records}")
    return records == 1


def _group(records: int) -> tuple[int, Callable[[Event], Pair]]:
    return records, lambda event: Group(event.rate, event.sigma, records)


def _exchanged(event: Event) -> Pair:
    return Replacement(event.rate, event.sigma)


def _curve(events: Sequence[Event], delta: float, moved: int, pair_of: Callable[[Event], Pair]) -> TradeOff:
    highest, both = _composed(events, delta, moved, pair_of)
    if both is None:
        sigma = plain_sigma(merged) if (merged := merge(events)) else None
        return of_events([] if sigma is None else [Event(1.0, sigma / moved, 1)], delta)
    return up_to(highest, delta, lambda asked: [max(p) for p in zip(*(s.deltas(asked) for s in both), strict=True)])


def _composed(
    events: Sequence[Event], delta: float, moved: int, pair_of: Callable[[Event], Pair]
) -> tuple[float, tuple[Composition, Composition] | None]:
    """Epsilon and the losses in both directions; None for the losses where there is a closed form. `moved`: how many
    clipping norms apart the two neighbours lie in a step in which all their records take part."""
    if not 0 < delta < 1:
        raise AccountingError(f"delta must lie in (0, 1), but is {delta}")
    merged = merge(events)
    if not merged:
        return 0.0, None
    if any(event.cap is not None for event in merged):
        raise AccountingError("for capped batches nothing is known but the epsilon of one record")
    if (sigma := plain_sigma(merged)) is not None:
        return gaussian_epsilon(sigma / moved, delta), None
    if any(event.slots > 1 for event in merged):
        raise AccountingError("with random allocation nothing is proved for several or for exchanged records")
    pairs, counts = [pair_of(event) for event in merged], tuple(event.count for event in merged)
    # Losses are larger by about that factor, so the interval may be, too.
    interval = interval_for(merged, delta) * 2 ** math.floor(math.log2(moved))
    while max(cells(pair, interval) for pair in pairs) > MOST_WORK:
        interval *= 2
    one, other = zip(*(dominating(pair, interval) for pair in pairs), strict=True)
    both = Composition(one, counts), Composition(other, counts)
    return larger_epsilon(both, delta), both
