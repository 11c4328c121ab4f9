"""Shares and means with their 95 % intervals, so that no number stands without its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """`value`, measured on `n` records; the true value lies between `low` and `high` with 95 % confidence."""

    value: float
    n: int
    low: float
    high: float


def share(right: int, n: int) -> Estimate:
    """The share of right answers, with Wilson's interval."""
    from scipy.stats import binomtest  # not above: scipy takes a second to import

    if not 0 <= right <= n or n < 1:
        raise ValueError(f"{right} right answers of {n}; at least one record must be scored")
    bounds = binomtest(right, n).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(right / n, n, float(bounds.low), float(bounds.high))


def mean(values: Sequence[float]) -> Estimate:
    """With Student's interval; a single value has none, and gets itself as both bounds."""
    from scipy.stats import t

    found = np.asarray(values, dtype=np.float64)
    if not len(found):
        raise ValueError("there is no value to take the mean of; at least one record must be measured")
    middle = float(found.mean())
    if len(found) == 1:
        return Estimate(middle, 1, middle, middle)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5)
    return Estimate(middle, len(found), middle - half, middle + half)


def mean_share(values: Sequence[float]) -> Estimate:
    """Of shares, areas or precisions, which lie between 0 and 1, and so does the interval."""
    found = mean(values)
    return Estimate(found.value, found.n, max(found.low, 0.0), min(found.high, 1.0))


def bootstrap(values: np.ndarray, drawn: Callable[[np.ndarray], np.ndarray], n: int, draws: int) -> list[Estimate]:
    """For what is no mean over records. `values` were measured on all `n`; `drawn` measures as many, drawn with
    replacement, by their places. The interval holds the middle 95 % of `draws` such measurements, by a fixed seed."""
    generator = np.random.default_rng(0)
    found = np.stack([drawn(generator.integers(0, n, n)) for _ in range(draws)])
    tail = 50 * (1 - CONFIDENCE)
    return [
        Estimate(float(value), n, *(float(bound) for bound in np.nanpercentile(column, [tail, 100 - tail])))
        for value, column in zip(values, found.T, strict=True)
    ]


def spread(values: Sequence[float]) -> float:
    """The standard deviation of single values, from their sample; 0 for one value, of which it cannot be told."""
    return float(np.std(np.asarray(values, dtype=np.float64), ddof=1)) if len(values) > 1 else 0.0
