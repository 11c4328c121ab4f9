"""Upper and lower bounds, on a lattice, of the privacy loss of one Poisson-subsampled Gaussian step.

A record takes part with probability q. The two neighbours' outputs are P = (1 - q)·N(0, σ²) + q·N(1, σ²) and
Q = N(0, σ²); the loss L = log(dP/dQ) grows with the output. Each mass is an integral of positive terms
(Gauss-Legendre within each cell of the lattice) and so has a *relative* error of about 1e-13, however small it is;
T steps then have a relative error of T times that. The usual way, differences of distribution functions, has an
absolute error, which T steps can add up to more than a small delta.

From above: the mass between two lattice points moves to these two points such that its measure under P and under Q
stays the same ("connect the dots", Doroshenko et al. 2022). The resulting pair dominates the step in both directions.
From below: the mass of each cell is merged into one outcome, which is post-processing of the step's output, and the
loss of that outcome is rounded down to the lattice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from murmuration.accounting.errors import AccountingError

Array = NDArray[Any]

UNIT = 2.0**-53
# How many standard deviations are covered: the normal tail beyond is below 1e-38.
REACH = 13.0
NODES, WEIGHTS = (0.5 * part for part in np.polynomial.legendre.leggauss(5))
NODES = NODES + 0.5
# Five nodes integrate a panel to a relative 1e-16 if it is at most this wide, both in units of 1 / (1 + |z|) and of
# the log likelihood ratio (the error term of Gauss-Legendre, with Hermite polynomials as the derivatives).
WIDEST = 0.25
MOST_CELLS = 2**24
# How many cells on either side of the fullest one get walls of their own.
NEAR = 1000
RELAXING = 150
# `dots`: how many of them to a change of the output by its noise, or of the log likelihood ratio by 1. They add at most
# a share of 1 / (4·64²) to the variance of a loss.
FINENESS = 64
MOST_ATOMS = 2**16


@dataclass(frozen=True)
class Atoms:
    """As `LossLattice`, at any losses."""

    masses: Array
    losses: Array
    infinite: float
    error: float
    slack: float
    absolute: float = 0.0

    def cut(self, share: float) -> Atoms:
        """Without the largest losses, which have no more than this mass; it counts as infinite."""
        order = np.argsort(-self.losses)
        beyond = np.cumsum(self.masses[order])
        kept = order[beyond > share]
        lost = float(beyond[len(order) - len(kept) - 1]) if len(kept) < len(order) else 0.0
        infinite = self.infinite + 1.001 * lost
        return Atoms(self.masses[kept], self.losses[kept], infinite, self.error, self.slack, self.absolute)

    @cached_property
    def log_masses(self) -> Array:
        with np.errstate(divide="ignore"):
            return np.log(self.masses)


@dataclass(frozen=True)
class LossLattice:
    """Masses under P at the losses `offset` + i·`interval` for i = `first`, `first` + 1, …

    `infinite` is the mass at an infinite loss. Each mass is exact up to the relative `error`, each loss up to `slack`,
    and `absolute` bounds any further error of one step's delta(epsilon). `rounded` is what rounding losses down took
    off the mean loss, a measure of how loose a lower bound is.
    """

    interval: float
    first: int
    masses: Array
    offset: float = 0.0
    infinite: float = 0.0
    error: float = 0.0
    slack: float = 0.0
    absolute: float = 0.0
    rounded: float = 0.0

    @cached_property
    def losses(self) -> Array:
        return self.offset + self.interval * np.arange(self.first, self.first + len(self.masses), dtype=np.float64)

    @cached_property
    def log_masses(self) -> Array:
        with np.errstate(divide="ignore"):
            return np.log(self.masses)


@lru_cache(maxsize=6)
def upper(rate: float, sigma: float, interval: float) -> tuple[LossLattice, LossLattice]:
    """Pairs that dominate the step: with the record against without it, and without it against with it."""
    step = _Step(rate, sigma)
    first, last = step.span(interval)
    losses = np.arange(first, last + 1) * interval
    places = step.place(losses)
    places[0] = -REACH
    low, high = step.connect_the_dots(places, float(losses[0]))
    # In units of each point's own mass under P: exp(loss) times the one under Q.
    present = np.zeros(len(losses))
    present[:-1] += low * np.exp(losses[:-1])
    present[1:] += high * np.exp(losses[1:])
    absent = np.zeros(len(losses))
    absent[:-1] += low
    absent[1:] += high
    # Mass beyond the reach moves to a higher loss, where "higher" depends on the direction.
    end = min(float(places[-1]), step.top)
    below, above = float(ndtr(-REACH)), float(ndtr(-end))
    present[1] += below
    absent[-2] += above  # the last point is not below the loss at the end of the reach
    infinite = (1 - rate) * above + rate * float(ndtr(1 / sigma - end))
    return (
        LossLattice(interval, first, present, infinite=infinite, error=step.error, slack=step.slack),
        LossLattice(interval, -last, absent[::-1].copy(), infinite=below, error=step.error, slack=step.slack),
    )


@lru_cache(maxsize=6)
def dots(rate: float, sigma: float) -> tuple[Atoms, Atoms]:
    """Pairs that dominate the step, in both directions, whose losses lie as far apart as their size allows."""
    step = _Step(rate, sigma)
    places = step.spread_out()
    losses = step.loss(places)
    low, high = step.connect_the_dots(places)
    absent = np.append(low, 0.0) + np.append(0.0, high)
    present = absent * np.exp(losses)
    # Mass beyond the reach moves to a higher loss, where "higher" depends on the direction.
    below, above = float(ndtr(-REACH)), float(ndtr(-step.top))
    present[0] += below
    absent[-1] += above
    infinite = (1 - rate) * above + rate * float(ndtr(1 / sigma - step.top))
    return Atoms(present, losses, infinite, step.error, step.slack), Atoms(
        absent, -losses, below, step.error, step.slack
    )


@lru_cache(maxsize=6)
def cells(rate: float, sigma: float) -> Atoms:
    """A pair that the step dominates, with the record against without it: cells as narrow as those between `dots`."""
    step = _Step(rate, sigma)
    masses, losses = step.merged(step.spread_out())
    kept = masses > 0
    return Atoms(masses[kept], losses[kept], 0.0, step.error, 2 * step.slack)


@dataclass(frozen=True)
class Dots:
    """A pair that dominates one Gaussian step that all records take part in: at the losses `interval`·(first + i), a
    mass under Q and a measure under P. What is missing of either is bounded by `lost_q` and `lost_p`."""

    first: int
    masses: Array
    measure: Array
    lost_p: float
    lost_q: float
    error: float
    slack: float


@lru_cache(maxsize=32)
def gaussian_dots(sigma: float, interval: float) -> Dots:
    step = _Step(1.0, sigma)
    first, last = step.span(interval)
    losses = np.arange(first, last + 1) * interval
    places = step.place(losses)
    places[0] = -REACH
    low, high = step.connect_the_dots(places, float(losses[0]))
    masses = np.append(low, 0.0) + np.append(0.0, high)
    end, below = min(float(places[-1]), step.top), float(ndtr(-REACH))
    lost_p, lost_q = below + float(ndtr(1 / sigma - end)), below + float(ndtr(-end))
    return Dots(first, masses, masses * np.exp(losses), lost_p, lost_q, step.error, step.slack)


def gaussian_cells(sigma: float, interval: float) -> tuple[int, Array, Array]:
    """A pair that such a step dominates: the number of the first outcome, whose losses are about `interval` apart, and
    the mass of each under Q and under P."""
    step = _Step(1.0, sigma)
    first, last = step.span(interval)
    masses, losses = step.merge(interval * (np.arange(first, last + 2) - 0.5))
    return first, masses * np.exp(-losses), masses


@lru_cache(maxsize=8)
def lower(rate: float, sigma: float, interval: float) -> LossLattice:
    """A pair that the step dominates: with the record against without it.

    Any walls between the cells give such a pair; `_walls` only makes it tight.
    """
    step = _Step(rate, sigma)
    masses, losses = step.merge(_walls(step, interval))
    kept = masses > 0
    return rounded_down(masses[kept], losses[kept], interval, step.error, step.slack)


def rounded_down(masses: Array, losses: Array, interval: float, error: float, slack: float) -> LossLattice:
    """Outcomes with these masses under P, their losses rounded down to a lattice."""

    def rounded(offset: float) -> NDArray[np.int64]:
        return np.floor((losses - offset + slack) / interval).astype(np.int64)

    def lost(offset: float) -> float:
        return float(masses @ (losses - offset - interval * rounded(offset)))

    # Losses just below a point would be rounded by a whole interval: the lattice is lowered a little for them.
    offset = min((float(losses[masses.argmax()]) - interval * 10.0**-x for x in np.arange(2, 10, 0.5)), key=lost)
    index = rounded(offset)
    lowest = int(index.min())
    merged = np.bincount(index - lowest, weights=masses)
    return LossLattice(interval, lowest, merged, offset=offset, error=error, slack=2 * slack, rounded=lost(offset))


def _walls(step: _Step, interval: float) -> Array:
    """Walls between cells whose losses lie at or just above the points of a lattice."""
    first, last = step.span(interval)
    # Most steps hardly touch the record: one cell may hold nearly all the mass. The lattice goes through the loss of
    # that cell, so that it is not rounded, and the walls lie midway between the points.
    points, middle = interval * np.arange(first - 1, last + 2), 0
    walls = np.append(points, points[-1] + interval) - interval / 2
    for _ in range(3):
        masses, losses = step.merge(walls)
        middle = int(np.argmax(masses))
        points = losses[middle] + interval * (np.arange(len(points)) - middle)
        walls = np.append(points, points[-1] + interval) - interval / 2
    # Next to that cell the density falls by large factors from one cell to the next. There all walls are moved until
    # the losses agree with the points, and then only upwards, until no loss lies below its point.
    start, stop = max(0, middle - NEAR), min(len(points), middle + NEAR)
    for turn in range(RELAXING + 8):
        masses, losses = step.merge(walls[start : stop + 1], ends=(start == 0, stop == len(points)))
        points = losses[middle - start] + interval * (np.arange(len(points)) - middle)
        apart = np.where(masses > 0, np.clip(points[start:stop] - losses, -interval / 4, interval / 4), 0.0)
        if turn < RELAXING:
            moved = 0.5 * (apart[1:] + apart[:-1])
        else:
            moved = 1.02 * np.maximum(0.0, np.maximum(apart[1:], apart[:-1]))
        # Each wall stays between its two points.
        inner = points[start : stop - 1]
        walls[start + 1 : stop] = np.clip(walls[start + 1 : stop] + moved, inner, inner + interval)
    # Where the density falls gently, it is enough to move up both walls of the cells whose loss lies below its point.
    masses, losses = step.merge(walls)
    short = np.where(masses > 0, np.clip(points - losses, 0.0, interval / 4), 0.0)
    walls[1:-1] += 1.05 * np.maximum(short[1:], short[:-1])
    return np.maximum.accumulate(walls)


class _Step:
    """One step in units of its noise: z = output / σ."""

    def __init__(self, rate: float, sigma: float) -> None:
        self.rate, self.sigma = rate, sigma
        self.top = 1 / sigma + REACH
        # The largest numbers that are rounded in computing a loss or the argument of an exponential.
        largest = self.top / sigma + 0.5 / sigma**2
        self.slack = 8 * UNIT * (1 + largest)
        self.error = 8 * UNIT * (2 + self.top**2 + largest)

    def loss(self, z: Array) -> Array:
        ratio = z / self.sigma - 0.5 / self.sigma**2
        if self.rate == 1:
            return ratio
        # Three forms of log(1 - q + q·exp(ratio)), each where its rounding stays a few units of the last place.
        grown = np.exp(np.minimum(ratio, 30.0))
        middle = np.where(
            ratio < -0.5,
            np.log((1 - self.rate) + self.rate * grown),
            np.log1p(self.rate * np.expm1(np.minimum(ratio, 30.0))),
        )
        return np.where(ratio < 30, middle, np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + ratio))

    def place(self, losses: Array) -> Array:
        """Where each loss is reached; the lower end of the reach for a loss that never is."""
        if self.rate == 1:
            ratio = losses
        else:
            grown = np.where(losses < -0.5, np.exp(losses) - (1 - self.rate), np.expm1(losses) + self.rate)
            with np.errstate(divide="ignore"):
                ratio = np.log(np.maximum(grown, 0.0) / self.rate)
        return np.maximum(self.sigma * ratio + 0.5 / self.sigma, -REACH)

    def span(self, interval: float) -> tuple[int, int]:
        """First and last point of a lattice around all losses within reach."""
        ends = self.loss(np.array([-REACH, self.top]))
        if not ends[1] < min(700.0 + math.log(self.rate), MOST_CELLS * interval):
            raise AccountingError(
                f"the pld accountant cannot discretise steps with sigma = {self.sigma}: one of them has privacy losses "
                f"up to {ends[1]:.3g}; use more noise"
            )
        return math.floor(ends[0] / interval), max(math.ceil(ends[1] / interval), math.floor(ends[0] / interval) + 2)

    def spread_out(self) -> Array:
        """Places all over the reach between which losses change by a small part of their size (or of their spread)."""
        count = math.ceil((self.top + REACH) * FINENESS / min(1.0, self.sigma))
        if count > MOST_ATOMS:
            raise AccountingError(
                f"steps with sigma = {self.sigma} take too many losses to account for; use more noise"
            )
        return np.linspace(-REACH, self.top, count + 1)

    def connect_the_dots(self, places: Array, lowest: float | None = None) -> tuple[Array, Array]:
        """Mass under Q that each cell gives to its lower and to its upper point; `lowest`: the loss of the first point,
        if it is below that of the first place."""
        # Beyond the reach there is nothing to integrate; the shares still refer to the whole cell.
        cell, inside, width, z = self._panels(np.minimum(places, self.top))
        spans = np.diff(places) / self.sigma
        whole = np.expm1(spans)
        # The lowest cell may reach below every loss, where there is no place to measure from.
        if lowest is not None:
            whole[0] = max(self._over(places[1:2], lowest)[0], np.finfo(np.float64).tiny)
        low, high = np.zeros(len(spans)), np.zeros(len(spans))
        wholes, firsts = whole[cell], cell == 0
        for node, weight in zip(NODES, WEIGHTS, strict=True):
            here = inside + node * width
            share = np.expm1(here / self.sigma)
            if lowest is not None:
                share[firsts] = self._over(z[firsts] + node * width[firsts], lowest)
            share = np.clip(share / wholes, 0.0, 1.0)
            mass = weight * width * _density(z + node * width)
            high += np.bincount(cell, weights=share * mass, minlength=len(spans))
            low += np.bincount(cell, weights=(1 - share) * mass, minlength=len(spans))
        return low, high

    def merge(self, walls: Array, ends: tuple[bool, bool] = (True, True)) -> tuple[Array, Array]:
        """Mass under P of each cell, and the loss of the cell as one outcome; the end cells take in all beyond."""
        places = self.place(walls)
        if ends[0]:
            places[0] = -REACH
        if ends[1]:
            places[-1] = max(places[-1], self.top)
        return self.merged(np.minimum(np.maximum.accumulate(places), self.top))

    def merged(self, places: Array) -> tuple[Array, Array]:
        """The same between places."""
        cell, _, width, z = self._panels(places)
        middles = self.loss(0.5 * (places[:-1] + places[1:]))
        under_p, under_q = np.zeros(len(middles)), np.zeros(len(middles))
        for node, weight in zip(NODES, WEIGHTS, strict=True):
            here = z + node * width
            mass = weight * width * _density(here)
            under_q += np.bincount(cell, weights=mass, minlength=len(middles))
            # Relative to the cell's own middle, so that nothing over- or underflows.
            grown = np.exp(self.loss(here) - middles[cell])
            under_p += np.bincount(cell, weights=mass * grown, minlength=len(middles))
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = middles + np.log(under_p / under_q)
            masses = under_p * np.exp(middles)
        empty = ~np.isfinite(losses)
        return np.where(empty, 0.0, masses), np.where(empty, middles, losses)

    def _over(self, z: Array, lowest: float) -> Array:
        """exp(loss) - exp(lowest), for a lowest loss that is at most that of any place within reach."""
        missed = (1 - self.rate) - math.exp(lowest) if lowest < -0.5 else -self.rate - math.expm1(lowest)
        return np.maximum(0.0, self.rate * np.exp(z / self.sigma - 0.5 / self.sigma**2) + missed)

    def _panels(self, places: Array) -> tuple[NDArray[np.int64], Array, Array, Array]:
        """Cells cut into panels that are narrow enough: cell, distance from its lower wall, width, lower end."""
        widths = np.diff(places)
        scale = np.maximum(1 / self.sigma, 1 + np.maximum(np.abs(places[:-1]), np.abs(places[1:])))
        counts = np.maximum(1, np.ceil(widths * scale / WIDEST)).astype(np.int64)
        cell = np.repeat(np.arange(len(widths)), counts)
        ordinal = np.arange(len(cell)) - np.repeat(np.cumsum(counts) - counts, counts)
        width = (widths / counts)[cell]
        inside = ordinal * width
        return cell, inside, width, places[cell] + inside


def _density(z: Array) -> Array:
    return np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
