"""`account.py epsilon`: what a described training spends, by several accountants if asked."""

from __future__ import annotations

import argparse
import math
from typing import Any

from accounting.accountant import (
    AccountingError,
    Event,
    delta_at,
    describe,
    epsilon,
    epsilon_below,
    gdp_mu,
    round_up,
)  # fmt: skip
from accounting.cross_check import opacus_epsilon
from accounting.gaussian import gaussian_epsilon, participations
from accounting.plan import RATE_DENOMINATOR, PlanError, parse_delta, threshold_for

SAFE_SPREADS = 8


def setting(n: int, batch: float, steps: int, delta: str | None, accountant: Any) -> dict[str, Any]:
    """The numbers as they are accounted: q on the sampler's grid."""
    if steps < 1:
        raise PlanError(f"--steps must be at least 1, but is {steps}")
    threshold = threshold_for(n, batch)
    rate = threshold / RATE_DENOMINATOR
    return {
        "n": n,
        "rate": rate,
        "threshold": threshold,
        "expected_batch": rate * n,
        "steps": steps,
        "delta": parse_delta(delta, n),
        **describe(accountant),
    }


def epsilon_command(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    values = setting(arguments.n, arguments.batch, arguments.steps, arguments.delta, arguments.accountant)
    values["sigma"] = arguments.sigma
    if arguments.sampling == "shuffled":
        return _shuffled(arguments, values)
    cap = arguments.cap
    events = [Event(values["rate"], arguments.sigma, arguments.steps, cap, arguments.n if cap is not None else None)]
    events += [_phase(text) for text in arguments.phase]
    value = epsilon(events, values["delta"], arguments.accountant)
    values |= {"sampling": "poisson", "epsilon": value, "epsilon_rounded_up": round_up(value)}
    if arguments.json and arguments.accountant == "pld":
        values["epsilon_lower"] = epsilon_below(events, values["delta"])
    lines = [f"ε = {round_up(value)} (rounded up)", summary(values)]
    for text in arguments.phase:
        lines.append(f"and a phase n,batch,σ,steps = {text}")
    if arguments.phase:
        values["further_phases"] = arguments.phase
    if cap is not None:
        note = _cap_note(arguments.n, values["rate"], cap)
        values |= {"cap": cap, "cap_note": note}
        lines.append(note)
    if arguments.at_epsilon is not None:
        values |= {"at_epsilon": arguments.at_epsilon, "delta_at_epsilon": delta_at(events, arguments.at_epsilon)}
        lines.append(f"δ = {values['delta_at_epsilon']:.4g} at ε = {arguments.at_epsilon:g}")
    if arguments.gdp:
        values["gdp_mu"] = gdp_mu(events, values["delta"])
        lines.append(f"μ = {round_up(values['gdp_mu'])} of Gaussian differential privacy, wherever δ(ε) ≥ δ")
    if arguments.cross_check:
        values["cross_check"] = opacus_epsilon(events, values["delta"])
        lines += [f"{name}: {found}" for name, found in values["cross_check"].items()]
    return values, "\n".join(lines)


def _shuffled(arguments: argparse.Namespace, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
    if arguments.cap is not None or arguments.phase or arguments.cross_check:
        raise AccountingError("--sampling shuffled takes no --cap, --phase or --cross-check; leave them out")
    times = participations(arguments.steps, values["expected_batch"], arguments.n)
    sigma = arguments.sigma / math.sqrt(times) if arguments.sigma > 0 else math.nan
    event = Event(1.0, sigma, 1)
    value = gaussian_epsilon(event.sigma, values["delta"])
    values |= {
        "sampling": "shuffled", "participations": times, "epsilon": value, "epsilon_rounded_up": round_up(value),
        "gdp_mu": 1 / sigma, "accountant": "exact", "estimate": "exact",
    }  # fmt: skip
    if arguments.at_epsilon is not None:
        values["delta_at_epsilon"] = delta_at([event], arguments.at_epsilon)
    text = (
        f"ε = {round_up(value)} (rounded up) without amplification: every record takes part {times} times at places "
        f"that an adversary may know, which is one Gaussian mechanism\nσ = {arguments.sigma!r}, T = {arguments.steps}, "
        f"δ = {values['delta']:.6g}; the amplified ε of Poisson sampling may not be claimed for shuffled epochs"
    )
    return values, text


def _phase(text: str) -> Event:
    try:
        n, batch, sigma, steps = text.split(",")
        return Event(threshold_for(int(n), float(batch)) / RATE_DENOMINATOR, float(sigma), int(steps))
    except (AccountingError, PlanError):
        raise
    except ValueError:
        raise PlanError(f"--phase takes N,BATCH,SIGMA,STEPS, but is {text!r}") from None


def _cap_note(n: int, rate: float, cap: int) -> str:
    least = math.ceil(n * rate + SAFE_SPREADS * math.sqrt(n * rate * (1 - rate)))
    if cap >= least:
        return f"the cap of {cap} lies {SAFE_SPREADS} or more standard deviations above the expected batch: harmless"
    return f"the cap of {cap} is low: it couples records and costs ε; a cap of {least} or more would cost nothing"


def summary(values: dict[str, Any]) -> str:
    method = "PLD" if values["accountant"] == "pld" else f"RDP, dp-accounting {values['dp_accounting']}"
    return (
        f"σ = {values['sigma']!r}, q = {values['rate']:.8g} = {values['threshold']}/2^32, T = {values['steps']}, "
        f"δ = {values['delta']:.6g}; {method}"
    )
