"""Faults that a canary's coordinate does not show, each with a test that tells it from an honest run.

Shuffled batches under a Poisson claim: sizes do not vary, every record comes once per epoch, and successive batches
share no record. A divisor that leaks: noise divided by the realised batch size has a different scale in every step,
and with many elements that scale can be read off to a fraction of a per cent. A record that is allocated to two steps
of an epoch, or to none: the auditor, who has the keys, counts. A draw of noise that two steps share, in one segment or
in two: what the canaries' coordinates show of the two, less what the canaries added, is correlated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.stats import chi2, norm, t

# Below this p-value the honest explanation is rejected. An honest run is wrongly accused once in a million.
ACCUSED = 1e-6


@dataclass(frozen=True)
class Check:
    """Two-sided p-values of the honest explanation, by statistic."""

    p_values: dict[str, float]

    @property
    def p_value(self) -> float:
        """The p-value of all statistics together (Bonferroni)."""
        return min(1.0, min(self.p_values.values()) * len(self.p_values))

    @property
    def passed(self) -> bool:
        return self.p_value >= ACCUSED


def check_sampling(draws: Sequence[np.ndarray], records: int, rate: float) -> Check:
    """Whether these batches (record ids each, of successive steps) are independent draws at `rate`.

    Compared with Poisson sampling: how much sizes vary, how much the records' participations vary, how many records
    two successive batches share, and the total. With rate 1 every draw must contain every record.
    """
    steps = len(draws)
    if steps < 2:
        raise ValueError(f"{steps} draws tell nothing about sampling; give at least 2")
    if any(len(np.unique(ids)) != len(ids) for ids in draws):
        return Check({"a record twice in a step": 0.0})
    if rate == 1:
        return Check({"everybody": 1.0 if all(len(ids) == records for ids in draws) else 0.0})
    variance = rate * (1 - rate)
    sizes = np.array([len(ids) for ids in draws], dtype=float)
    counts = np.zeros(records)
    for ids in draws:
        counts[ids] += 1
    shared = sum(len(np.intersect1d(a, b)) for a, b in pairwise(draws))
    pairs = (steps - 1) * records
    # Successive pairs have a step in common: their covariance is rate³ - rate⁴ for each of the steps - 2 middles.
    spread = pairs * rate**2 * (1 - rate**2) + 2 * (steps - 2) * records * (rate**3 - rate**4)
    return Check(
        {
            "sizes": _dispersion(np.square(sizes - records * rate) / (records * variance), rate, records),
            "participation": _dispersion(np.square(counts - steps * rate) / (steps * variance), rate, steps),
            "overlap": _normal((shared - pairs * rate**2) / math.sqrt(spread)),
            "total": _normal((sizes.sum() - steps * records * rate) / math.sqrt(steps * records * variance)),
        }
    )


def check_allocation(draws: Sequence[np.ndarray], records: int, slots: int) -> Check:
    """Whether these batches, those of whole successive epochs of `slots` steps each, take every record once per epoch,
    at a step that is uniform and independent of the epoch before."""
    if len(draws) % slots or len(draws) < 2 * slots:
        raise ValueError(f"{len(draws)} draws are not those of two or more epochs of {slots} steps")
    at = np.full((len(draws) // slots, records), -1)
    for place, ids in enumerate(draws):
        at[place // slots, ids] = place % slots
    if sum(len(ids) for ids in draws) != at.size or (at < 0).any():
        return Check({"a record not exactly once in an epoch": 0.0})
    moves = np.concatenate([(after - before) % slots for before, after in pairwise(at)])
    return Check({"sizes": _uniform(at, slots), "steps from epoch to epoch": _uniform(moves[None], slots)})


EXPECTED = 20
"""Numbers in a cell, by expectation: with fewer, far tails of the chi-square distribution promise too little."""


def _uniform(rows: np.ndarray, slots: int) -> float:
    """Whether each row's numbers below `slots` are uniform; neighbouring ones are counted together if they are rare."""
    many = rows.shape[1]
    cells = min(slots, many // EXPECTED)
    if cells < 2:
        return 1.0
    begins = np.array([part[0] for part in np.array_split(np.arange(slots), cells)])
    expected = many / slots * np.diff(np.append(begins, slots))
    counts = np.array([np.add.reduceat(np.bincount(row, minlength=slots), begins) for row in rows])
    return _chi_square(float((np.square(counts - expected) / expected).sum()), len(rows) * (cells - 1))


def check_noise(drawn: np.ndarray) -> Check:
    """Whether the draws of all steps, [steps, places], are independent of each other: the p-value of the largest
    correlation of two steps, which under normal noise has Student's distribution, times the number of pairs."""
    steps, places = drawn.shape
    if steps < 2 or places < 4:
        return Check({"shared draws": 1.0})
    found = np.abs(np.corrcoef(drawn)[np.triu_indices(steps, 1)]).max()
    ratio = found * math.sqrt((places - 2) / max(1 - found**2, 1e-300))
    return Check({"shared draws": min(1.0, 2 * float(t.sf(ratio, places - 2)) * steps * (steps - 1) / 2)})


def check_divisor(squares: np.ndarray, elements: np.ndarray, std: float, divisor: float, sizes: np.ndarray) -> Check:
    """Whether steps that released noise alone were all divided by `divisor`, whatever their realised sizes were.

    `squares` and `elements`: per step, the sum of the squared released values and how many there were.
    """
    scaled = squares * (divisor / std) ** 2
    found = {"scale": _chi_square(float(scaled.sum()), float(elements.sum()))}
    # ln of a mean of n squares has a deviation of sqrt(2/n). Against a realised size it would have slope -2.
    noise = np.log(scaled / elements) * np.sqrt(elements / 2)
    known = (np.log(np.maximum(sizes, 1)) - np.log(np.maximum(sizes, 1)).mean()) * np.sqrt(elements / 2)
    if float(np.square(known).sum()) > 0:
        found["follows the batch size"] = _normal(float(noise @ known) / math.sqrt(float(np.square(known).sum())))
    return Check(found)


def _dispersion(squares: np.ndarray, rate: float, trials: int) -> float:
    """The p-value of a sum of squared standardised binomials: chi-square, its variance corrected for their fourth
    moment."""
    variance = 2 + (1 - 6 * rate * (1 - rate)) / (trials * rate * (1 - rate))
    # A scaled chi-square with the right mean and variance; the tail on the left is what shuffling shows.
    scale = variance / 2
    return _chi_square(float(squares.sum()) / scale, len(squares) / scale)


def _chi_square(value: float, freedom: float) -> float:
    return min(1.0, 2 * min(float(chi2.cdf(value, freedom)), float(chi2.sf(value, freedom))))


def _normal(z: float) -> float:
    return 2 * float(norm.sf(abs(z)))
