"""Epsilon of what was released: Poisson-subsampled Gaussian steps, and epochs of random allocation, composed.

The default composes privacy loss distributions (PLD): each step is discretised pessimistically (`loss_lattice`, or
`allocation` for an epoch), the composition is a tilted Fourier transform whose rounding is bounded and added to delta
(`composition`), so the result is an upper bound on every processor. RDP serves as a second opinion on Poisson samples.
If all steps have q = 1, they are a plain Gaussian mechanism and are answered in closed form. A result that did not
converge is an error, never a guess.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

import numpy as np

from murmuration.accounting.epsilon.composition import MOST_ERROR, Composition
from murmuration.accounting.epsilon.contour import Contour
from murmuration.accounting.epsilon.gaussian import gaussian_delta, gaussian_epsilon
from murmuration.accounting.epsilon.loss_lattice import LossLattice, cells, dots, lower, upper
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event

if TYPE_CHECKING:  # takes longer to import than most answers; RDP and capped batches need it
    import dp_accounting

__all__ = [
    "Accountant", "affordable_steps", "delta_at", "deltas_at", "describe", "epsilon",
    "epsilon_below", "gaussian_epsilon", "halve", "interval_for", "larger_epsilon", "merge", "plain_sigma",
    "quick_epsilon", "round_up", "show_delta", "show_epsilon", "within",
]  # fmt: skip

Accountant = Literal["pld", "rdp"]
INTERVAL = 1e-4
# Processors round differently: a plan calibrated on one must stay within its budget on all others.
MARGIN = 1e-8
# The lattice is made finer if the sum of all losses spreads over fewer intervals than this.
LEAST_SPREAD = 2000
# `quick_epsilon`: the intervals that the spread of all losses must cover, the share of it by which rounding each step's
# loss may blur it, and the cells of a lattice beyond which it is made no finer.
QUICK_SPREAD, QUICK_BLUR, QUICK_CELLS = 500, 0.02, 2**15
QUICK_INTERVAL = 2**8 * INTERVAL
# A lower bound uses a finer lattice if rounding the losses would take more than this off their sum.
MOST_ROUNDED = 3e-4
# A lattice that adds more than this part of epsilon is replaced by a contour integral.
MOST_ADDED = 1e-3
# Lattice cells of one of `other_pairs`, times records: about a second. Beyond that the interval grows.
MOST_WORK = 2**21


def describe(accountant: Accountant) -> dict[str, object]:
    """What the ledger records about the method, so that a reader can repeat it."""
    settings: dict[str, object] = {"accountant": accountant, "dp_accounting": version("dp-accounting")}
    if accountant == "pld":
        settings |= {
            "interval": INTERVAL, "estimate": "pessimistic", "composition": "tilted-fft", "most_error": MOST_ERROR,
        }  # fmt: skip
    return settings


def merge(events: Iterable[Event]) -> list[Event]:
    """Equal mechanisms counted together: composition does not depend on order."""
    counts: dict[Event, int] = {}
    for event in events:
        kind = event.kind
        counts[kind] = counts.get(kind, 0) + event.count
    merged = [replace(kind, count=count) for kind, count in counts.items() if count]
    return sorted(merged, key=lambda e: (e.rate, e.sigma, e.cap or 0, e.records or 0, e.slots))


def epsilon(events: Sequence[Event], delta: float, accountant: Accountant = "pld") -> float:
    """Epsilon at `delta` of all the events together."""
    if not 0 < delta < 1:
        raise AccountingError(f"delta must lie in (0, 1), but is {delta}")
    merged = merge(events)
    if not merged:
        return 0.0
    if accountant == "rdp":
        value = _rdp_epsilon(tuple(merged), delta)
    elif (sigma := plain_sigma(merged)) is not None:
        value = gaussian_epsilon(sigma, delta)  # nothing was sampled: exact, without a lattice
    else:
        value = _pld_epsilon(tuple(merged), delta)
    # A number that is none would print as a promise: better no answer.
    if not math.isfinite(value) or value < 0:
        raise AccountingError(f"the {accountant} accountant did not converge (epsilon = {value}) for {merged}")
    return value


def quick_epsilon(events: Sequence[Event], delta: float) -> float:
    """A looser upper bound of the PLD epsilon from lattices of few points: milliseconds, for searches that `epsilon`
    ends.

    The lattice starts coarse and is refined until its interval is small beside the spread of the sum of all losses.
    """
    merged = merge(events)
    if not merged or plain_sigma(merged) is not None or any(event.cap is not None for event in merged):
        return epsilon(merged, delta)
    blurred = 2 * QUICK_BLUR / math.sqrt(sum(event.count for event in merged))
    interval = QUICK_INTERVAL
    while True:
        both = _compositions(merged, interval)
        wanted = both[0].spread_at(delta) * min(1 / QUICK_SPREAD, blurred)
        room = QUICK_CELLS / max(len(lattice.masses) for lattice in both[0].lattices)
        # Without a spread, all losses lie on one point of the lattice, which is too coarse then.
        finer = math.floor(math.log2(max(1.0, min(interval / wanted if wanted > 0 else room, room))))
        if finer == 0:
            return larger_epsilon(both, delta)
        interval /= 2**finer


def epsilon_below(events: Sequence[Event], delta: float) -> float | None:
    """A lower bound of the epsilon at `delta`, so that a reader sees how tight `epsilon` is; None for capped batches.

    It considers only one of the two directions (with the record against without it), which is enough for a lower bound.
    """
    merged = merge(events)
    if not merged:
        return 0.0
    if any(event.cap is not None for event in merged):
        return None
    if (sigma := plain_sigma(merged)) is not None:
        value = gaussian_epsilon(sigma, delta)
        return max(0.0, value - 1e-9 * (1 + value))
    counts = tuple(event.count for event in merged)
    interval, best = interval_for(merged, delta), (math.inf, ())
    for finer in (1, 2, 4):
        lattices = tuple(_below(event, interval / finer) for event in merged)
        rounded = sum(n * lattice.rounded for n, lattice in zip(counts, lattices, strict=True))
        best = min(best, (rounded, lattices), key=lambda found: found[0])
        if rounded < MOST_ROUNDED:
            break
    value = Composition(best[1], counts).epsilon_below(delta)
    if all(event.slots == 1 for event in merged):
        with suppress(AccountingError):
            finer = Contour.of([(cells(event.rate, event.sigma), event.count) for event in merged], delta)
            if _added(Composition(best[1], counts), finer, delta) > MOST_ADDED * value:
                value = max(value, finer.epsilon_below(delta))
    return value


def delta_at(events: Sequence[Event], epsilon: float) -> float:
    """Smallest provable delta at `epsilon` of all the events together (exact for q = 1, PLD otherwise)."""
    return deltas_at(events, [epsilon], 1e-6)[0]


def deltas_at(events: Sequence[Event], epsilons: Sequence[float], about: float) -> list[float]:
    """The same at several epsilons; `about` is a delta of the size that matters, which sets the lattice's interval."""
    for value in epsilons:
        if not (math.isfinite(value) and value >= 0):
            raise AccountingError(f"epsilon must be finite and at least 0, but is {value}")
    merged = merge(events)
    if not merged:
        return [0.0 for _ in epsilons]
    if (sigma := plain_sigma(merged)) is not None:
        return [gaussian_delta(sigma, value) for value in epsilons]
    both = _compositions(merged, interval_for(merged, about))
    found = [max(pair) for pair in zip(*(side.deltas(epsilons) for side in both), strict=True)]
    value = max(epsilons, default=0.0)
    if (contours := _contours(merged, about)) and _added(both[0], contours[0], about) > MOST_ADDED * value:
        with suppress(AccountingError):
            finer = [max(pair) for pair in zip(*(side.deltas(epsilons) for side in contours), strict=True)]
            found = [min(pair) for pair in zip(found, finer, strict=True)]
    return found


def round_up(value: float, digits: int = 4) -> float:
    """Decimal rounding that never makes a promise look better than it is."""
    scale = 10**digits
    rounded = math.ceil(value * scale) / scale
    return rounded if rounded >= value else (math.ceil(value * scale) + 1) / scale


def show_epsilon(value: float, digits: int = 4) -> str:
    """The same as text, where `:g` has six digits in all and rounds to the nearest. What was rounded stays as it is."""
    shown = f"{value:.{digits}f}"
    return (shown if float(shown) >= value else f"{round_up(value, digits):.{digits}f}").rstrip("0").rstrip(".")


def show_delta(delta: float, digits: int = 3) -> str:
    """Significant digits, rounded up: a delta below the true one would be a better promise."""
    shown = f"{delta:.{digits}g}"  # which the last bits of a sum of such numbers do not round up
    if float(shown) >= delta * (1 - 1e-12):
        return shown
    return f"{float(shown) + 10.0 ** (1 - digits + math.floor(math.log10(delta))):.{digits}g}"


def plain_sigma(events: Sequence[Event]) -> float | None:
    """Noise of the one Gaussian mechanism that full-batch steps amount to; None if anything was sampled."""
    if any(event.rate != 1 or event.cap is not None for event in events):
        return None
    return sum(e.count / e.sigma**2 for e in events) ** -0.5


def affordable_steps(charged: Sequence[Event], kind: Event, wanted: int, budget: float, delta: float) -> int:
    """How many of `wanted` further steps (or epochs) of a kind fit the budget after `charged`."""

    def fits(count: int) -> bool:
        return within(epsilon([*charged, replace(kind, count=count)], delta), budget)

    # Most often all of them fit, or none: two questions then answer what halving takes a dozen for.
    if wanted <= 0 or not fits(1):
        return 0
    if fits(wanted):
        return wanted
    return halve(fits, 1, wanted)


def within(spent: float, target: float) -> bool:
    """Whether a budget is kept, on whichever processor this is computed again."""
    return spent <= target * (1 - MARGIN)


def halve(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Largest number that fits between `low`, which does, and `high`, which does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@lru_cache(maxsize=256)
def _rdp_epsilon(events: tuple[Event, ...], delta: float) -> float:
    return rdp_epsilon([(dp_event(event), event.count) for event in events], delta)


@lru_cache(maxsize=256)
def _pld_epsilon(events: tuple[Event, ...], delta: float) -> float:
    both = _compositions(events, interval_for(events, delta))
    value = larger_epsilon(both, delta)
    # Each is an upper bound, so the smaller one holds. The second is dear, and only asked for where rounding losses up
    # to the lattice's points costs enough.
    if (
        value > 0
        and (contours := _contours(events, delta))
        and _added(both[0], contours[0], delta) > MOST_ADDED * value
    ):
        try:
            value = min(value, larger_epsilon(contours, delta))
        except AccountingError:  # single steps matter: few of them, each with rare large losses
            with suppress(AccountingError):
                value = max(side.refined(value, delta) for side in both)
    return value


def _added(lattice: Composition, contour: Contour, delta: float) -> float:
    """About how much a lattice adds to epsilon: Chernoff's bound of it with the same losses, less that without it."""
    tilt = contour._tilt_for(delta)
    parts = []
    for on, off in zip(lattice.lattices, contour.lattices, strict=True):
        end = int(np.searchsorted(on.losses, off.losses.max()))
        parts.append(replace(on, masses=on.masses[: end + 1]))
    # Of few steps the largest losses, which the two cut off at different places, may matter as much.
    coarse = Composition(tuple(parts), lattice.counts).moments(tilt).log_scale
    return abs(coarse - contour.moments(tilt).log_scale) / tilt


def _contours(events: Sequence[Event], delta: float) -> tuple[Contour, Contour] | None:
    """As `_compositions`, on no lattice; None for what is known on a lattice alone."""
    if any(event.cap is not None or event.slots > 1 for event in events):
        return None
    try:
        pairs = [(dots(event.rate, event.sigma), event.count) for event in events]
    except AccountingError:
        return None
    first, second = (Contour.of([(pair[k], count) for pair, count in pairs], delta) for k in (0, 1))
    return first, second


def larger_epsilon(both: Iterable[Composition | Contour], delta: float) -> float:
    """The larger epsilon of the two directions; the second is only bounded where that shows it to be smaller."""
    first, second = both
    value = first.epsilon(delta)
    return value if second.delta_is_below(delta, value) else max(value, second.epsilon(delta))


def interval_for(events: Sequence[Event], delta: float) -> float:
    """1e-4, or that divided by a power of two if the losses are so small that it would be coarse."""
    if any(event.cap is not None for event in events):
        return INTERVAL
    spread = _compositions(events, INTERVAL)[0].spread_at(delta)
    return INTERVAL / 2 ** min(12, max(0, math.ceil(math.log2(LEAST_SPREAD * INTERVAL / spread))))


def _compositions(events: Sequence[Event], interval: float) -> tuple[Composition, Composition]:
    """All steps together, in both directions: with the record against without it, and the reverse."""
    pairs = [_above(event, interval) for event in events]
    counts = tuple(event.count for event in events)
    return Composition(tuple(x for x, _ in pairs), counts), Composition(tuple(x for _, x in pairs), counts)


def _above(event: Event, interval: float) -> tuple[LossLattice, LossLattice]:
    if event.cap is not None:
        return _capped(replace(event, count=1))
    if event.slots > 1:
        from murmuration.accounting.epsilon.allocation import allocated  # most runs draw Poisson samples

        return allocated(event.slots, event.sigma, interval)
    return upper(event.rate, event.sigma, interval)


def _below(event: Event, interval: float) -> LossLattice:
    if event.slots > 1:
        from murmuration.accounting.epsilon.allocation import allocated_below

        return allocated_below(event.slots, event.sigma, interval)
    return lower(event.rate, event.sigma, interval)


@lru_cache(maxsize=8)
def _capped(kind: Event) -> tuple[LossLattice, LossLattice]:
    """dp_accounting's discretisation, whose masses are differences: one step's delta is assumed accurate to 2^-52."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    assert kind.cap is not None and kind.records is not None
    try:
        found = pld.from_truncated_subsampled_gaussian_mechanism(
            kind.records, kind.rate, kind.cap, kind.sigma, value_discretization_interval=INTERVAL
        )
    except (ValueError, MemoryError, OverflowError) as error:
        raise AccountingError(f"the pld accountant cannot discretise {kind}: {error}; use more noise") from None
    pair = []
    for dense in (found._pmf_remove.to_dense_pmf(), found._pmf_add.to_dense_pmf()):
        masses = np.maximum(np.asarray(dense._probs, dtype=np.float64), 0.0)
        pair.append(LossLattice(INTERVAL, dense._lower_loss, masses, infinite=dense._infinity_mass, absolute=2.0**-52))
    return pair[0], pair[1]


def dp_event(event: Event) -> dp_accounting.DpEvent:
    """One of the event's steps, as dp_accounting's RDP accountant knows it."""
    import dp_accounting

    if event.cap is not None:
        raise AccountingError("RDP cannot account for a capped batch; use the PLD accountant")
    if event.slots > 1:
        raise AccountingError("RDP accounts for Poisson samples, not for random allocation; use the PLD accountant")
    return dp_accounting.PoissonSampledDpEvent(event.rate, dp_accounting.GaussianDpEvent(event.sigma))


def rdp_epsilon(events: Sequence[tuple[dp_accounting.DpEvent, int]], delta: float) -> float:
    """dp_accounting's RDP epsilon, or an error if its orders do not support it."""
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    absl_logger = logging.getLogger("absl")
    level = absl_logger.level
    absl_logger.setLevel(logging.CRITICAL)  # its per-order warnings become one error below
    try:
        for event, count in events:
            accountant.compose(event, count)
        value, order = accountant.get_epsilon_and_optimal_order(delta)
    finally:
        absl_logger.setLevel(level)
    orders, divergences = np.asarray(accountant._orders), np.asarray(accountant._rdp)  # it shows neither
    if np.isnan(divergences).any() or (divergences < 0).any():
        # The library answers a negative divergence with epsilon = 0.
        raise AccountingError("RDP accounting is numerically unstable here; use the PLD accountant")
    usable = orders[np.isfinite(divergences)]
    # The bound is convex in the order: an optimum inside the converged orders is the optimum, one at their edge not.
    if not usable.size or order <= usable.min() or order >= usable.max():
        raise AccountingError(
            f"RDP accounting did not converge: its best order {order:g} is the last usable one of "
            f"[{usable.min() if usable.size else math.nan:g}, {usable.max() if usable.size else math.nan:g}]; "
            "use the PLD accountant"
        )
    return float(value)
