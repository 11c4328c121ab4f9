"""What an audit showed of the run's own recipe (`run.audit`): evidence beside the claim, with a confidence of its own.

An audit can refute a claim and never prove one. So no number of the claim depends on it, and a refuted one is said
wherever the claim is.
"""

from __future__ import annotations

import math
from typing import Any

from murmuration.accounting.epsilon.accountant import round_up, show_delta

PENDING = {
    "made": False,
    "reason": "asked for, and not made when this was written; start the same command again to make it, or retire the "
    "run, and its key is destroyed without it",
}
DIFFERS = "two trainings that differ in one record differ in more than the sum, or in that by more than C"
FORMULA = "one-run (ε, δ)"


def refutations(certificate: dict[str, Any]) -> list[str]:
    """What of the claim does not stand by the run's own audit, in words."""
    found = certificate.get("audit") or {}
    replay = [DIFFERS] if found.get("replay", {}).get("refuted") else []
    return [*found.get("one_run", {}).get("refuted", []), *replay]


def fault_of(audit: dict[str, Any]) -> str | None:
    """Why evidence contradicts itself; None if it does not. KeyError, TypeError or ValueError where it is none."""
    if not audit["made"]:
        return None
    found = audit["one_run"]
    if not found["made"]:
        return None
    # Imports SciPy's distributions, which is slow; few runs are audited.
    from murmuration.accounting.epsilon.audit_bound import ACCUSED, epsilon_bound, p_value

    level = (1 - found["confidence"]) / found["looks"]
    strongest = 1.0
    for bound in found["tried"]:
        if bound["method"] != FORMULA:
            continue
        numbers = found["canaries"], bound["guesses"], bound["correct"]
        if not math.isclose(epsilon_bound(*numbers, found["delta"], 1 - level), bound["epsilon"], abs_tol=1e-6):
            return "states another bound than its guesses give"
        strongest = min(strongest, p_value(*numbers, found["claim"], found["delta"]) * found["looks"])
    if found["p_value"] > strongest * (1 + 1e-6):
        return "states weaker evidence than its guesses are"
    if found["proven"] != max(each["epsilon"] for each in found["tried"] if not each["assumes"]):
        return "does not state the best of its bounds"
    return "does not say that it refutes" if found["p_value"] < ACCUSED and not found["refuted"] else None


def rows(audit: dict[str, Any]) -> list[list[str]]:
    """For people."""
    if not audit["made"]:
        return [["audit", "result"], ["run.audit", audit["reason"]]]
    one, replay = audit["one_run"], audit["replay"]
    shown = [["audit", "result"]]
    if one["made"]:
        shown += [
            ["one run with canaries", "REFUTED: " + "; ".join(one["refuted"]) if one["refuted"] else "not refuted"],
            ["of", f"{one['steps']} steps of phase {one['phase']} on the engine {one['engine']}, ranks {one['ranks']}, "
             f"with {one['canaries']} canaries and a claim of ε = {round_up(one['claim'])}, δ = "
             f"{show_delta(one['delta'])} of its own"],
            ["lower bound", f"ε ≥ {rounded_down(one['proven'])} whatever the algorithm, ε ≥ "
             f"{rounded_down(one['best'])} if {one['assumes'] or 'nothing more is assumed'}; {one['confidence']:.0%} "
             "confidence for all bounds together"],
        ]  # fmt: skip
    else:
        shown.append(["one run with canaries", f"not made: {one['reason']}"])
    if replay["made"]:
        told = f"REFUTED: {DIFFERS}" if replay["refuted"] else "not refuted"
        shown.append(["the first steps twice, once without one record", f"{told}; steps: {replay['steps']}"])
    else:
        shown.append(["the first steps twice, once without one record", f"not made: {replay['reason']}"])
    share = f"{100 * audit['share']:,.1f} % of the records that the run's private steps take on average"
    return [*shown, ["cost", f"about {share}"]]


def rounded_down(bound: float) -> str:
    return f"{math.floor(bound * 1000) / 1000:.3f}"
