"""The result of an audit, for people and for scripts. An audit can refute a claim, but never prove one."""

from __future__ import annotations

import json
from dataclasses import dataclass

from murmuration.accounting.certificate.evidence import rounded_down
from murmuration.accounting.epsilon.accountant import round_up, show_epsilon
from murmuration.accounting.epsilon.audit_evidence import ACCUSED, AuditBound, Bound
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import RandomAllocation
from murmuration.train.audit.checks import Check

SIMULATED = 200
"""Audits from which `power` is known."""


@dataclass(frozen=True)
class AuditReport:
    """`claim` is the epsilon that the audited run's own ledger charges, at `bound.delta`.

    `p_value` is that of all bounds' evidence against the claim, corrected for their number. The lower bound is reported
    at the requested confidence; the claim is refuted only at a level that refutes an honest run once in a million.
    """

    phase: str
    kind: str
    claim: float
    bound: AuditBound
    p_value: float
    plan: PrivacyPlan
    engine: str
    ranks: int
    planted_noise_scale: float | None
    measured_sigma: float
    sampling: Check
    divisor: Check
    noise: Check | None
    """None for input canaries, which do not show the draws."""
    power: dict[float, float]
    """By scale: the share of such audits that refute noise of that many times the planned deviation; empty where that
    is not known."""

    @property
    def refuted(self) -> list[str]:
        """Every claim that does not stand, in words."""
        found = []
        if self.p_value < ACCUSED:
            found.append(
                f"epsilon is at least {rounded_down(self.bound.epsilon)} with {self.bound.confidence:.0%} confidence, "
                f"and {show_epsilon(self.claim)} is claimed (p = {self.p_value:.2g} for the claim)"
            )
        if not self.sampling.passed:
            found.append(f"the batches are not {self._drawn} at the claimed rate")
        if not self.divisor.passed:
            found.append("the noise is not divided by the constant q·n alone")
        if self.noise is not None and not self.noise.passed:
            found.append("steps share draws of noise")
        return found

    @property
    def _drawn(self) -> str:
        allocated = isinstance(self.plan.sampling, RandomAllocation)
        return "those of random allocation" if allocated else "independent Poisson draws"

    def as_json(self) -> str:
        proven, best = self.bound.proven, self.bound.best
        value = {
            "phase": self.phase, "kind": self.kind, "claimed_epsilon": self.claim, "delta": self.bound.delta,
            "lower_bound": proven.epsilon, "lower_bound_by": proven.method, "lower_bound_if_assumed": best.epsilon,
            "lower_bound_if_assumed_by": best.method, "assumed": best.assumes, "p_value_of_claim": self.p_value,
            "confidence": self.bound.confidence, "bonferroni": self.bound.looks, "canaries": self.bound.canaries,
            "included": self.bound.included, "guesses": proven.guesses, "correct": proven.correct,
            "tried": [each.__dict__ for each in self.bound.tried], "records": self.plan.records,
            "rate": self.plan.sampling_rate, "steps": self.plan.steps, "sigma": self.plan.noise_multiplier,
            "clip_norm": self.plan.clip_norm, "engine": self.engine,
            "ranks": self.ranks, "planted_noise_scale": self.planted_noise_scale,
            "measured_sigma_at_self_test": self.measured_sigma, "sampling_p_values": self.sampling.p_values,
            "divisor_p_values": self.divisor.p_values,
            "noise_p_values": {} if self.noise is None else self.noise.p_values,
            **{f"power_at_{scale:g}_sigma": share for scale, share in self.power.items()},
            "false_alarms": ACCUSED, "refuted": self.refuted,
        }  # fmt: skip
        return json.dumps(value)

    def as_text(self) -> str:
        bound, plan = self.bound, self.plan
        lines = []
        if self.planted_noise_scale is not None:
            lines.append(
                f"FAULT PLANTED: the noise drawn is {self.planted_noise_scale:g} times what is claimed "
                "(only an audit can do that)"
            )
        lines += [
            f"audited       phase {self.phase}, {plan.steps} steps, {self.engine}, ranks {self.ranks}",
            f"plan          n {plan.records} ({bound.canaries} {self.kind} canaries, {bound.included} of them in), "
            f"q {plan.sampling_rate:.6g}, sigma {plan.noise_multiplier:g}, C {plan.clip_norm:g}",
            f"claim         ε ≤ {round_up(self.claim)} at δ = {bound.delta:g}",
            f"lower bound   ε ≥ {shown(bound.proven)}, whatever the algorithm",
        ]
        if bound.best.assumes:
            lines.append(f"              ε ≥ {shown(bound.best)}, if {bound.best.assumes}")
        lines += [
            f"confidence    {bound.confidence:.0%} for all bounds together ({bound.looks} numbers were looked at)",
            f"evidence      p = {self.p_value:.2g} for the claim",
            f"sampling      p = {self.sampling.p_value:.2g} for {self._drawn} at the config's own rate",
            f"divisor       p = {self.divisor.p_value:.2g} for the constant q·n",
        ]
        if self.noise is not None:
            lines.append(f"noise         p = {self.noise.p_value:.2g} for draws that no two steps share")
        if self.power:
            found = ", ".join(f"{share:.1%} detect noise of {scale:g}·σ" for scale, share in self.power.items())
            lines.append(
                f"power         of {SIMULATED} such audits, simulated, {found}; of the checks above, each accuses an "
                "honest run at most once in a million"
            )
        else:
            lines.append("power         not known for input canaries; gradient canaries are the stronger test")
        lines += [f"REFUTED       {text}" for text in self.refuted]
        if not self.refuted:
            if self.bound.epsilon > self.claim:
                lines.append(
                    f"suspicious    the lower bound exceeds the claim, as up to {1 - bound.confidence:.1%} of honest "
                    "audits do; repeat it, with more canaries"
                )
            lines.append("verdict       not refuted (an audit can refute a claim, never prove one)")
        return "\n".join(lines)


def shown(bound: Bound) -> str:
    # Rounded down, as a lower bound must be.
    how = f"{bound.correct} of {bound.guesses} guesses right" if bound.guesses else "continuous values"
    return f"{rounded_down(bound.epsilon)} ({bound.method}, {how})"
