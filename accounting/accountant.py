"""Epsilon of what was released: Poisson-subsampled Gaussian steps, composed.

PLD is the default: a pessimistic discretisation (dp_accounting's connect-the-dots, interval 1e-4) whose
result is an upper bound. RDP stands beside it as a second opinion. Steps with q = 1 alone are a plain
Gaussian mechanism and are answered in closed form. A result that did not converge is an error, never a guess.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Literal

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant
from scipy.special import log_ndtr

Accountant = Literal["pld", "rdp"]
INTERVAL = 1e-4
TAIL_MASS = 1e-15


class AccountingError(ValueError):
    """No trustworthy epsilon can be given; the message says why."""


@dataclass(frozen=True)
class Event:
    """`count` steps in which each record took part with probability `rate`, noised with `sigma` = std / sensitivity."""

    rate: float
    sigma: float
    count: int

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise AccountingError(f"a sampling rate must lie in (0, 1], but is {self.rate}")
        if not (math.isfinite(self.sigma) and self.sigma > 0):
            raise AccountingError(f"a noise multiplier must be finite and positive, but is {self.sigma}")
        if self.count < 0:
            raise AccountingError(f"a step count cannot be negative, but is {self.count}")


def describe(accountant: Accountant) -> dict[str, object]:
    """What the ledger records about the method, so that a reader can repeat it."""
    settings: dict[str, object] = {"accountant": accountant, "dp_accounting": version("dp-accounting")}
    if accountant == "pld":
        settings |= {"interval": INTERVAL, "tail_mass": TAIL_MASS, "estimate": "pessimistic"}
    return settings


def merge(events: Iterable[Event]) -> list[Event]:
    """Equal mechanisms counted together: composition does not depend on order."""
    counts: dict[tuple[float, float], int] = {}
    for event in events:
        counts[event.rate, event.sigma] = counts.get((event.rate, event.sigma), 0) + event.count
    return [Event(rate, sigma, count) for (rate, sigma), count in sorted(counts.items()) if count]


def epsilon(events: Sequence[Event], delta: float, accountant: Accountant = "pld") -> float:
    """Epsilon at `delta` of all the events together."""
    if not 0 < delta < 1:
        raise AccountingError(f"delta must lie in (0, 1), but is {delta}")
    merged = merge(events)
    if not merged:
        return 0.0
    if all(event.rate == 1 for event in merged):
        return gaussian_epsilon(sum(e.count / e.sigma**2 for e in merged) ** -0.5, delta)
    value = _pld_epsilon(merged, delta) if accountant == "pld" else _rdp_epsilon(merged, delta)
    if not math.isfinite(value) or value < 0:
        raise AccountingError(f"the {accountant} accountant did not converge (epsilon = {value}) for {merged}")
    return value


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Exact epsilon of one Gaussian mechanism (Balle and Wang 2018), the upper end of the last bisection interval."""

    def log_delta(eps: float) -> float:
        first = log_ndtr(0.5 / sigma - eps * sigma)
        second = eps + log_ndtr(-0.5 / sigma - eps * sigma)
        return first + math.log1p(-math.exp(min(second - first, -1e-300))) if second < first else -math.inf

    if log_delta(0.0) <= math.log(delta):
        return 0.0
    low, high = 0.0, 1.0
    while log_delta(high) > math.log(delta):
        low, high = high, high * 2
        if high > 1e9:
            raise AccountingError(f"no finite epsilon for sigma = {sigma} at delta = {delta}")
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if log_delta(middle) > math.log(delta) else (low, middle)
    return high


def round_up(value: float, digits: int = 4) -> float:
    """Decimal rounding that never makes a promise look better than it is."""
    scale = 10**digits
    rounded = math.ceil(value * scale) / scale
    return rounded if rounded >= value else (math.ceil(value * scale) + 1) / scale


@lru_cache(maxsize=64)
def _one_step(rate: float, sigma: float) -> pld.PrivacyLossDistribution:
    return pld.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=INTERVAL, pessimistic_estimate=True
    )


def _pld_epsilon(events: Sequence[Event], delta: float) -> float:
    # The mass cut off the tails is added to delta by the library, but it must stay far below it to be harmless.
    if TAIL_MASS * sum(1 for _ in events) > delta / 1000:
        raise AccountingError(f"delta = {delta} is too small for PLD accounting (at least {1000 * TAIL_MASS:g})")
    total: pld.PrivacyLossDistribution | None = None
    for event in events:
        part = _one_step(event.rate, event.sigma).self_compose(event.count, TAIL_MASS)
        total = part if total is None else total.compose(part, TAIL_MASS)
    assert total is not None
    return float(total.get_epsilon_for_delta(delta))


def _rdp_epsilon(events: Sequence[Event], delta: float) -> float:
    accountant = RdpAccountant()
    absl_logger = logging.getLogger("absl")
    level = absl_logger.level
    absl_logger.setLevel(logging.ERROR)  # its per-order warnings become one error below
    try:
        for event in events:
            gaussian = dp_accounting.GaussianDpEvent(event.sigma)
            accountant.compose(dp_accounting.PoissonSampledDpEvent(event.rate, gaussian), event.count)
        value, order = accountant.get_epsilon_and_optimal_order(delta)
    finally:
        absl_logger.setLevel(level)
    orders, divergences = np.asarray(accountant._orders), np.asarray(accountant._rdp)
    usable = orders[np.isfinite(divergences)]
    # The bound is convex in the order: an optimum inside the converged orders is the optimum, one at their edge is not.
    if not usable.size or order <= usable.min() or order >= usable.max():
        raise AccountingError(
            f"RDP accounting did not converge: its best order {order:g} is the last usable one of "
            f"[{usable.min() if usable.size else math.nan:g}, {usable.max() if usable.size else math.nan:g}]; "
            "use the PLD accountant"
        )
    return float(value)
