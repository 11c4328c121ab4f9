"""Privacy loss of one step for a person with several records, and for a record that is exchanged for another.

The usual pair of `loss_lattice` is about one record that is there or not. Here are two others, in units where C = 1:

`Group`: k records that are all there or all absent. j of them are drawn, j ~ Bin(k, q), and move the sum by at most j,
so the outputs are P = Σ Bin(k, q)(j)·N(j, σ²) and Q = N(0, σ²) (Ganesh, arXiv 2401.10294).

`Replacement`: one record in the place of another, or with another label. Both are drawn alike and each moves the sum by
at most 1, so the outputs are P = (1 - q)·N(0, σ²) + q·N(1, σ²) and Q = (1 - q)·N(0, σ²) + q·N(-1, σ²). Lebeda et al.
(arXiv 2405.20769) examine this pair; nothing below relies on their results.

Why a pair on the line is the worst case among gradients in any number of dimensions. All other records, once drawn,
shift both outputs alike. For groups let c_S be the sum of the clipped gradients of those drawn. In units of the noise,
dP/dQ at output z is Σ p_S·exp(⟨c_S, z⟩ - |c_S|²/2) with z ~ N(0, I) under Q, and both directions of the divergence are
means of a convex function of it. Kahane's convexity inequality (1986) says that such a mean grows with each entry of
the covariance ⟨c_S, c_R⟩ of the exponents, which is at most |S|·|R|, and the pair on the line has just that. For a
replacement with gradients x and y in the unit ball, ∫ (P - αQ)₊ with α ≥ 1 is q times ∫ (N(x) - a·N(y) - b·N(0))₊ with
a = α and b = (α - 1)(1 - q)/q. Seen from x the other two lie at distances of at most 2 and 1, so by the same inequality
it is largest where they lie on the line, at exactly these distances: y = -x, |x| = 1. For α < 1 the same holds with P
and Q exchanged. Steps whose inputs depend on earlier outputs compose as always (Zhu, Dong and Wang 2022, theorem 10).

The lattice is built as in `loss_lattice`: by connecting the dots, with all masses as sums of positive terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr

from murmuration.accounting.epsilon.loss_lattice import (
    MOST_CELLS,
    NODES,
    REACH,
    UNIT,
    WEIGHTS,
    WIDEST,
    Array,
    LossLattice,
)  # fmt: skip
from murmuration.accounting.errors import AccountingError

# Numbers of drawn records less probable than this count as an infinite loss; no delta is affected.
UNSEEN = 1e-30
# Bound on the masses below the smallest double, of all cells together.
UNDERFLOW = 1e-290
NEWTON = 12


@dataclass(frozen=True)
class Group:
    """`size` records of one person. In units of the noise, z = output / σ."""

    rate: float
    sigma: float
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise AccountingError(f"a person has at least 1 record, not {self.size}")

    @property
    def log_shares(self) -> Array:
        """Logarithms of Bin(k, q) from 0 on, without the unseen tail."""
        drawn = np.arange(self.size + 1, dtype=np.float64)
        if self.rate == 1:
            return np.where(drawn == self.size, 0.0, -np.inf)
        ways = np.array([math.log(math.comb(self.size, j)) for j in range(self.size + 1)])
        logs = ways + drawn * math.log(self.rate) + (self.size - drawn) * math.log1p(-self.rate)
        beyond = np.append(np.cumsum(np.exp(logs)[::-1])[::-1][1:], 0.0)
        return logs[: int(np.argmax(beyond < UNSEEN)) + 1]

    @property
    def most(self) -> int:
        return len(self.log_shares) - 1

    @property
    def unseen(self) -> float:
        return UNSEEN if self.most < self.size else 0.0

    @property
    def rarest(self) -> float:
        """Largest absolute logarithm among the shares, for the bound on rounding."""
        logs = self.log_shares
        return float(np.abs(logs[np.isfinite(logs)]).max())

    @property
    def reach(self) -> tuple[float, float]:
        return -REACH, self.most / self.sigma + REACH

    @property
    def steepest(self) -> float:
        """Largest rate of an exponential in the likelihoods."""
        return self.most / self.sigma

    def outside(self, low: float, high: float) -> tuple[float, float, float, float]:
        """Mass of P and of Q below the first and above the second place."""
        drawn = np.arange(self.most + 1) / self.sigma
        shares = np.exp(self.log_shares)
        p_below = float(shares @ np.exp(log_ndtr(low - drawn)))
        p_above = float(shares @ np.exp(log_ndtr(drawn - high)))
        return p_below, math.exp(log_ndtr(low)), p_above, math.exp(log_ndtr(-high))

    def log_parts(self, z: Array) -> Array:
        """Logarithm of what each number of drawn records adds to dP/dQ: one row per number."""
        drawn = (np.arange(self.most + 1) / self.sigma)[:, None]
        return self.log_shares[:, None] + drawn * z - 0.5 * drawn**2

    def loss(self, z: Array) -> Array:
        return self.loss_and_slope(z)[0]

    def loss_and_slope(self, z: Array) -> tuple[Array, Array]:
        parts = self.log_parts(z)
        largest = parts.max(axis=0)
        weights = np.exp(parts - largest)
        total = weights.sum(axis=0)
        return largest + np.log(total), (np.arange(self.most + 1) / self.sigma) @ weights / total

    def start(self, z: Array) -> Array:
        """What `rise` needs to know about a wall: the logarithm of each number's part in dP/dQ there."""
        return self.log_parts(z) - self.loss(z)

    def rise(self, start: Array, z: Array, distance: Array) -> Array:
        """exp(loss(z + distance) - loss(z)) - 1 from a wall at z, as a sum of positive terms."""
        del z
        step = distance / self.sigma
        missing = -np.expm1(-step)  # 1 - exp(-j·step) for j = 1; each further one adds a positive term
        total, gone, left = np.zeros(len(step)), np.zeros(len(step)), np.ones(len(step))
        for j in range(1, self.most + 1):
            gone, left = gone + missing * left, left * (1 - missing)
            total += np.exp(start[j] + j * step) * gone
        return total

    def log_density(self, z: Array) -> Array:
        """Log density of Q."""
        return -0.5 * z * z - 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Replacement:
    """One record, or its label, exchanged for another. In units of the noise, z = output / σ."""

    rate: float
    sigma: float
    unseen = 0.0

    @property
    def rarest(self) -> float:
        return -math.log(self.rate)

    @property
    def reach(self) -> tuple[float, float]:
        return -1 / self.sigma - REACH, 1 / self.sigma + REACH

    @property
    def steepest(self) -> float:
        return 2 / self.sigma

    def outside(self, low: float, high: float) -> tuple[float, float, float, float]:
        """Mass of P and of Q below the first and above the second place."""

        def mass(end: float, moved: float) -> float:
            return (1 - self.rate) * math.exp(log_ndtr(end)) + self.rate * math.exp(log_ndtr(end + moved))

        shift = 1 / self.sigma
        return mass(low, -shift), mass(low, shift), mass(-high, shift), mass(-high, -shift)

    def _log_sum(self, z: Array) -> Array:
        """log(1 - q + q·exp(z/σ - 1/2σ²))."""
        ratio = z / self.sigma - 0.5 / self.sigma**2
        return ratio if self.rate == 1 else np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + ratio)

    def _part(self, z: Array) -> Array:
        """The drawn record's share of that sum."""
        return np.exp(math.log(self.rate) + z / self.sigma - 0.5 / self.sigma**2 - self._log_sum(z))

    def loss(self, z: Array) -> Array:
        return self._log_sum(z) - self._log_sum(-z)

    def loss_and_slope(self, z: Array) -> tuple[Array, Array]:
        return self.loss(z), (self._part(z) + self._part(-z)) / self.sigma

    def start(self, z: Array) -> Array:
        return self._part(z)[None, :]

    def rise(self, start: Array, z: Array, distance: Array) -> Array:
        """exp(loss(z + distance) - loss(z)) - 1 from a wall at z, as a sum of positive terms."""
        below, above = start[0], self._part(-(z + distance))
        once, twice = np.expm1(distance / self.sigma), np.expm1(2 * distance / self.sigma)
        return (below * (1 - above) + (1 - below) * above) * once + below * above * twice

    def log_density(self, z: Array) -> Array:
        """Log density of Q."""
        return self._log_sum(-z) - 0.5 * z * z - 0.5 * math.log(2 * math.pi)


Pair = Group | Replacement


def cells(pair: Pair, interval: float) -> float:
    """The number of lattice cells, each counted once for every number of drawn records."""
    low, high = pair.loss(np.array(pair.reach))
    return float(high - low) / interval * (pair.most if isinstance(pair, Group) else 1)


@lru_cache(maxsize=12)
def dominating(pair: Pair, interval: float) -> tuple[LossLattice, LossLattice]:
    """Lattices that dominate the pair: P against Q, and Q against P."""
    low_end, top = pair.reach
    bottom, end = (float(x) for x in pair.loss(np.array([low_end, top])))
    first = math.floor(bottom / interval)
    last = max(math.ceil(end / interval), first + 1)
    if not last - first < MOST_CELLS:
        raise AccountingError(
            f"the pld accountant cannot discretise {pair}: one step has privacy losses up to {end:.3g}; use more noise"
        )
    losses = np.arange(first, last + 1) * interval
    walls, missed = _places(pair, losses)
    present, absent = _connect_the_dots(pair, walls, losses)
    p_below, q_below, p_above, q_above = pair.outside(low_end, float(walls[-1]))
    # Mass beyond the reach moves to a higher loss, where "higher" depends on the direction.
    present[1] += p_below
    absent[min(len(losses) - 1, max(0, math.floor(end / interval) - first))] += q_above
    largest = pair.steepest * max(-low_end, top) + 0.5 * pair.steepest**2 + pair.rarest
    slack = 16 * UNIT * (1 + largest) + missed
    error = 16 * UNIT * (2 + top**2 + low_end**2 + 2 * largest)
    return (
        LossLattice(
            interval, first, present, infinite=p_above + pair.unseen + UNDERFLOW, error=error, slack=slack
        ),
        LossLattice(interval, -last, absent[::-1].copy(), infinite=q_below + UNDERFLOW, error=error, slack=slack),
    )  # fmt: skip


def _places(pair: Pair, losses: Array) -> tuple[Array, float]:
    """Where each loss is reached, within the reach; and how far the losses there are from those asked for."""
    low_end, top = pair.reach
    grid = np.linspace(low_end, top, 2**14)
    places = np.interp(losses, np.maximum.accumulate(pair.loss(grid)), grid)
    enough = 16 * UNIT * (1 + max(abs(float(losses[0])), abs(float(losses[-1]))))
    missed = math.inf
    for _ in range(NEWTON):
        found, slope = pair.loss_and_slope(places)
        gap = losses - found
        # At the ends of the reach a loss may lie beyond it; then its cell is empty, and its place does not matter.
        inner = (places > low_end) & (places < top)
        missed = float(np.abs(gap[inner]).max(initial=0.0))
        if missed <= enough:
            break
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = gap / slope
        # Newton's step from a flat place may lead far away.
        places = np.clip(places + np.clip(np.nan_to_num(moved), -0.5, 0.5), low_end, top)
    places = np.maximum.accumulate(places)
    places[0], places[-1] = low_end, top
    if not missed < 1e-9:
        raise AccountingError(f"the pld accountant cannot discretise {pair}: its losses are too steep; use more noise")
    return places, missed


def _connect_the_dots(pair: Pair, walls: Array, losses: Array) -> tuple[Array, Array]:
    """Masses at the losses, under P and under Q, that the cells between the walls give to their two points."""
    widths = np.diff(walls)
    scale = 1 + pair.steepest + np.maximum(np.abs(walls[:-1]), np.abs(walls[1:]))
    panels = np.maximum(1, np.ceil(widths * scale / WIDEST)).astype(np.int64)
    cell = np.repeat(np.arange(len(widths)), panels)
    width = (widths / panels)[cell]
    inside = (np.arange(len(cell)) - np.repeat(np.cumsum(panels) - panels, panels)) * width
    start = pair.start(walls[:-1])
    # exp(loss) - exp(lower point), in units of the exponential at the wall. The lowest point may lie below all losses
    # and the highest above them; the shares still refer to the whole cell.
    offset = np.zeros(len(widths))
    offset[0] = max(0.0, -math.expm1(float(losses[0] - pair.loss(walls[:1])[0])))
    whole = pair.rise(start, walls[:-1], widths) + offset
    cut = walls[1:] >= walls[-1]
    whole[cut] = np.expm1(losses[1:][cut] - pair.loss(walls[:-1][cut])) + offset[cut]
    whole = np.maximum(whole, np.finfo(np.float64).tiny)
    present, absent = np.zeros(len(losses)), np.zeros(len(losses))
    starts, at_cell, offsets, wholes = start[:, cell], walls[:-1][cell], offset[cell], whole[cell]
    for node, weight in zip(NODES, WEIGHTS, strict=True):
        distance = inside + node * width
        share = np.clip((pair.rise(starts, at_cell, distance) + offsets) / wholes, 0.0, 1.0)
        log_mass = pair.log_density(at_cell + distance)
        for part, point in ((1 - share, cell), (share, cell + 1)):
            # One exponential each, so that neither the small density nor the large likelihood leaves the range.
            part = weight * width * part
            absent += np.bincount(point, weights=part * np.exp(log_mass), minlength=len(losses))
            present += np.bincount(point, weights=part * np.exp(log_mass + losses[point]), minlength=len(losses))
    return present, absent
