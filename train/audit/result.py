"""What an audit found, for people and for scripts. It can refute a claim; agreement is no proof."""

from __future__ import annotations

import json
from dataclasses import dataclass

from murmuration.accounting.epsilon.accountant import round_up
from murmuration.accounting.epsilon.audit_bound import AuditBound
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.audit.checks import Check


@dataclass(frozen=True)
class AuditReport:
    """`claim` is the epsilon that the audited run's own ledger charges, at `bound.delta`."""

    phase: str
    kind: str
    claim: float
    bound: AuditBound
    plan: PrivacyPlan
    engine: str
    ranks: int
    planted_noise_scale: float | None
    measured_sigma: float
    sampling: Check
    divisor: Check
    power: float | None
    false_alarms: float | None
    seconds: float

    @property
    def refuted(self) -> list[str]:
        """Every claim that does not stand, in words."""
        found = []
        if self.bound.epsilon > self.claim:
            found.append(f"epsilon is at least {self.bound.epsilon:.3f}, more than the claimed {self.claim:.3f}")
        if not self.sampling.passed:
            found.append("the batches are not independent Poisson draws at the claimed rate")
        if not self.divisor.passed:
            found.append("the noise is not divided by the constant q·n alone")
        return found

    def as_json(self) -> str:
        best = self.bound.best
        value = {
            "phase": self.phase, "kind": self.kind, "claimed_epsilon": self.claim, "delta": self.bound.delta,
            "lower_bound": self.bound.epsilon, "confidence": self.bound.confidence, "canaries": self.bound.canaries,
            "included": self.bound.included, "guesses": best.guesses, "correct": best.correct,
            "tried": [each.__dict__ for each in self.bound.tried], "records": self.plan.records,
            "rate": self.plan.sampling_rate, "steps": self.plan.steps, "sigma": self.plan.noise_multiplier,
            "clip_norm": self.plan.clip_norm, "engine": self.engine,
            "ranks": self.ranks, "planted_noise_scale": self.planted_noise_scale,
            "measured_sigma_at_self_test": self.measured_sigma, "sampling_p_values": self.sampling.p_values,
            "divisor_p_values": self.divisor.p_values, "power_at_0.3_sigma": self.power,
            "false_alarms": self.false_alarms, "refuted": self.refuted, "seconds": round(self.seconds),
        }  # fmt: skip
        return json.dumps(value)

    def as_text(self) -> str:
        bound, best, plan = self.bound, self.bound.best, self.plan
        lines = []
        if self.planted_noise_scale is not None:
            lines.append(
                f"FAULT PLANTED: the noise drawn is {self.planted_noise_scale:g} times what is claimed "
                "(only an audit can do that)"
            )
        lines += [
            f"audited       phase {self.phase}, {plan.steps} steps, {self.engine}, ranks {self.ranks}, in "
            f"{self.seconds:.0f} s",
            f"plan          n {plan.records} ({bound.canaries} {self.kind} canaries, {bound.included} of them in), "
            f"q {plan.sampling_rate:.6g}, sigma {plan.noise_multiplier:g}, C {plan.clip_norm:g}",
            f"claim         ε ≤ {round_up(self.claim)} at δ = {bound.delta:g}",
            f"lower bound   ε ≥ {bound.epsilon:.3f} with {bound.confidence:.0%} confidence "
            f"({best.correct} of {best.guesses} guesses right, the best of {len(bound.tried)} numbers of guesses)",
            f"sampling      p = {self.sampling.p_value:.2g} for Poisson draws at the config's own rate",
            f"divisor       p = {self.divisor.p_value:.2g} for the constant q·n",
        ]
        if self.power is not None:
            lines.append(
                f"power         {self.power:.1%} of such audits see noise of 0.3·σ, {self.false_alarms:.1%} accuse "
                "honest noise (simulated)"
            )
        else:
            lines.append("power         not known for input canaries; gradient canaries are the stronger test")
        lines += [f"REFUTED       {text}" for text in self.refuted]
        if not self.refuted:
            lines.append("verdict       not refuted (an audit can refute a claim, never prove one)")
        return "\n".join(lines)
