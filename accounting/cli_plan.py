"""`account.py plan`: how epsilon grows with the steps, and how the noise per record falls with the batch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from accounting.accountant import Event, epsilon, round_up
from accounting.calibrate import calibrate_sigma
from accounting.cli_epsilon import setting
from accounting.plan import RATE_DENOMINATOR, PlanError, threshold_for

POINTS = 10
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
DIGITS = 3


def plan_command(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    n, by, steps = arguments.n, arguments.accountant, arguments.steps
    values = setting(n, arguments.batch, steps, arguments.delta, by)
    if arguments.plot is not None and arguments.plot.suffix not in (".png", ".svg"):
        raise PlanError(f"--plot writes .png or .svg, not {arguments.plot.suffix!r}; name such a file")
    rate, delta = values["rate"], values["delta"]
    sigma = arguments.sigma
    if sigma is None:
        sigma = calibrate_sigma(rate, steps, arguments.epsilon, delta, by)
    marks = sorted({max(1, round(steps * k / POINTS)) for k in range(1, POINTS + 1)})
    over_steps = [{"steps": t, "epsilon": epsilon([Event(rate, sigma, t)], delta, by)} for t in marks]
    over_batch = []
    for batch in sorted({min(float(n), max(1.0, arguments.batch * factor)) for factor in FACTORS}):
        q = threshold_for(n, batch) / RATE_DENOMINATOR
        needed = calibrate_sigma(q, steps, arguments.epsilon, delta, by, DIGITS)
        over_batch.append({"batch": batch, "sigma": needed, "noise_per_record": needed / batch})
    values |= {
        "sigma": sigma, "target_epsilon": arguments.epsilon, "epsilon_over_steps": over_steps,
        "sigma_over_batch": over_batch,
    }  # fmt: skip
    if arguments.plot is not None:
        _plot(arguments.plot, values)
        values["plot"] = str(arguments.plot)
    return values, _table(values)


def _table(values: dict[str, Any]) -> str:
    lines = [f"σ = {values['sigma']:.5f}, q = {values['rate']:.6g}, δ = {values['delta']:.4g}", ""]
    lines += [f"{'steps':>10}  {'ε':>10}"]
    lines += [f"{row['steps']:>10}  {round_up(row['epsilon']):>10.4f}" for row in values["epsilon_over_steps"]]
    lines += ["", f"for ε = {values['target_epsilon']:g} after {values['steps']} steps:"]
    lines += [f"{'batch':>12}  {'σ':>8}  {'σ / batch':>12}"]
    for row in values["sigma_over_batch"]:
        lines.append(f"{row['batch']:>12,.0f}  {row['sigma']:>8.3f}  {row['noise_per_record']:>12.3e}")
    if "plot" in values:
        lines += ["", f"plot: {values['plot']}"]
    return "\n".join(lines)


def _plot(path: Path, values: dict[str, Any]) -> None:
    # matplotlib is slow to load and only wanted here.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = values["epsilon_over_steps"]
    left.plot([row["steps"] for row in steps], [row["epsilon"] for row in steps], marker="o")
    left.axhline(values["target_epsilon"], linestyle=":", color="grey")
    left.set(xlabel="steps", ylabel="ε", title=f"ε over steps at σ = {values['sigma']:.4g}", ylim=(0, None))
    batches = values["sigma_over_batch"]
    right.plot([row["batch"] for row in batches], [row["sigma"] for row in batches], marker="o")
    right.set(xlabel="expected batch", ylabel="σ", title=f"σ over batch at ε = {values['target_epsilon']:g}")
    right.set_xscale("log")
    figure.savefig(path)
