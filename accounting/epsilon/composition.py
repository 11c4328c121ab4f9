"""Delta and epsilon of many steps composed, with bounds that hold despite rounding.

The losses of independent steps add up, so their distributions are convolved, by Fourier transforms. The error of a
transform is absolute, while a small delta lies far out in the tail and would drown in it. So the distribution is first
tilted by exp(θ·loss), so that its bulk lies at the epsilon in question, and tilted back afterwards. The remaining error
of the tilted transforms is bounded from the spectrum and added to delta (for lower bounds: subtracted). An answer is
refused if all these bounds together exceed a thousandth of delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from murmuration.accounting.epsilon.loss_lattice import UNIT, Array, Atoms, LossLattice
from murmuration.accounting.errors import AccountingError

# The largest share of delta that the bounds of all errors together may reach.
MOST_ERROR = 1e-3
# Twice the constant of Higham's error bound for fast Fourier transforms (Accuracy and Stability of Numerical
# Algorithms, theorem 24.2), per level of the transform.
PER_LEVEL = 16 * UNIT
MOST_POINTS = 2**25
# How many standard deviations of the tilted sum the window has on either side of its mean; half of that is tried first.
SPREADS = 9.0
# A delta too small for anybody to ask about; smaller ones are not computed.
NEGLIGIBLE = 1e-25
# Coefficients below this size are taken as zero, which is charged as an error.
FAINT = 1e-40
# How many points on either side of the fullest one are transformed by formula if the FFT's error bound is too wide.
NEAR = 16


class NotConverged(AccountingError):
    """The bounds of the errors are too wide for a trustworthy answer."""


@dataclass(frozen=True)
class Moments:
    """The tilted sum of all losses: the log of its normalising constant, its mean and its standard deviation."""

    log_scale: float
    mean: float
    spread: float


@dataclass(frozen=True)
class Sum:
    """The sum of the losses of `counts[i]` independent steps of `lattices[i]`."""

    lattices: tuple[LossLattice | Atoms, ...]
    counts: tuple[int, ...]

    @cached_property
    def lost(self) -> float:
        """The amount charged to delta directly: masses at infinity and absolute errors of single steps."""
        return sum(n * (x.infinite + x.absolute) for x, n in zip(self.lattices, self.counts, strict=True))

    @cached_property
    def slack(self) -> float:
        return sum(n * x.slack for x, n in zip(self.lattices, self.counts, strict=True))

    def delta_is_below(self, delta: float, epsilon: float) -> bool:
        """Whether Chernoff's bound alone shows that delta(epsilon) is smaller than `delta`."""
        tilts = self._tilt_with_mean(epsilon) * np.array([1.0, 0.8, 0.5])
        best = min(self.moments(tilt).log_scale - tilt * (epsilon - self.slack) for tilt in tilts)
        return self.lost + 2 * math.exp(min(0.0, best)) < delta

    def moments(self, tilt: float) -> Moments:
        return _moments([(x.log_masses, x.losses, n) for x, n in zip(self.lattices, self.counts, strict=True)], tilt)

    @cached_property
    def _thinned(self) -> list[tuple[Array, Array, int]]:
        """Log masses, losses and counts of lattices with fewer points, for searches that need no bound."""
        found = []
        for lattice, count in zip(self.lattices, self.counts, strict=True):
            width = max(1, len(lattice.masses) // 8192)
            starts = np.arange(0, len(lattice.masses), width)
            masses = np.add.reduceat(lattice.masses, starts)
            kept = masses > 0
            losses = np.add.reduceat(lattice.masses * lattice.losses, starts)[kept] / masses[kept]
            found.append((np.log(masses[kept]), losses, count))
        return found

    def _moments_about(self, tilt: float) -> Moments:
        return _moments(self._thinned, tilt)

    def _tilt_for(self, delta: float, moments: Callable[[float], Moments] | None = None) -> float:
        """The tilt whose mean lies about where `delta` is reached (a saddle-point estimate, not a bound)."""
        moments = moments or self._moments_about

        def excess(log_tilt: float) -> float:
            tilt = math.exp(log_tilt)
            at = moments(tilt)
            width = 1 + math.sqrt(2 * math.pi) * tilt * (1 + tilt) * at.spread
            return at.log_scale - tilt * at.mean - math.log(width) - math.log(delta)

        return _root(excess)

    def _tilt_with_mean(self, epsilon: float, moments: Callable[[float], Moments] | None = None) -> float:
        moments = moments or self._moments_about
        return _root(lambda log_tilt: epsilon - moments(math.exp(log_tilt)).mean)


@dataclass(frozen=True)
class Composition(Sum):
    """Steps whose lattices share one interval."""

    lattices: tuple[LossLattice, ...]

    def epsilon(self, delta: float) -> float:
        """Upper bound of the epsilon at `delta`."""
        if self.lost > MOST_ERROR * delta:
            raise NotConverged(
                f"delta = {delta:g} is too small for PLD accounting: {self.lost:.3g} of it is lost to rounding; use a "
                "larger delta or more noise"
            )
        errors, loose = math.inf, math.inf
        # Thinned lattices are quick to search, but blur steps that move their mass by less than a thinned cell: the
        # search then misses the answer and leaves a bound that is sound but loose.
        for moments, near in ((self._moments_about, 0), (self.moments, NEAR)):
            try:
                value, errors, inside = self._search(delta, moments, near)
            except NotConverged:
                if loose < math.inf:
                    break
                raise
            if errors <= MOST_ERROR * delta:
                if inside:
                    return max(0.0, value)
                loose = min(loose, value)
            if not near and self.deltas([0.0])[0] <= delta:
                return 0.0
        if loose < math.inf:
            return loose
        raise NotConverged(
            f"PLD accounting did not converge: rounding may account for {errors / delta:.2g} of delta = {delta:g}; use "
            "more noise or a larger delta"
        )

    def _search(self, delta: float, moments: Callable[[float], Moments], near: int) -> tuple[float, float, bool]:
        """Upper bound of the epsilon, the sum of its error bounds, and whether it lies inside the searched window."""
        tilt, value, errors, inside = self._tilt_for(delta, moments), 0.0, math.inf, False
        for spreads in (SPREADS / 2, SPREADS, 2 * SPREADS):
            window = _Window(self, tilt, spreads, near)
            value, errors = window.epsilon(delta)
            inside = value <= 0 or value - self.slack > window.solved_from + 3 * self.interval
            if errors <= MOST_ERROR * delta and inside:
                break
            # Chernoff's tilt, the one whose mean is the answer, minimises the errors.
            tilt = self._tilt_with_mean(value, moments)
        return value, errors, inside

    def refined(self, value: float, delta: float) -> float:
        """The least of some upper bounds of the epsilon at `delta`, of which `value` is one: losses that are rare and
        large fold back into a window that is wide enough for others."""
        for _ in range(2):
            window = _Window(self, self._tilt_with_mean(value, self.moments), 2 * SPREADS, NEAR)
            found, errors = window.epsilon(delta)
            if errors > MOST_ERROR * delta or found >= value:
                break
            value = max(0.0, found)
        return value

    def epsilon_below(self, delta: float) -> float:
        """Lower bound of the epsilon at `delta`, if the lattices bound their steps from below."""
        tilt, spreads = self._tilt_for(delta), SPREADS
        window = _Window(self, tilt, spreads)
        while (outside := window.outside()) > 1e-7 and spreads < 8 * SPREADS:
            spreads *= 2
            window = _Window(self, tilt, spreads)
        return max(0.0, window.epsilon_below(delta, outside))

    def spread_at(self, delta: float) -> float:
        return self._moments_about(self._tilt_for(delta)).spread

    def deltas(self, epsilons: Iterable[float]) -> list[float]:
        """Upper bounds of delta at each epsilon."""
        asked = list(epsilons)
        windows: list[_Window] = []
        found: dict[float, float] = {}
        lowest = 1.0
        # Delta never grows with epsilon, so a bound holds from there on, even beyond the losses, where no tilt reaches.
        for value in sorted(set(asked)):
            if lowest > self.lost + NEGLIGIBLE:
                near = [w for w in windows if abs(value - w.moments.mean) <= 2 * w.moments.spread]
                if not near:
                    near = [_Window(self, self._tilt_with_mean(value), SPREADS)]
                    windows = [*windows[-1:], *near]
                lowest = min(lowest, near[-1].delta(value))
            found[value] = lowest
        return [found[value] for value in asked]

    @property
    def interval(self) -> float:
        return self.lattices[0].interval


def _moments(parts: Iterable[tuple[Array, Array, int]], tilt: float) -> Moments:
    log_scale = mean = variance = 0.0
    for log_masses, losses, count in parts:
        weights, scale = tilted(log_masses, losses, tilt)
        # Not `@`: the threads that BLAS starts for it cost more processor time than they save.
        middle = float(np.sum(weights * losses))
        log_scale, mean = log_scale + count * scale, mean + count * middle
        variance += count * float(np.sum(weights * (losses - middle) ** 2))
    return Moments(log_scale, mean, math.sqrt(variance))


def tilted(log_masses: Array, losses: Array, tilt: float) -> tuple[Array, float]:
    """Masses times exp(tilt·loss), scaled to sum to 1, and the log of the scale."""
    exponents = log_masses + tilt * losses
    largest = float(exponents.max())
    weights = np.exp(exponents - largest)
    total = float(weights.sum())
    return weights / total, largest + math.log(total)


class _Window:
    """The composed distribution around the mean of its tilted form, as masses with a bound on their error."""

    def __init__(self, parts: Composition, tilt: float, spreads: float, near: int = 0) -> None:
        self.parts, self.tilt, self.near = parts, tilt, near
        self.moments = parts.moments(tilt)
        interval = parts.interval
        needed = 2 * spreads * self.moments.spread / interval + 64
        if not needed < MOST_POINTS:
            raise NotConverged("the privacy losses spread too far for PLD accounting; use more noise or fewer steps")
        self.points = max(2**12, 2 ** math.ceil(math.log2(needed)))
        spectrum, error = self._spectrum()
        masses = np.fft.irfft(spectrum, self.points)
        # The error in the Euclidean norm over all masses.
        self.error = error + PER_LEVEL * math.log2(self.points) * _norm(masses)
        offset = sum(n * x.offset for x, n in zip(parts.lattices, parts.counts, strict=True))
        lowest = round((self.moments.mean - offset) / interval) - self.points // 2
        self.losses = offset + interval * np.arange(lowest, lowest + self.points, dtype=np.float64)
        self.masses = np.roll(masses, -(lowest % self.points))
        # Tilting back: the factors apply to the masses and to their error alike. No delta needs factors above e^700.
        self.factors = np.exp(np.minimum(self.moments.log_scale - tilt * self.losses, 700.0))
        self.weights = self.factors * np.maximum(self.masses, 0.0)

    def epsilon(self, delta: float) -> tuple[float, float]:
        """Upper bound of the epsilon, and how much of delta the bounds of all errors come to."""
        growth, lost = self._growth, self._beyond + self.parts.lost
        value = self._solve(delta / growth)
        moved = self._moved(*_shares(self.losses, value))
        # If errors may be all of delta, there is no bound; one for a larger delta at least shows where to look.
        value = max(value, self._solve(max((delta - lost) / growth - moved, 0.1 * delta)))
        return value + self.parts.slack, lost + moved + delta * (1 - 1 / growth)

    def epsilon_below(self, delta: float, outside: float) -> float:
        value, lost, growth = self._solve(delta), 0.0, self._growth
        for _ in range(8):
            # What rounding may have added at epsilons down to the floor, and the tilted mass outside the window, which
            # was counted inside it, at losses above the answer.
            floor = value - min(0.1, 1 / self.tilt)
            counted = math.exp(min(700.0, self.moments.log_scale - self.tilt * floor))
            lost = self._moved(*_shares(self.losses, floor)) + outside * counted
            value = self._solve((delta + lost) * growth)
            if value >= floor:
                below = value - 2e-12 * (1 + abs(value))
                # `_solve` rounds to the safe side of an upper bound; this bound must hold the other way round.
                sound = _hockey_stick(self.losses, self.weights, below) >= (delta + lost) * growth
                return below - self.parts.slack if sound else 0.0
        return 0.0

    def delta(self, epsilon: float) -> float:
        epsilon -= self.parts.slack
        if epsilon < self.losses[0]:
            return 1.0
        above, shares = _shares(self.losses, epsilon)
        inside = float(np.sum(self.weights[above:] * shares)) + self._moved(above, shares)
        return inside * self._growth + self._beyond + self.parts.lost

    def _moved(self, above: int, shares: Array) -> float:
        """Bound on how far the transforms' errors move delta at these shares (Cauchy-Schwarz)."""
        with np.errstate(over="ignore"):
            return self.error * _norm(self.factors[above:] * shares)

    def _spectrum(self) -> tuple[Array, float]:
        """Coefficients of the composed, tilted distribution; how far their errors may move its masses (2-norm)."""
        levels = math.log2(self.points)
        log_product = np.zeros(self.points // 2 + 1)
        factors, shift = [], 0
        for lattice, count in zip(self.parts.lattices, self.parts.counts, strict=True):
            weights, _ = tilted(lattice.log_masses, lattice.losses, self.tilt)
            # Most steps hardly touch the record, and one point may hold nearly all the mass. Without that point the
            # transform is small, and so is its error; the point itself only shifts the result, by `count` times its
            # place, and its mass is what the others leave of 1.
            fullest = int(np.argmax(weights))
            shift += count * (lattice.first + fullest)
            weights[fullest] = 0.0
            beside, by_hand = self._beside(weights, fullest) if self.near else (0.0, 0.0)
            places = (np.arange(len(weights)) - fullest) % self.points
            folded = np.bincount(places, weights=weights, minlength=self.points)
            others = float(weights.sum())
            apart = np.fft.rfft(folded) - others + beside
            # Scaled as if the transform preserved the norm; the norm of all its errors bounds each of them.
            # Pairwise summation of up to 2^24 terms rounds less than 64 times, and that error affects the one point.
            error = PER_LEVEL * levels * _norm(folded) + 64 * UNIT * others
            size = np.abs(1 + apart)
            largest = size + math.sqrt(self.points) * error + 64 * UNIT * by_hand
            log_product += count * np.log(largest)
            factors.append((apart, largest, error, np.abs(apart) + 2 * by_hand, count))
        kept = log_product > math.log(FAINT)
        log_size, angle, rounded = (np.zeros(int(kept.sum())) for _ in range(3))
        moved = FAINT
        for apart, largest, error, rounds, count in factors:
            here, bound = apart[kept], largest[kept]
            log_size += count * log_modulus(here)
            angle += count * np.arctan2(here.imag, 1 + here.real)
            # (x + e)^n - x^n <= n·e·(x + e)^(n - 1), where the other factors are no larger than their own bounds.
            moved += count * error * math.exp(float((log_product - np.log(largest)).max()))
            rounded += count * rounds[kept] / np.minimum(bound, 1.0)
        turns = np.arange(len(kept))[kept] * (shift % self.points) % self.points
        product = np.zeros(len(kept), dtype=np.complex128)
        product[kept] = np.exp(log_size) * np.exp(1j * (angle - 2 * math.pi / self.points * turns))
        # Size and angle of 1 + x round in proportion to |x| / |1 + x|, the rest in proportion to their own values.
        rounded = 32 * UNIT * (rounded + np.abs(log_product[kept]) + np.abs(angle) + 8) * np.exp(log_product[kept])
        return product, moved + _norm(rounded) * math.sqrt(2 / self.points)

    def _beside(self, weights: Array, fullest: int) -> tuple[Array, Array]:
        """What the points beside the fullest one add to each coefficient; sets their weights to zero.

        A small step moves many masses, but hardly beyond the next points: connecting the dots keeps the mean, so each
        loss between two points gives mass to both, wherever the lattice lies. The error bound of a transform charges
        every coefficient with the norm of all these masses, and T steps multiply that. Written out, a pair of points j
        to either side adds
        -2·(w₊ + w₋)·sin²(πjk/N) - i·(w₊ - w₋)·sin(2πjk/N) to coefficient k: nearly nothing for the small k that are
        left after T steps. Each such term has a relative error of at most 36 units (angle 2, sine and cosine 8 each,
        the products), their sum `near` more; the second array, times 64 units, bounds both.
        """
        wave = np.arange(self.points // 2 + 1)
        real, imaginary, sizes = (np.zeros(len(wave)) for _ in range(3))
        for distance in range(1, self.near + 1):
            pair = [0.0, 0.0]
            for side, place in enumerate((fullest - distance, fullest + distance)):
                if 0 <= place < len(weights):
                    pair[side], weights[place] = float(weights[place]), 0.0
            turn = (distance * wave + self.points // 2) % self.points - self.points // 2
            half = math.pi / self.points * turn
            sine = np.sin(half)
            even, odd = 2 * (pair[1] + pair[0]) * sine**2, 2 * (pair[1] - pair[0]) * sine * np.cos(half)
            real -= even
            imaginary -= odd
            sizes += even + 2 * abs(pair[1] - pair[0]) * np.abs(sine)
        return real + 1j * imaginary, sizes

    @cached_property
    def _growth(self) -> float:
        """A factor that bounds the relative errors of all masses together."""
        exponent = UNIT * self.points + 16 * UNIT * (
            abs(self.moments.log_scale) + self.tilt * np.abs(self.losses).max()
        )
        for lattice, count in zip(self.parts.lattices, self.parts.counts, strict=True):
            largest = 1000 + self.tilt * float(np.abs(lattice.losses).max())
            folds = len(lattice.masses) / self.points + 1
            exponent += count * (lattice.error + UNIT * (8 * largest + folds))
        return math.exp(exponent) if exponent < 1 else math.inf

    @cached_property
    def _beyond(self) -> float:
        """Bound of the mass above the window (Chernoff's, the best of a few tilts)."""
        return 2 * math.exp(min(0.0, self._log_tail(+1) + self.moments.log_scale - self.tilt * self.losses[-1]))

    def outside(self) -> float:
        """Bound of the tilted mass outside the window."""
        return 2 * (math.exp(min(0.0, self._log_tail(+1))) + math.exp(min(0.0, self._log_tail(-1))))

    def _log_tail(self, side: int) -> float:
        """Log of a bound of the tilted mass above (or below) the window."""
        end = self.losses[-1] if side > 0 else self.losses[0]
        steepest = abs(end - self.moments.mean) / max(self.moments.spread, self.parts.interval) ** 2
        found = 0.0
        for share in (1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01):
            moved = side * share * steepest
            log_scale = self.parts.moments(self.tilt + moved).log_scale
            found = min(found, log_scale - self.moments.log_scale - moved * end)
        best = self.parts._tilt_with_mean(end) - self.tilt
        if side * best > 0:
            log_scale = self.parts.moments(self.tilt + best).log_scale
            found = min(found, log_scale - self.moments.log_scale - best * end)
        return found

    @property
    def solved_from(self) -> float:
        """Near the mean, so that no factor overflows; no answer is below this loss, but the true epsilon may be."""
        return max(float(self.losses[0]), self.moments.mean - 600 / (1 + self.tilt))

    def _solve(self, target: float) -> float:
        """The epsilon at which delta, from the masses as computed, is `target`; rounded up in the last digits."""
        start = int(np.searchsorted(self.losses, self.solved_from))
        losses, weights = self.losses[start:], self.weights[start:]
        decays = np.exp(np.clip(self.moments.mean - losses, -700, 700))
        above = np.append(np.cumsum(weights[::-1])[::-1], 0.0)
        above_q = np.append(np.cumsum((weights * decays)[::-1])[::-1], 0.0)
        point = int(np.argmax(above[1:] - above_q[1:] / decays <= target))
        # Between two points delta falls linearly in exp(epsilon); all terms of this sum are positive.
        at = _hockey_stick(losses, weights, float(losses[point]))
        slope = above_q[point] / decays[point]
        step = math.log1p(max(-0.999, (at - target) / slope)) if slope > 0 else 0.0
        # Below the first of these losses nothing is known.
        value = max(float(losses[point]) + step, float(losses[0]))
        value += 1e-12 * (1 + abs(value))
        if not _hockey_stick(losses, weights, value) <= target:
            raise NotConverged("PLD accounting did not converge: the privacy losses spread too far; use more noise")
        return value


def _shares(losses: Array, epsilon: float) -> tuple[int, Array]:
    """The first place of the losses above epsilon, and what delta takes of each: 1 - exp(epsilon - loss)."""
    above = int(np.searchsorted(losses, epsilon))
    return above, -np.expm1(epsilon - losses[above:])


def _hockey_stick(losses: Array, weights: Array, epsilon: float) -> float:
    """Delta at epsilon, of these masses."""
    above, shares = _shares(losses, epsilon)
    return float(np.sum(weights[above:] * shares))


def _norm(values: Array) -> float:
    """The Euclidean norm, without threads of BLAS, as in `_moments`."""
    return math.sqrt(float(np.sum(np.square(values))))


def log_modulus(apart: NDArray[np.complex128]) -> Array:
    """log|1 + x| of complex x, accurate to the last digits even if x is small."""
    size = np.abs(1 + apart)
    with np.errstate(divide="ignore"):
        return np.where(size < 0.5, np.log(size), 0.5 * np.log1p(np.maximum(2 * apart.real + np.abs(apart) ** 2, -0.9)))


def _root(falling: Callable[[float], float]) -> float:
    """The tilt at whose logarithm a falling function is about zero, or the nearer end of a wide range."""
    low, high = math.log(1e-4), math.log(1e6)
    for _ in range(24):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return math.exp(0.5 * (low + high))
