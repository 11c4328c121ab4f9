"""TAN (Sander et al. 2022): a cheap run that trains like an expensive one, because σ / batch is the same.

Batch and noise multiplier are divided by the same number; learning rate and steps stay. The noise on each step's mean
is the planned one, at a fraction of the cost. The promise is not: the ε of the cheap run is far larger; its plan, its
ledger and its certificate state that ε, and the run is marked NOT PRIVATE at the ε that it stands for.
"""

from __future__ import annotations

import math
from dataclasses import replace

from murmuration.accounting.epsilon.accountant import epsilon, round_up
from murmuration.accounting.errors import PlanError
from murmuration.accounting.plan import PrivacyPlan, StandIn

LEAST_SIGMA = 0.1
"""Below it, accounting takes minutes and its answers are in the hundreds."""


def stand_in(plan: PrivacyPlan, scale: float) -> PrivacyPlan:
    """The plan of the cheap run. Its budget is what it will have spent at its last step."""
    sigma, batch = plan.noise_multiplier / scale, plan.divisor / scale
    if sigma < LEAST_SIGMA:
        most = math.floor(plan.noise_multiplier / LEAST_SIGMA * 100) / 100
        raise PlanError(f"tan.scale = {scale:g} makes the noise multiplier {sigma:.3g}; use at most {most:g}")
    if batch < 1:
        raise PlanError(f"tan.scale = {scale:g} makes the expected batch {batch:.3g}; use at most {plan.divisor:g}")
    cheap = replace(plan, sampling=plan.sampling.with_batch(plan.records, batch), noise_multiplier=sigma)
    spent = epsilon([cheap.event()], plan.delta)
    return replace(cheap, epsilon_budget=round_up(spent), stands_for=StandIn(plan.epsilon_budget, scale))
