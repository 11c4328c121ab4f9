"""Both bounds of epsilon where a lattice is too coarse: many steps, each of which hardly says anything.

A lattice rounds each loss to a multiple of its interval. If a step's losses are smaller than that, the sum of T steps
spreads several times too far. Here the losses stay where they are, some thousands of them, as far apart as their sizes
allow (`loss_lattice.dots` and `cells`). Their sums lie on no lattice, so no FFT adds them up. Instead, with
M(z) = E exp(z·S) of the sum S of all losses, and any tilt θ > 0,

    delta(ε) = E (1 - exp(ε - S))₊ = 1/2π ∫ f(t) dt,  f(t) = M(z) exp(-z·ε) / (z (z + 1)),  z = θ + i·t

since exp(-z·x) integrated against (1 - exp(-x))₊ is 1 / (z (z + 1)). A sum over t = k·h takes the integral's place:

1. *Spacing.* exp(θε)·delta(ε) is continuous and integrable in ε; its transform f falls as 1/t². By Poisson's formula
   the sum over all k is Σ exp(θ·m·A)·delta(ε + m·A) over all whole m, with A = 2π/h. No term is negative, and that of
   m = 0 is delta(ε): the sum is never below delta. A lower bound subtracts the other terms, of which Chernoff's bound
   delta(x) <= M(a) exp(-a·x), a >= 0, makes two geometric series (`aliases`).
2. *End.* What is beyond the last term is bounded in two parts (`_beyond`). For n steps |M(θ + it)| = M(θ)·|φ(t)|^n with
   φ(t) = E exp(i·t·L) of one tilted loss L, and |φ| changes by at most E|L - c| as fast as t, for any c. So with
   D(t) = n·(1 - |φ(t)|), up to D(t) / (2·n·E|L - c|) behind any t, |φ|^n is at most exp(-D(t)/2): a stride. And to S a
   random amount U is added, the mean of `DRAWS` numbers that are uniform between 0 and w. S + U lies between S and
   S + w, so delta grows, and w off epsilon makes a lower bound of it. Its transform is at most
   ((exp(θw/m) + 1)·m / (w·t))^m for m = `DRAWS`, which leaves little to look at.
3. *Rounding.* `_terms` bounds what it does to each term. Relative errors of masses and of M(θ) become a factor
   (`_growth`), those of the losses are added to epsilon (`slack`).

The largest losses are cut off, as if they were infinite: those that all steps together have with a chance of less than
a small part of delta. exp(θ·loss) would grow beyond what their chance makes up for. The errors of 2 and 3 are added to
delta (subtracted for a lower bound), and must stay below a thousandth of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from murmuration.accounting.epsilon.composition import MOST_ERROR, Moments, NotConverged, Sum, log_modulus, tilted
from murmuration.accounting.epsilon.loss_lattice import MOST_ATOMS, UNIT, Array, Atoms

# A, in standard deviations of the tilted sum, or by what part of delta the sum may exceed it, whichever is more.
PERIOD, COUNTED_TWICE = 14.0, 1e-6
# The sum ends where |M| has fallen by exp(-DECAY) or more.
DECAY = 60.0
MOST_TERMS, MOST_STRIDES = 2**17, 2**12
# w, in units of 1/θ, and how many numbers U is the mean of.
WIDTH, DRAWS = 2e-3, 3
# The parts of what errors may reach by which the largest losses are cut off, and by which the end may be wrong.
CUT = END = 0.25
# Losses with less of the tilted mass are left out, which is charged as an error.
FAINT = 1e-24
# How many terms share a factor, so that few exponentials are computed.
BLOCK = 64
# How many losses are summed in one go: fewer round less.
SUMMED = 128


@dataclass(frozen=True)
class Contour(Sum):
    """`counts[i]` independent steps of `lattices[i]`, whose losses lie anywhere."""

    lattices: tuple[Atoms, ...]

    @staticmethod
    def of(steps: Iterable[tuple[Atoms, int]], delta: float) -> Contour:
        """Without the largest losses, as they matter at `delta`."""
        parts = [(atoms, count) for atoms, count in steps]
        share = CUT * MOST_ERROR * delta / len(parts)
        return Contour(tuple(atoms.cut(share / count) for atoms, count in parts), tuple(count for _, count in parts))

    def epsilon(self, delta: float) -> float:
        """Upper bound of the epsilon at `delta`."""
        line, value = _Line(self, self._tilt_for(delta), delta), math.inf
        # The first tilt is a guess; from any answer on, the one whose mean is the answer has the least errors.
        for _ in range(6):
            value = min(value, line.epsilon(delta))
            if line.is_close(value):
                value += self.slack
                return max(0.0, value + 1e-12 * (1 + abs(value)))
            line = _Line(self, self._tilt_with_mean(value), delta, value)
        raise NotConverged("rounding may account for too much of delta; use more noise or a larger delta")

    def epsilon_below(self, delta: float) -> float:
        """Lower bound of the epsilon at `delta`, if the losses bound their steps from below."""
        line, best, period = _Line(self, self._tilt_for(delta), delta), 0.0, PERIOD
        for _ in range(4):
            value = line.epsilon_below(delta)
            best = max(best, value - self.slack - 1e-12 * (1 + abs(value)))
            if line.is_close(value) and line.aliases(value + line.width) <= MOST_ERROR * delta:
                break
            # Rare large losses reach beyond many standard deviations.
            about, period = max(value, min(line.moments.mean, line.epsilon(delta))), 1.5 * period
            line = _Line(self, self._tilt_with_mean(about), delta, about, period)
        return best

    def deltas(self, epsilons: Sequence[float]) -> list[float]:
        """Upper bounds of delta at each epsilon."""
        found: dict[float, float] = {}
        line, lowest = None, 1.0
        for asked in sorted(set(epsilons)):
            epsilon = asked - self.slack
            if line is None or not line.is_close(epsilon):
                tilt, expected = self._tilt_with_mean(epsilon), lowest
                for _ in range(4):
                    line = _Line(self, tilt, expected, epsilon)
                    expected = min(expected, line.above(epsilon))
                    if line.is_close(epsilon):
                        break
            assert line is not None
            found[asked] = lowest = min(lowest, line.above(epsilon))
        return [found[asked] for asked in epsilons]


class _Line:
    """The terms f(k·h)·h/π on the line of real part `tilt`, scaled by exp(tilt·ε)/M(tilt). `delta` and `epsilon` are
    what is expected; only how close the bounds are depends on them."""

    def __init__(
        self, losses: Contour, tilt: float, delta: float, epsilon: float | None = None, period: float = PERIOD
    ) -> None:
        self.losses, self.tilt = losses, tilt
        self.moments: Moments = losses.moments(tilt)
        spread = self.moments.spread
        self.period = max(period * spread, -math.log(COUNTED_TWICE * max(delta, 1e-300)) / tilt)
        self.step = 2 * math.pi / self.period
        self.width = WIDTH / tilt
        # Weights, distances from their mean, how many steps have them, and the size of what a distance is made of.
        self.parts: list[tuple[Array, Array, int, float]] = []
        for atoms, count in zip(losses.lattices, losses.counts, strict=True):
            weights, _ = tilted(atoms.log_masses, atoms.losses, tilt)
            kept = weights > FAINT
            middle = float(np.sum(weights * atoms.losses))
            size = float(np.sum(weights * np.abs(atoms.losses))) + abs(middle)
            self.parts.append((weights[kept], atoms.losses[kept] - middle, count, size))
        # Delta in this scale: what it must be for the expected answer, or as if the sum were normal.
        about = 1 / (1 + math.sqrt(2 * math.pi) * tilt * (1 + tilt) * spread)
        if epsilon is not None:
            about = min(about, delta * math.exp(min(0.0, tilt * epsilon - self.moments.log_scale)))
        # Behind `last` U alone makes the terms small enough: their sum is at most (turned/last)^power/(π·power·turned).
        self.turned, self.power = (math.exp(tilt * self.width / DRAWS) + 1) * DRAWS / self.width, DRAWS + 1
        enough = max(END * MOST_ERROR * about, 1e-300)
        self.last = self.turned * (math.pi * self.power * self.turned * enough) ** (-1 / self.power)
        self.places = self.step * np.arange(self._blocks() * BLOCK, dtype=np.float64)
        self.end = self._beyond(self.places[-1] + self.step)
        # Far enough from the mean for any answer.
        self.reach = max(2 * self.period + 60 / tilt, 0.0 if epsilon is None else abs(epsilon - self.moments.mean))
        self.terms, self.rounded = self._terms()

    def epsilon(self, delta: float) -> float:
        """Upper bound of the epsilon at `delta`, but for the losses' slack."""
        low, high = self.moments.mean - self.reach, self.moments.mean + self.reach
        if not self.above(high) <= delta:
            raise NotConverged(f"no epsilon near {self.moments.mean:.3g} has delta = {delta:g}; use more noise")
        # Whatever the bisection does, `high` was checked.
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self.above(middle) <= delta else (middle, high)
        return high

    def epsilon_below(self, delta: float) -> float:
        """Lower bound of the epsilon at `delta`, likewise. It is near the mean: errors hide what is far off."""
        low, high = self.moments.mean - 4 * self.moments.spread, self.moments.mean + self.reach
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self._inside(middle, -1) >= delta else (low, middle)
        # What else the sum counts is far larger at far smaller epsilons, so it is subtracted here.
        for stride in self.moments.spread * 2.0 ** np.arange(-30.0, 1.0):
            if self._inside(low, -1) - self.aliases(low) >= delta:
                return low - self.width
            low -= float(stride)
        return 0.0

    def above(self, epsilon: float) -> float:
        """Upper bound of delta at `epsilon`."""
        return self._inside(epsilon, +1) + self.losses.lost

    def is_close(self, epsilon: float) -> bool:
        inside = self._sum(epsilon)
        if abs(epsilon - self.moments.mean) > self.reach:
            return False
        return self.end + self.rounded + self._growth * inside <= MOST_ERROR * inside

    def _inside(self, epsilon: float, side: int) -> float:
        """The sum at `epsilon` with all errors on one side."""
        exponent = self.moments.log_scale + DRAWS * math.log(self._uniform) - self.tilt * epsilon + side * self._growth
        return math.exp(min(700.0, exponent)) * (self._sum(epsilon) + side * (self.end + self.rounded))

    def _sum(self, epsilon: float) -> float:
        turns = np.exp(1j * (self.moments.mean - epsilon) * self.places)
        return float(np.sum((self.terms * turns).real))

    @property
    def _uniform(self) -> float:
        """E exp(θ·u) of one of U's numbers."""
        return math.expm1(self.tilt * self.width / DRAWS) / (self.tilt * self.width / DRAWS)

    @cached_property
    def _growth(self) -> float:
        """Bound of the relative errors of all masses together and of M(tilt), as a logarithm."""
        farthest = abs(self.moments.mean) + self.reach
        exponent = 16 * UNIT * (abs(self.moments.log_scale) + self.tilt * farthest + 8)
        for atoms, count in zip(self.losses.lattices, self.losses.counts, strict=True):
            # As in `composition`: 1000 for the log of a mass; sums of so many terms round as often at most.
            largest = 1000 + self.tilt * float(np.abs(atoms.losses).max())
            exponent += count * (atoms.error + UNIT * (8 * largest + len(atoms.losses)))
        return exponent

    def _decay(self, place: float) -> float:
        """D at t = `place`, of all kinds of steps together."""
        found = 0.0
        for weights, apart, count, _ in self.parts:
            turns = place * apart
            real, imaginary = (
                2 * float(np.sum(weights * np.sin(0.5 * turns) ** 2)),
                float(np.sum(weights * np.sin(turns))),
            )
            found += count * (1 - math.hypot(1 - real, imaginary))
        return found

    def _blocks(self) -> int:
        """So many that terms are small enough behind them."""
        blocks = 1
        while (place := self.step * blocks * BLOCK) < self.last and self._decay(place) < DECAY:
            blocks *= 2
            if blocks * BLOCK > MOST_TERMS:
                raise NotConverged("single steps lose too much privacy for a contour integral; use more noise")
        return blocks

    def _beyond(self, place: float) -> float:
        """Bound of the sum of all terms from t = `place` on."""
        distances = sum(n * float(np.sum(weights * np.abs(apart))) for weights, apart, n, _ in self.parts)
        found = 0.0
        for _ in range(MOST_STRIDES):
            if place >= self.last:
                # The sum of h/π·turned^m/t^(m + 2) from t = place on is at most the integral from one term before.
                rest = (self.turned / (place - self.step)) ** self.power / (math.pi * self.power * self.turned)
                return 1.01 * (found + rest)
            decay = self._decay(place)
            stride = 0.5 * decay / distances
            found += math.exp(-0.5 * decay) * (stride + self.step) / (math.pi * place**2)
            place += stride
        raise NotConverged("the privacy losses are too uneven for a contour integral; use more noise")

    def _terms(self) -> tuple[NDArray[np.complex128], float]:
        """The terms, turned so that the mean of the tilted sum is 0, and a bound of the sum of their errors."""
        places = self.places
        log_bound, log_size, angle, relative = (np.zeros(len(places)) for _ in range(4))
        for weights, apart, times, size in self.parts:
            # x = φ - 1, so that what hardly turns hardly rounds. With t = a + b of a few a and b,
            # exp(i(a + b)) - 1 = (exp(ia) - 1)(exp(ib) - 1) + (exp(ia) - 1) + (exp(ib) - 1).
            x = np.zeros((len(places) // BLOCK, BLOCK), dtype=np.complex128)
            for start in range(0, len(weights), SUMMED):
                some = slice(start, start + SUMMED)
                coarse = _turn(np.outer(places[::BLOCK], apart[some])) * weights[some]
                fine = _turn(np.outer(apart[some], places[:BLOCK]))
                x += coarse @ fine + (coarse.sum(axis=1)[:, None] + np.sum(weights[some, None] * fine, axis=0))
            x = x.ravel()
            # |exp(iy) - 1| <= min(2, |y|), so the sizes of all that is summed add up to `most`. A sum of n complex
            # products rounds 4·n units of that at most. Angles y round in proportion to what they are made of.
            most = np.minimum(8.0, 3 * places * size)
            rounds = 4 * SUMMED + 4 * len(weights) / SUMMED + 64
            error = UNIT * (rounds * most + 16 * places * size) + MOST_ATOMS * FAINT
            bound, turn, logs = np.abs(1 + x) + error, np.arctan2(x.imag, 1 + x.real), log_modulus(x)
            log_bound += times * np.log(bound)
            log_size += times * logs
            angle += times * turn
            # (x + e)^n - x^n <= n·e·(x + e)^(n - 1). Size and angle of 1 + x round in proportion to |x| / |1 + x|, and
            # n times them in proportion to themselves.
            relative += times * (error / bound + 32 * UNIT * (np.abs(x) / bound + np.abs(turn) + np.abs(np.log(bound))))
        z = self.tilt + 1j * places
        shares = np.full(len(places), self.step / math.pi)
        shares[0] /= 2  # k and -k are conjugates and counted together, 0 only once
        small = z * self.width / DRAWS
        factors = shares / (z * (z + 1)) * (np.expm1(small) / small / self._uniform) ** DRAWS
        terms = factors * np.exp(log_size) * np.exp(1j * angle)
        # The last turn, by (mean - ε)·t, rounds in proportion to itself.
        relative += UNIT * (256 + 8 * np.abs(angle) + 8 * places * (self.reach + abs(self.moments.mean)))
        return terms, float(np.sum(np.abs(factors) * np.exp(log_bound) * relative))

    def aliases(self, epsilon: float) -> float:
        """Bound of what the sum over all k counts besides delta(ε)."""
        # delta <= 1, which is Chernoff's bound for a = 0.
        below = _series(-self.tilt * self.period)
        other = self._beyond_period
        scale = self.losses.moments(other).log_scale + other * (self.width - epsilon)
        above = scale + _series((self.tilt - other) * self.period)
        return sum(2 * math.exp(min(700.0, log)) for log in (below, above))  # twice, for what rounds here

    @cached_property
    def _beyond_period(self) -> float:
        return max(1.001 * self.tilt, self.losses._tilt_with_mean(self.moments.mean + self.period))


def _series(log_ratio: float) -> float:
    """Log of a geometric series from its first power on."""
    return log_ratio - math.log(-math.expm1(log_ratio))


def _turn(angles: Array) -> NDArray[np.complex128]:
    """exp(i·angle) - 1, without cancellation."""
    return -2 * np.sin(0.5 * angles) ** 2 + 1j * np.sin(angles)
