"""`account.py calibrate`: the noise, the steps or the batch that reaches an epsilon without passing it."""

from __future__ import annotations

import argparse
from typing import Any

from accounting.accountant import AccountingError, Event, epsilon, epsilon_below
from accounting.calibrate import calibrate_batch, calibrate_sigma, calibrate_steps
from accounting.cli_epsilon import setting, summary
from accounting.plan import PlanError, parse_delta

UNKNOWNS = ("sigma", "steps", "batch")


def calibrate(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    missing = [name for name in UNKNOWNS if getattr(arguments, name) is None]
    if len(missing) != 1:
        raise PlanError(
            f"leave out exactly one of --sigma, --steps and --batch, the one to be found; {len(missing)} are"
        )
    (unknown,) = missing
    n, by = arguments.n, arguments.accountant
    if n < 1:
        raise PlanError(f"--n must be at least 1, but is {n}")
    sigma, steps, batch = arguments.sigma, arguments.steps, arguments.batch
    target, delta = arguments.epsilon, parse_delta(arguments.delta, n)
    if unknown == "batch":
        batch = calibrate_batch(n, sigma, steps, target, delta, by)
    rate = setting(n, batch, steps or 1, arguments.delta, by)["rate"]
    if unknown == "steps":
        steps = calibrate_steps(rate, sigma, target, delta, by)
    elif unknown == "sigma":
        sigma = calibrate_sigma(rate, setting(n, batch, steps, arguments.delta, by)["steps"], target, delta, by)
    found = {"sigma": sigma, "steps": steps, "batch": batch}
    value = epsilon([Event(rate, sigma, steps)], delta, by)
    if value > target:
        raise AccountingError(f"the calibrated {unknown} gives epsilon = {value}, above {target}; report this as a bug")
    values = {
        **setting(n, batch, steps, arguments.delta, by), **found,
        "unknown": unknown, "target_epsilon": target, "epsilon": value,
    }  # fmt: skip
    if arguments.json and by == "pld":
        values["epsilon_lower"] = epsilon_below([Event(rate, sigma, steps)], delta)
    letter = {"sigma": "σ", "steps": "T", "batch": "expected batch"}[unknown]
    return values, f"{letter} = {found[unknown]} gives ε = {value:.6f} ≤ {target:g}\n{summary(values)}"
