"""Whether a plan's noise drowns whatever its gradients could teach, and the nearest plan whose noise does not.

Where every clipped gradient of every step pointed the same way, T steps would move the weights by at most T·C. The
noise of T steps, σC/B on each of d coordinates, moves them by about σC·√(d·T)/B. Their ratio,

    σ·√d / (B·√T),

is free of C and of the learning rate. Real gradients do not agree, so a run at a ratio of 1 already learns little, and
only where few directions matter, as in fine-tuning. At 10, nothing is left to see. This is advice and no refusal: a run
may be a test.
"""

from __future__ import annotations

import math
from dataclasses import replace

from murmuration.accounting.epsilon.accountant import quick_epsilon
from murmuration.accounting.epsilon.calibrate import MOST_EPSILON
from murmuration.accounting.errors import AccountingError
from murmuration.accounting.plan import PrivacyPlan

DROWNED = 10.0
"""The ratio from which a plan is called useless."""
USEFUL = 1.0
"""The ratio of the plan that is named instead."""


def noise_over_signal(plan: PrivacyPlan, weights: int) -> float:
    """How far noise moves `weights` trainable weights, over how far gradients can."""
    return plan.noise_multiplier * math.sqrt(weights) / (plan.divisor * plan.noise.agreeing_steps(plan.steps))


def drowned(plan: PrivacyPlan, weights: int, calibrated: bool) -> str | None:
    """One sentence for a useless plan, with the nearest useful ones; `calibrated`: σ follows from ε."""
    ratio = noise_over_signal(plan, weights)
    if ratio < DROWNED:
        return None
    found = [_other_noise(plan, weights), _larger_batch(plan, weights) if calibrated else None]
    named = ", or ".join(text for text in found if text is not None)
    nearest = named or (
        f"none with these weights and records up to ε = {MOST_EPSILON:g}; use more records, or train fewer weights "
        '(trainable = "head")'
    )
    return (
        f"σ = {plan.noise_multiplier:,.4g}: nothing can be learned, the noise outweighs all gradients together "
        f"{ratio:,.3g} times; nearest useful plan: {nearest}"
    )


def _largest_useful_sigma(plan: PrivacyPlan, weights: int) -> float:
    return math.floor(1e5 * USEFUL * plan.divisor * plan.noise.agreeing_steps(plan.steps) / math.sqrt(weights)) / 1e5


def _spent(plan: PrivacyPlan, weights: int) -> float:
    """An upper bound of what the plan's steps spend with the most noise that leaves it useful."""
    try:
        useful = replace(plan, noise_multiplier=_largest_useful_sigma(plan, weights))
        return quick_epsilon([useful.event()], plan.delta)
    except (AccountingError, ZeroDivisionError, ValueError):
        return math.inf


def _other_noise(plan: PrivacyPlan, weights: int) -> str | None:
    spent = _spent(plan, weights)
    if spent > MOST_EPSILON:
        return None
    if spent <= plan.epsilon_budget:
        sigma = _largest_useful_sigma(plan, weights)
        return f"privacy.noise_multiplier = {sigma:g}, which spends ε = {_rounded_up(spent):g}"
    return f"privacy.epsilon = {_rounded_up(spent):g}"


def _larger_batch(plan: PrivacyPlan, weights: int) -> str | None:
    """The batch, doubled until what it needs fits the budget; where σ is large, σ/B hardly falls with B and none
    does."""
    batch, largest = plan.divisor, plan.records / plan.sampling.parts
    while batch < largest:
        batch = min(2 * batch, largest)
        larger = plan.sampling.with_batch(plan.records, batch)
        if plan.metrics or larger is None:
            return None  # the metrics' noise follows the batch, and so does the number of an epoch's steps
        if _spent(replace(plan, sampling=larger), weights) <= plan.epsilon_budget:
            return f"privacy.expected_batch = {min(math.ceil(batch), plan.records)}"
    return None


def _rounded_up(value: float) -> float:
    """To two significant digits."""
    digits = 1 - math.floor(math.log10(value)) if value > 0 else 0
    return math.ceil(value * 10**digits) / 10**digits
