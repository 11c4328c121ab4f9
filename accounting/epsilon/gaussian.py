"""One Gaussian mechanism in closed form (Balle and Wang 2018), evaluated so that rounding errors never help the claim.

Any number of full-batch steps is one Gaussian mechanism, and so is every upper bound of a run that cannot count
on secret sampling.
"""

from __future__ import annotations

import math

from scipy.special import log_ndtr

from murmuration.accounting.errors import AccountingError

# Bounds the relative error of log_ndtr and of the few operations around it, with room to spare.
ROUNDING = 8e-16


def log_delta(sigma: float, epsilon: float) -> float:
    """Upper bound of log delta(epsilon) for noise `sigma` and sensitivity 1."""
    first = float(log_ndtr(0.5 / sigma - epsilon * sigma))
    second = epsilon + float(log_ndtr(-0.5 / sigma - epsilon * sigma))
    # delta is a difference of two nearly equal numbers: what rounding may have hidden of it is added back.
    error = ROUNDING * (1 + abs(first) + abs(epsilon) + abs(second - epsilon))
    gap = min(second - first, 0.0) - error
    return min(0.0, first + error + math.log(-math.expm1(gap)))


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Exact epsilon of one Gaussian mechanism: the upper end of the last bisection interval."""
    target = math.log(delta)
    if log_delta(sigma, 0.0) <= target:
        return 0.0
    low, high = 0.0, 1.0
    while log_delta(sigma, high) > target:
        low, high = high, high * 2
        if high > 1e9:
            raise AccountingError(
                f"no finite epsilon for sigma = {sigma} at delta = {delta}; use more noise or a larger delta"
            )
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if log_delta(sigma, middle) > target else (low, middle)
    return high


def gaussian_delta(sigma: float, epsilon: float) -> float:
    return math.exp(log_delta(sigma, epsilon))


def unamplified_epsilon(sigma: float, steps: int, expected_batch: float, records: int, delta: float) -> float:
    """The epsilon to claim if batches are shuffled slices of epochs and not Poisson samples: no amplification.

    A record then takes part ceil(steps·B/n) times, at places that an adversary may know.
    """
    return gaussian_epsilon(sigma / math.sqrt(participations(steps, expected_batch, records)), delta)


def participations(steps: int, expected_batch: float, records: int) -> int:
    return max(1, math.ceil(steps * expected_batch / records - 1e-9))
