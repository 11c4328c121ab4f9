"""Limits on what any test can find out: the most true members that it finds at each share of false alarms.

A test that says "the record was used" is wrong about unused ones with probability α (false alarms) and right about used
ones with probability β. Each (ε, δ(ε)) that a run satisfies bounds β ≤ e^ε·α + δ(ε) and, since neighbours may be
exchanged, 1 - α ≤ e^ε·(1 - β) + δ(ε). Where δ(ε) is known for many ε (from the composed privacy losses, each an upper
bound), the smallest of all these bounds is far below what a single (ε, δ) gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.special import ndtr, ndtri

from murmuration.accounting.epsilon.accountant import deltas_at, epsilon, merge, plain_sigma
from murmuration.accounting.event import Event

POINTS = 96
# The shares of false alarms that the picture and the tables show.
GRID = (
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7,
    0.9,
)  # fmt: skip
# More than any rounding of the few operations here; limits are widened by it.
ROUNDING = 1e-12


@dataclass(frozen=True)
class GaussianFit:
    """The Gaussian differential privacy (Dong, Roth and Su 2022) that the run is compared with.

    At each share of false alarms, β is at most that of telling N(0, 1) from N(μ, 1), plus δ. `gap` is the most by which
    that exceeds the bound on β itself: how much is lost by stating μ instead of the curve.
    """

    mu: float
    delta: float
    gap: float


@dataclass(frozen=True)
class TradeOff:
    """Proved deltas at ascending epsilons, the first of which is 0; for a plain Gaussian, its sigma as well."""

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]
    sigma: float | None = None

    def power(self, false_alarms: float) -> float:
        """Upper bound of the share of true members that are found."""
        alpha, (epsilons, deltas) = false_alarms, self._lines
        if self.sigma is not None:
            exact = float(ndtr(ndtri(alpha) + 1 / self.sigma)) if 0 < alpha < 1 else float(alpha >= 1)
            return min(1.0, exact + ROUNDING)
        # An exponential that is too large for a double bounds nothing.
        grown = np.exp(np.minimum(epsilons, 700.0)) * alpha + deltas
        shrunk = 1 - np.exp(-epsilons) * (1 - alpha - deltas)
        return float(max(0.0, min(1.0, grown.min() + ROUNDING, shrunk.min() + ROUNDING)))

    def false_alarms(self, power: float) -> float:
        """Lower bound of the share of false alarms at which this share of members is found: the inverse of `power`."""
        if power <= 0:
            return 0.0
        if self.sigma is not None:
            return float(ndtr(ndtri(min(1.0, power)) - 1 / self.sigma)) * (1 - ROUNDING)
        epsilons, deltas = self._lines
        shrunk = (power - deltas) * np.exp(-epsilons)
        grown = 1 - deltas - (1 - power) * np.exp(np.minimum(epsilons, 700.0))
        return max(0.0, float(max(shrunk.max(), grown.max())) - ROUNDING * power)

    def best_guess(self) -> float:
        """Upper bound of the share of right answers of a spy with even prior odds: half of 1 + total variation."""
        # β - α ≤ e^ε·α + δ - α, and with the mirrored bound (e^ε - 1 + 2δ) / (e^ε + 1) for each ε.
        epsilons, deltas = self._lines
        apart = np.tanh(epsilons / 2) + 2 * deltas / (1 + np.exp(np.minimum(epsilons, 700.0)))
        return min(1.0, 0.5 + 0.5 * float(apart.min()) + ROUNDING)

    def fit(self) -> GaussianFit:
        """The fit with the smallest μ that can be proved, from the corners of the bound.

        Between two corners the bound is straight and the Gaussian's curve is concave, so it suffices to look at the
        corners; the other half mirrors this one. Left of the last corner the bound ends at δ and the Gaussian's curve
        at 0: there the curve is below the bound by less than δ.
        """
        if self.sigma is not None:
            return GaussianFit(1 / self.sigma, 0.0, 0.0)
        epsilons, deltas = self._lines
        corners = _corners(epsilons, deltas)
        last = float(deltas[-1])
        mu = max((float(ndtri(power) - ndtri(alpha)) for alpha, power in corners if power > alpha > 0), default=0.0)
        if not math.isfinite(mu):
            return GaussianFit(math.inf, last, 1.0)
        mu = max(0.0, mu) * (1 + 1e-9) + 1e-12
        gaussian = ndtr(mu / 2 - epsilons / mu) - np.exp(np.minimum(epsilons, 700.0)) * ndtr(-mu / 2 - epsilons / mu)
        return GaussianFit(mu, last, float(np.clip((gaussian - deltas).max(), 0.0, 1.0)))

    @property
    def _lines(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.epsilons), np.array(self.deltas)


def of_events(events: Sequence[Event], delta: float) -> TradeOff:
    """The curve between epsilon = 0 and the epsilon at `delta`."""
    merged = merge(events)
    sigma = plain_sigma(merged) if merged else None
    return up_to(epsilon(merged, delta), delta, lambda asked: deltas_at(merged, asked, delta), sigma)


def up_to(
    highest: float, delta: float, deltas_of: Callable[[Sequence[float]], Sequence[float]], sigma: float | None = None
) -> TradeOff:
    """The curve between epsilon = 0 and `highest`, the epsilon at `delta`; `deltas_of` gives proved deltas."""
    asked = [0.0, *(highest * (k + 1) / POINTS for k in range(POINTS))] if highest > 0 else [0.0]
    deltas = deltas_of(asked)
    # The accountant's epsilon at delta is at least as good as what the curve gives there.
    return TradeOff(tuple(asked), (*deltas[:-1], min(deltas[-1], delta)) if highest > 0 else tuple(deltas), sigma)


def of_point(epsilon: float, delta: float) -> TradeOff:
    """The curve if only one (epsilon, delta) is known."""
    # At epsilon = 0: the largest total variation distance that a mechanism with just this promise may have.
    total = (math.expm1(min(epsilon, 700.0)) + 2 * delta) / (1 + math.exp(min(epsilon, 700.0)))
    return TradeOff((0.0, epsilon), (min(1.0, total), delta)) if epsilon > 0 else TradeOff((0.0,), (delta,))


def _corners(epsilons: np.ndarray, deltas: np.ndarray) -> list[tuple[float, float]]:
    """Where the lowest of the lines e^ε·α + δ passes from one to the next: the lower envelope, steepest line last.

    The first corner is the one with the mirrored bound, on the diagonal 1 - α = β.
    """
    slopes = np.exp(np.minimum(epsilons, 700.0))
    envelope: list[int] = []
    for index in range(len(slopes)):
        if deltas[index] >= 1 or (envelope and deltas[index] >= deltas[envelope[-1]]):
            continue  # a steeper line that does not begin lower adds no bound
        while len(envelope) > 1 and _crossing(slopes, deltas, envelope[-1], index) >= _crossing(
            slopes, deltas, envelope[-2], envelope[-1]
        ):
            envelope.pop()
        envelope.append(index)
    if not envelope:
        return [(0.5, 1.0)]
    first = envelope[0]
    middle = float((1 - deltas[first]) / (1 + slopes[first]))
    found = [(middle, 1 - middle)]
    for left, right in pairwise(envelope):
        alpha = _crossing(slopes, deltas, left, right)
        found.append((min(alpha, middle), float(slopes[right] * min(alpha, middle) + deltas[right])))
    return [(alpha, min(power, 1 - 1e-16)) for alpha, power in found]


def _crossing(slopes: np.ndarray, deltas: np.ndarray, left: int, right: int) -> float:
    return float((deltas[left] - deltas[right]) / (slopes[right] - slopes[left]))
