"""What one logical step is worth: Bu et al.'s improvement formula, and the batch size that it favours.

A step moves the weights by -η·G with G = (Σ cᵢgᵢ + s·N) / B: cᵢ the clip factors, c their mean, s = σ·C the noise. To
second order the loss then falls by η·c·‖g‖² - ½η²c²·D on average, with

    D = gᵀHg + sampling + s²·tr(H) / (c²B²),

and by ½‖g‖⁴ / D at the best η. Without privacy the last term, the decelerator, is absent. Bu et al. write tr(HΣ)/B for
the sampling term: batches of fixed size, as in public phases here. A Poisson draw divided by the constant q·n
has (1-q)·(tr(HΣ) + gᵀHg)/B. The clipped mean is taken to be c·g, as they do; `clip_alignment` says how well that holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.event import Event
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import RATE_DENOMINATOR, threshold_for
from murmuration.train.public.curvature import Curvature

FACTORS = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
SIGMA_DIGITS = 3


@dataclass(frozen=True)
class Mechanism:
    """What a step adds to the slope: sampling and, in a private phase, clipping and noise."""

    batch: float
    rate: float | None = None
    """q of a Poisson draw; None for batches of fixed size."""
    noise_std: float = 0.0
    clip_factor: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """What the best step of plain SGD brings."""

    improvement: float
    without_noise: float
    decelerator: float
    """The noise's share of D: near 1, the noise decides what a step is worth; near 0, it costs nothing."""


def predict(curvature: Curvature, mechanism: Mechanism) -> Prediction | None:
    """None where the loss does not curve upwards on average: no best step exists there."""
    batch, factor = mechanism.batch, mechanism.clip_factor
    sampling = curvature.spread / batch
    if mechanism.rate is not None:
        sampling = (1 - mechanism.rate) * (curvature.spread + curvature.along) / batch
    quiet = curvature.along + sampling
    noise = mechanism.noise_std**2 * curvature.trace / (factor * batch) ** 2 if factor > 0 else math.inf
    if not (quiet > 0 and quiet + noise > 0 and math.isfinite(quiet + noise)):
        return None
    half = 0.5 * curvature.slope**2
    return Prediction(
        improvement=half / (quiet + noise), without_noise=half / quiet, decelerator=noise / (quiet + noise)
    )


def best_batch_at_fixed_noise(curvature: Curvature, mechanism: Mechanism) -> float | None:
    """√(s²·tr(H) / (c²·gᵀHg)): beyond it, one more record in the batch brings less than it costs."""
    if not (curvature.along > 0 and curvature.trace > 0 and mechanism.clip_factor > 0):
        return None
    return mechanism.noise_std / mechanism.clip_factor * math.sqrt(curvature.trace / curvature.along)


@dataclass(frozen=True)
class Choice:
    """A batch size with the noise that the accountant asks for when the same records are drawn in all."""

    batch: float
    steps: int
    sigma: float


def choices(plan: PrivacyPlan, factors: Sequence[float] = FACTORS) -> list[Choice]:
    """Around the plan's batch: the gradients' ε, δ, n and B·T stay as planned; σ is calibrated anew for each B."""
    target = epsilon([Event(plan.sampling_rate, plan.noise_multiplier, plan.steps)], plan.delta)
    found = []
    for factor in factors:
        batch, steps = plan.divisor * factor, round(plan.steps / factor)
        if not (1 <= batch <= plan.records and steps >= 1):
            continue
        sigma = plan.noise_multiplier
        if factor != 1:
            rate = threshold_for(plan.records, batch) / RATE_DENOMINATOR
            try:
                sigma = calibrate_sigma(Event(rate, 1.0, steps), target, plan.delta, digits=SIGMA_DIGITS)
            except AccountingError:
                continue  # no answer that far from the plan
        found.append(Choice(batch, steps, sigma))
    return found


def at_batch(now: Mechanism, plan: PrivacyPlan, batch: float, sigma: float) -> Mechanism:
    """The phase's mechanism with another batch and noise multiplier, clipping as it does now."""
    noise = now.noise_std / plan.noise_multiplier * sigma
    return Mechanism(batch, min(1.0, batch / plan.records), noise, now.clip_factor)


def suggest(
    curvature: Curvature, now: Mechanism, plan: PrivacyPlan, known: Sequence[Choice]
) -> tuple[float, float] | None:  # fmt: skip
    """(B, σ(B)) of the largest predicted improvement per record; log σ is interpolated linearly in log B between the
    calibrated batches."""
    logs = np.log([choice.batch for choice in known])
    best: tuple[float, float, float] | None = None
    for at in np.linspace(logs[0], logs[-1], 129):
        batch = math.exp(at)
        sigma = math.exp(float(np.interp(at, logs, np.log([choice.sigma for choice in known]))))
        found = predict(curvature, at_batch(now, plan, batch, sigma))
        if found is not None and (best is None or found.improvement / batch > best[0]):
            best = (found.improvement / batch, batch, sigma)
    return None if best is None else (best[1], best[2])


def said(batch: float, known: Sequence[Choice]) -> str:
    """The batch as text; at either end of the range that was tried, the best may lie beyond."""
    beyond = " or less" if batch <= 1.001 * known[0].batch else ""
    return f"{batch:,.0f}" + (" or more" if batch >= 0.999 * known[-1].batch else beyond)


def table(curvature: Curvature, now: Mechanism, plan: PrivacyPlan, known: Sequence[Choice]) -> list[str]:
    """What each batch size would be worth at these weights, for people."""
    rows = [f"{'batch':>12} {'steps':>8} {'σ':>8} {'gain/step':>11} {'gain/record':>12} {'noise share':>12}"]
    for choice in known:
        found = predict(curvature, at_batch(now, plan, choice.batch, choice.sigma))
        start = f"{choice.batch:>12,.0f} {choice.steps:>8,} {choice.sigma:>8.3f} "
        if found is None:
            rows.append(start + f"{'-':>11} {'-':>12} {'-':>12}")
            continue
        per_record = found.improvement / choice.batch
        rows.append(start + f"{found.improvement:>11.3g} {per_record:>12.3g} {found.decelerator:>12.3f}")
    return rows
