"""Bounds, on a lattice, of the privacy loss of one epoch in which each record takes part in exactly one of t steps.

The step is chosen uniformly and in secret. All t outputs together are dominated by P, the mean of the t distributions
that have N(1, σ²) at one place and N(0, σ²) at all others, against Q, which has N(0, σ²) everywhere. So dP/dQ is the
mean of t numbers that are independent under Q, the likelihood ratios of single Gaussian steps (Feldman and Shenfeld,
arXiv 2502.08202). `docs/proof.md` has the proof, also for steps that depend on earlier outputs.

The distribution of this mean under Q is all that is needed: under P each mass is that of Q times its value. It is built
by halving: the mean over m steps is the weighted mean of those over two parts of them. On a lattice of logarithms the
mean of two values lies off the lattice, always at the same distance for the same distance of the two, so that whole
rows of pairs are added at once. From above, the mass of a pair moves to the two points beside it such that it keeps its
measure under P and under Q ("connect the dots"): the result dominates, in both directions. From below, all pairs about
one point are merged into one outcome, which is post-processing. All terms are positive, so masses have small *relative*
errors, as those of `loss_lattice` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from murmuration.accounting.epsilon.loss_lattice import (
    REACH,
    UNIT,
    Array,
    LossLattice,
    gaussian_cells,
    gaussian_dots,
    rounded_down,
)
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.sampling import MOST_SLOTS, RATE_DENOMINATOR

CUT = 1e-34
"""Probability that the rarest ratios of a part, at either end, may have together; it counts as an infinite loss."""
BLUR = 5e-5
"""By which share the last lattice may increase the variance of the mean. A lattice four times as fine gives an epsilon
that is lower by a 4,000th at most, for plans of usual size."""
WIDEST = 0.02
"""The widest interval for which such a lattice is chosen."""
SEARCHED, COARSER = 1e-4, 16
"""Beyond this interval, which only searches ask for, a lattice may blur so many times as much."""
MOST_WORK = 2.0**31
"""Pairs of points at the last halving, a few seconds. Beyond that the lattice is coarser, and the bound less tight."""
TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class _Mean:
    """The mean likelihood ratio over some steps: `masses` under Q and `measure` under P, for ratios about
    exp(interval·(first + i)). From above, each ratio is exactly that, and `lost_p` and `lost_q` bound what is missing
    of the measures. From below, it is measure / mass."""

    first: int
    masses: Array
    measure: Array
    lost_p: float = 0.0
    lost_q: float = 0.0


def allocated(steps: int, sigma: float, interval: float) -> tuple[LossLattice, LossLattice]:
    """Pairs that dominate the epoch: with the record against without it, and without it against with it."""
    grid = _grid(steps, sigma, interval)
    mean, (error, slack) = _dominating(steps, sigma, grid), _errors(steps, sigma, grid)
    width = round(grid / interval)
    last = mean.first + len(mean.masses) - 1
    return (
        LossLattice(
            interval, mean.first * width, _spaced(mean.measure, width), infinite=mean.lost_p, error=error, slack=slack
        ),
        LossLattice(
            interval, -last * width, _spaced(mean.masses[::-1], width), infinite=mean.lost_q, error=error, slack=slack
        ),
    )


def allocated_below(steps: int, sigma: float, interval: float) -> LossLattice:
    """A pair that the epoch dominates: with the record against without it."""
    grid = _grid(steps, sigma, interval)
    mean, (error, slack) = _dominated(steps, sigma, grid), _errors(steps, sigma, grid)
    kept = (mean.masses > 0) & (mean.measure > 0)
    losses = np.log(mean.measure[kept] / mean.masses[kept])
    return rounded_down(mean.measure[kept], losses, interval, error, slack + 4 * error)


def _grid(steps: int, sigma: float, interval: float) -> float:
    """The lattice of the last mean: `interval`, or that doubled as often as BLUR allows and MOST_WORK asks for."""
    if not 2 <= steps <= MOST_SLOTS:
        raise AccountingError(f"an epoch of random allocation has 2 to {MOST_SLOTS:,} steps, not {steps}")
    # Variance of the mean ratio, and of what the lattices of all halvings add to it.
    variance = math.expm1(min(700.0, sigma**-2)) / steps
    blur = BLUR if interval <= SEARCHED else COARSER * BLUR
    wanted = max(interval, min(WIDEST, math.sqrt(3 * blur * variance)))
    doubled = math.floor(math.log2(wanted / interval))
    while (grid := interval * 2.0**doubled) < 4 * WIDEST:
        points = (2 * REACH / sigma + sigma**-2) / grid
        if points * min(points, -math.log(grid) / grid) <= MOST_WORK:
            break
        doubled += 1
    return grid


def _spaced(masses: Array, width: int) -> Array:
    """The same masses on a lattice that is finer by a whole number."""
    found = np.zeros((len(masses) - 1) * width + 1)
    found[::width] = masses
    return found


@lru_cache(maxsize=8)
def _dominating(steps: int, sigma: float, grid: float) -> _Mean:
    def single(interval: float) -> _Mean:
        dots = gaussian_dots(sigma, interval)
        return _Mean(dots.first, dots.masses, dots.measure, dots.lost_p, dots.lost_q)

    return _halved(steps, grid, single, _connected)


@lru_cache(maxsize=4)
def _dominated(steps: int, sigma: float, grid: float) -> _Mean:
    return _halved(steps, grid, lambda interval: _Mean(*gaussian_cells(sigma, interval)), _merged)


def _errors(steps: int, sigma: float, grid: float) -> tuple[float, float]:
    """The relative error of the masses of the whole, and how far its losses may be off.

    A mass is a sum of products of one mass of each step. In each halving a point gets at most two terms for each
    distance of two points, in both orders, and two sums over far ones. Losses are rounded in each halving. They also
    move because a record's step follows from a whole number below 2^32 (`data/draw/samplers.py`), so that its t steps
    are equally likely only up to a relative t / 2^32.
    """
    dots = gaussian_dots(sigma, grid)
    terms = 6 * len(dots.masses) + 64
    halvings = (steps - 1).bit_length()
    largest = grid * max(abs(dots.first), abs(dots.first + len(dots.masses)))
    slack = dots.slack + 256 * UNIT * halvings - math.log1p(-steps / RATE_DENOMINATOR)
    return steps * (dots.error + UNIT * terms) + UNIT * (16 + 2 * largest) + slack, slack


Combine = Callable[["_Mean", "_Mean", float, float, int], "_Mean"]
"""The weighted mean of two means, the first of which has the given share, on a lattice that is finer by a factor than
theirs, whose interval is given."""


def _halved(steps: int, grid: float, single: Callable[[float], _Mean], combine: Combine) -> _Mean:
    """The mean over all steps. What a lattice adds to the variance of a part is averaged away later, so the intervals
    double at every second halving, from the whole down."""
    known: dict[tuple[int, int], _Mean] = {}

    def mean(size: int, depth: int) -> _Mean:
        if (size, depth) not in known:
            interval = grid * 2.0 ** (depth // 2)
            if size == 1:
                known[size, depth] = single(interval)
            else:
                one, finer = size // 2, 1 + depth % 2
                parts = mean(one, depth + 1), mean(size - one, depth + 1)
                known[size, depth] = combine(*parts, one / size, interval * finer, finer)
        return known[size, depth]

    return mean(steps, 0)


@dataclass(frozen=True)
class _Rows:
    """How the mean share·x + (1 - share)·y of two ratios lies on the finer lattice, with x at one of its points and y
    lower by d = 0, 1, … intervals: relative to x, the point below the mean, and its place between that and the next (0
    to 1). From `far` on the point below is always the same, for y hardly matters."""

    below: list[int]
    place: list[float]
    far: int

    @staticmethod
    def of(share: float, interval: float, finer: int, points: int) -> _Rows:
        fine = interval / finer
        means = np.log1p((1 - share) * np.expm1(-interval * np.arange(points))) / fine
        below = np.floor(means).astype(np.int64)
        lowest = below == math.floor(math.log(share) / fine)
        far = int(np.argmax(lowest)) if lowest.any() else points
        place = np.clip(np.expm1((means - below) * fine) / math.expm1(fine), 0.0, 1.0)
        return _Rows(below[: far + 1].tolist(), place[: far + 1].tolist(), far)


def _overlap(big: _Mean, small: _Mean, distance: int) -> tuple[slice, slice, int]:
    """Where both have points so far apart: the parts of the two, and the first point of the bigger one."""
    low = max(big.first, small.first + distance)
    stop = max(low, min(big.first + len(big.masses), small.first + len(small.masses) + distance))
    return (
        slice(low - big.first, stop - big.first),
        slice(low - distance - small.first, stop - distance - small.first),
        low,
    )


def _far(big: _Mean, small: _Mean, distance: int) -> tuple[int, Array]:
    """The first point of the bigger one that has points at least so far below, and the nearest of those for it and all
    after it."""
    start = max(0, small.first + distance - big.first)
    nearest = np.arange(start, len(big.masses)) + big.first - distance - small.first
    return start, np.minimum(nearest, len(small.masses) - 1)


def _orders(one: _Mean, two: _Mean, share: float) -> list[tuple[_Mean, _Mean, float, int]]:
    """Which part is the bigger one of a pair and which the smaller, the share of the bigger one, and how far they are
    apart at least. Pairs of a part with itself are the same in both orders."""
    if one is two and share == 0.5:
        return [(one, two, share, 0)]
    return [(one, two, share, 0), (two, one, 1 - share, 1)]


def _frame(one: _Mean, two: _Mean, finer: int) -> tuple[int, int]:
    """First point and number of points of a lattice with room for all means."""
    first = finer * min(one.first, two.first) - 1
    return first, finer * max(one.first + len(one.masses), two.first + len(two.masses)) + 2 - first


@dataclass(frozen=True)
class _Points:
    """Masses on a lattice, between whose points others lie; numbers of points count from `first`."""

    first: int
    masses: Array
    finer: int

    def add(self, low: int, below: int, mass: Array, place: Array | float) -> None:
        """Masses that lie, relative to every `finer`-th point from finer·low on, above the point `below`, with their
        places between that and the next."""
        at = self.finer * low + below - self.first
        stop = at + self.finer * (len(mass) - 1) + 1
        risen = mass * place
        self.masses[at : stop : self.finer] += np.maximum(mass - risen, 0.0)
        self.masses[at + 1 : stop + 1 : self.finer] += risen


def _connected(one: _Mean, two: _Mean, share: float, interval: float, finer: int) -> _Mean:
    """From above: each pair's mass goes to the two points beside its mean, keeping its measure under P and under Q."""
    first, points = _frame(one, two, finer)
    found = _Points(first, np.zeros(points), finer)
    for big, small, part, start in _orders(one, two, share):
        rows = _Rows.of(part, interval, finer, points)
        for distance in range(start, rows.far):
            here, there, low = _overlap(big, small, distance)
            if here.stop > here.start:
                mass = big.masses[here] * small.masses[there]
                found.add(
                    low, rows.below[distance], 2 * mass if one is two and distance else mass, rows.place[distance]
                )
        start, nearest = _far(big, small, rows.far)
        if len(nearest):
            place, mass = _far_places(big, small, part, interval, finer, start, nearest)
            point = math.floor(math.log(part) * finer / interval)
            found.add(big.first + start, point, 2 * mass if one is two else mass, place)
    lost_p = share * (one.lost_p + two.lost_q) + (1 - share) * (one.lost_q + two.lost_p)
    return _cut(found, interval / finer, lost_p, one.lost_q + two.lost_q)


def _far_places(
    big: _Mean, small: _Mean, part: float, interval: float, finer: int, start: int, nearest: Array
) -> tuple[Array, Array]:
    """The mean places of all pairs whose smaller ratio is far below, by the bigger one, and their masses. Between two
    points the place is linear in the smaller ratio, so that sums over all of these are enough."""
    fine = interval / finer
    lower = math.exp(math.floor(math.log(part) / fine) * fine)
    mass, measure = np.cumsum(small.masses)[nearest], np.cumsum(small.measure)[nearest]
    ratios = np.exp(interval * np.arange(big.first + start, big.first + len(big.masses)))
    place = (part - lower + (1 - part) * measure / np.maximum(mass * ratios, TINY)) / (lower * math.expm1(fine))
    return np.clip(place, 0.0, 1.0), big.masses[start:] * mass


def _cut(found: _Points, interval: float, lost_p: float, lost_q: float) -> _Mean:
    """Without the rarest ratios at either end."""
    masses, points = found.masses, len(found.masses)
    measure = masses * np.exp(interval * np.arange(found.first, found.first + points))
    low = int(np.searchsorted(np.cumsum(masses), CUT))
    high = points - int(np.searchsorted(np.cumsum(measure[::-1]), CUT))
    lost_p += float(measure[:low].sum() + measure[high:].sum())
    lost_q += float(masses[:low].sum() + masses[high:].sum())
    return _Mean(found.first + low, masses[low:high], measure[low:high], lost_p, lost_q)


def _merged(one: _Mean, two: _Mean, share: float, interval: float, finer: int) -> _Mean:
    """From below: pairs whose means lie about one point become one outcome."""
    first, points = _frame(one, two, finer)
    found, under_p = np.zeros(points), np.zeros(points)

    def add(low: int, near: int, mass: Array, measure: Array) -> None:
        at = finer * low + near - first
        stop = at + finer * (len(mass) - 1) + 1
        found[at:stop:finer] += mass
        under_p[at:stop:finer] += measure

    for big, small, part, start in _orders(one, two, share):
        rows = _Rows.of(part, interval, finer, points)
        for distance in range(start, rows.far):
            here, there, low = _overlap(big, small, distance)
            if here.stop > here.start:
                twice = 2 if one is two and distance else 1
                mass, other = big.masses[here], small.masses[there]
                measure = part * big.measure[here] * other + (1 - part) * mass * small.measure[there]
                near = rows.below[distance] + round(rows.place[distance])
                add(low, near, twice * mass * other, twice * measure)
        start, nearest = _far(big, small, rows.far)
        if len(nearest):
            twice = 2 if one is two else 1
            mass, other = big.masses[start:], np.cumsum(small.masses)[nearest]
            measure = part * big.measure[start:] * other + (1 - part) * mass * np.cumsum(small.measure)[nearest]
            add(big.first + start, round(math.log(part) * finer / interval), twice * mass * other, twice * measure)
    # The rarest outcomes at either end become one with the next.
    low = int(np.searchsorted(np.cumsum(found), CUT))
    high = points - int(np.searchsorted(np.cumsum(under_p[::-1]), CUT))
    for kept in (found, under_p):
        kept[low] += kept[:low].sum()
        kept[high - 1] += kept[high:].sum()
    return _Mean(first + low, found[low:high], under_p[low:high])
