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
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event


def group_epsilon(events: Sequence[Event], delta: float, records: int) -> float:
    """Epsilon at the same `delta` for a person with `records` records, all of them present or all of them blank.

    Composed like the epsilon of one record, but from the pair of a group. It is more than `records` times the epsilon
    of one record wherever that is limited by the noise, and less where it is limited by the sampling.
    """
    if records < 1:
        raise AccountingError(f"a person has at least 1 record, not {records}")
    if records == 1:
        return epsilon(events, delta)
    return _other_epsilon(events, delta, records, lambda event: Group(event.rate, event.sigma, records))


def replacement_epsilon(events: Sequence[Event], delta: float) -> float:
    """Epsilon at `delta` if one record is exchanged for another, or gets another label."""
    return _other_epsilon(events, delta, 2, lambda event: Replacement(event.rate, event.sigma))


def _other_epsilon(events: Sequence[Event], delta: float, moved: int, pair_of: Callable[[Event], Pair]) -> float:
    """`moved`: how many clipping norms apart the two neighbours lie in a step in which all their records take part."""
    if not 0 < delta < 1:
        raise AccountingError(f"delta must lie in (0, 1), but is {delta}")
    merged = merge(events)
    if not merged:
        return 0.0
    if any(event.cap is not None for event in merged):
        raise AccountingError("for capped batches nothing is known but the epsilon of one record")
    if (sigma := plain_sigma(merged)) is not None:
        return gaussian_epsilon(sigma / moved, delta)
    if any(event.slots > 1 for event in merged):
        raise AccountingError("with random allocation nothing is proved for several or for exchanged records")
    pairs, counts = [pair_of(event) for event in merged], tuple(event.count for event in merged)
    # Losses are larger by about that factor, so the interval may be, too.
    interval = interval_for(merged, delta) * 2 ** math.floor(math.log2(moved))
    while max(cells(pair, interval) for pair in pairs) > MOST_WORK:
        interval *= 2
    lattices = [dominating(pair, interval) for pair in pairs]
    both = (Composition(tuple(side), counts) for side in zip(*lattices, strict=True))
    return larger_epsilon(both, delta)
