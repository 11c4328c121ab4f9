"""How the private phases of a config share one ε: so that noise moves all their weights least, beside what gradients
could move (`noise_over_signal`).

In a phase, let r be that ratio, and e by how many percent it falls where the phase spends one percent more. Spending
is counted in μ, that of the one Gaussian step which costs the same ε, because the squares of μ nearly add up. The sum
of all r is least where each phase's μ² is proportional to its r·e: anywhere else, some of it would do more in another
phase. What the phases then spend together is up to the accountant alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from murmuration.accounting.epsilon.accountant import epsilon, show_delta, show_epsilon
from murmuration.accounting.epsilon.calibrate import MOST_EPSILON, calibrate_sigma
from murmuration.accounting.event import Event
from murmuration.accounting.noise import NoiseKind
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.config.root import Config, Phase
from murmuration.train.planner.cluster import PlannerError
from murmuration.train.planner.drowned import noise_over_signal
from murmuration.train.planner.forecast import counted
from murmuration.train.recipe.open_data import known_records
from murmuration.train.recipe.ready_phase import plan_of_phase, with_steps

ROUNDS = 8
NEAR = 0.01
"""The split is found where no μ would move by a larger share."""
NUDGE = 1.1
"""By which μ is raised at first, to see how the ratio falls."""
LEAST_FALL, LEAST_MOVE = 1e-3, 1e-3
"""A ratio is taken to fall at least like this power of μ, and to show it where μ's logarithm moves by more than this:
σ is rounded."""
DIGITS = 3
"""Decimals of a phase's ε."""


@dataclass(frozen=True)
class Part:
    """A phase that takes part."""

    number: int
    phase: Phase
    records: int
    weights: int
    noise: NoiseKind

    def plan(self, budget: float) -> PrivacyPlan:
        privacy = self.phase.privacy
        assert privacy is not None
        given = self.phase.model_copy(update={"privacy": privacy.model_copy(update={"epsilon": budget})})
        return plan_of_phase(given, self.records, f"phases.{self.number}", self.noise)


@dataclass(frozen=True)
class Split:
    parts: list[Part]
    plans: list[PrivacyPlan]
    epsilon: float
    """Of all together."""
    delta: float

    def as_json(self) -> str:
        phases = [
            {"name": part.phase.name, "number": part.number, "epsilon": plan.epsilon_budget,
             "noise_multiplier": plan.noise_multiplier, "noise_over_signal": noise_over_signal(plan, part.weights)}
            for part, plan in zip(self.parts, self.plans, strict=True)
        ]  # fmt: skip
        return json.dumps({"phases": phases, "epsilon": self.epsilon, "delta": self.delta}, indent=2)

    def as_text(self) -> str:
        lines = [
            f"{part.phase.name}: ε = {plan.epsilon_budget:g}, σ = {plan.noise_multiplier:g}, noise over signal "
            f"{noise_over_signal(plan, part.weights):.3g}"
            for part, plan in zip(self.parts, self.plans, strict=True)
        ]
        lines.append(f"together: ε = {show_epsilon(self.epsilon)} at δ = {show_delta(self.delta)}")
        given = zip(self.parts, self.plans, strict=True)
        return "\n".join(
            [*lines, *(f"--set phases.{part.number}.privacy.epsilon={plan.epsilon_budget:g}" for part, plan in given)]
        )


def split(config: Config, together: float) -> Split:
    """`together`: the ε that all private phases may spend, at their common δ."""
    if not 0 < together <= MOST_EPSILON:
        raise PlannerError(f"--together must be above 0 and at most {MOST_EPSILON:g}, but is {together:g}")
    parts = _parts(config)
    deltas = {part.plan(together).delta for part in parts}
    if len(deltas) > 1:
        raise PlannerError("the private phases have different δ, and one ε holds at one; give them the same delta")
    (delta,) = deltas

    def planned(mus: Sequence[float]) -> list[PrivacyPlan]:
        """By budgets that are rounded down, as they are written into a config."""
        budgets = [epsilon([Event(1.0, 1 / mu, 1)], delta) for mu in mus]
        return [
            part.plan(max(math.floor(budget * 10**DIGITS), 1) / 10**DIGITS)
            for part, budget in zip(parts, budgets, strict=True)
        ]

    def ratios(mus: Sequence[float]) -> list[float]:
        return [noise_over_signal(plan, part.weights) for part, plan in zip(parts, planned(mus), strict=True)]

    whole = 1 / calibrate_sigma(Event(1.0, 1.0, 1), together, delta)
    last = [whole / math.sqrt(len(parts)) for _ in parts]
    mus, before, falls = [NUDGE * mu for mu in last], ratios(last), [1.0 for _ in parts]
    for _ in range(ROUNDS):
        now = ratios(mus)
        moves = [math.log(mu / old) for mu, old in zip(mus, last, strict=True)]
        falls = [
            max(math.log(then / ratio) / move, LEAST_FALL) if abs(move) > LEAST_MOVE else fall
            for then, ratio, move, fall in zip(before, now, moves, falls, strict=True)
        ]
        pulls = [ratio * fall for ratio, fall in zip(now, falls, strict=True)]
        wanted = [whole * math.sqrt(pull / sum(pulls)) for pull in pulls]
        # Halfway, because the pulls change on the way.
        last, before = mus, now
        mus = [math.sqrt(mu * other) for mu, other in zip(mus, wanted, strict=True)]
        if all(abs(mu / old - 1) <= NEAR for mu, old in zip(mus, last, strict=True)):
            break

    # The squares of μ add up nearly, and the accountant's answer decides.
    scale, best = whole / math.hypot(*mus), None
    for _ in range(ROUNDS):
        plans = planned([scale * mu for mu in mus])
        spent = epsilon([plan.event() for plan in plans], delta)
        if spent <= together and (best is None or spent > best.epsilon):
            best = Split(parts, plans, spent, delta)
        if (1 - NEAR / 2) * together <= spent <= together:
            break
        scale *= (1 - NEAR / 4) * together / spent
    if best is None:
        raise PlannerError(f"ε = {together:g} is too little for these phases; allow a larger one, or more records")
    return best


def _parts(config: Config) -> list[Part]:
    parts = []
    for number, phase in enumerate(config.phases):
        if phase.privacy is None:
            continue
        where = f"phases.{number}"
        if phase.privacy.noise_multiplier is not None:
            raise PlannerError(f"{where}.privacy.noise_multiplier decides what the phase spends; leave it out")
        records = known_records(phase, where)[0]
        phase = with_steps(phase, records, where)
        parts.append(Part(number, phase, records, counted(config, phase)[1].trainable, config.run.noise))
    if len(parts) < 2:
        raise PlannerError("--together splits an ε between private phases, and the config has fewer than two")
    return parts
