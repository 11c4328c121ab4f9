"""`account.py epsilon`: what a described training run spends, by several accountants if asked."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from murmuration.accounting.banded import MOST_BANDS
from murmuration.accounting.epsilon.accountant import delta_at, describe, epsilon, epsilon_below, round_up, show_delta
from murmuration.accounting.epsilon.affordable import calibrate_batch, calibrate_slots, calibrate_steps
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.epsilon.gaussian import participations, unamplified_epsilon
from murmuration.accounting.epsilon.opacus_check import opacus_epsilon
from murmuration.accounting.epsilon.trade_off import of_events
from murmuration.accounting.epsilon.tuning import Tuning
from murmuration.accounting.errors import AccountingError, PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.plan import parse_delta
from murmuration.accounting.sampling import (
    RATE_DENOMINATOR,
    AnySampling,
    RandomAllocation,
    make_sampling,
    threshold_for,
)

SAFE_SPREADS = 8
UNKNOWNS = ("sigma", "steps", "batch")
POINTS = 10
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
DIGITS = 3


def setting(sampling: AnySampling, n: int, steps: int, delta: float, accountant: Any) -> dict[str, Any]:
    """The numbers as they are accounted, with q on the sampler's grid."""
    return {**sampling.described(n, steps), "steps": steps, "delta": delta, **describe(accountant)}


def epsilon_command(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    delta, steps = delta_of(arguments), arguments.steps
    sampling = asked_sampling(arguments, arguments.batch, steps)
    values = setting(sampling, arguments.n, steps, delta, arguments.accountant) | {"sigma": arguments.sigma}
    if arguments.sampling == "shuffled":
        return _shuffled(arguments, values)
    cap = arguments.cap
    events = [sampling.event(arguments.sigma, sampling.turns(steps)) if cap is None else _capped(arguments, sampling)]
    events += [_phase(text) for text in arguments.phase]
    value = epsilon(events, delta, arguments.accountant)
    values |= {"sampling": arguments.sampling, "epsilon": value, "epsilon_rounded_up": round_up(value)}
    if arguments.json and arguments.accountant == "pld":
        values["epsilon_lower"] = epsilon_below(events, delta)
    lines = [f"ε = {round_up(value)} (rounded up)", summary(values, sampling)]
    for text in arguments.phase:
        lines.append(f"and a phase n,batch,σ,steps = {text}")
    if arguments.phase:
        values["further_phases"] = arguments.phase
    if cap is not None:
        note = _cap_note(arguments.n, values["rate"], cap)
        values |= {"cap": cap, "cap_note": note}
        lines.append(note)
    asked, more = _asked_beside(arguments, events, delta)
    return values | asked, "\n".join([*lines, *more])


def _asked_beside(
    arguments: argparse.Namespace, events: list[Event], delta: float
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """What options ask for beside epsilon: values and lines."""
    values, lines = dict[str, Any](), list[str]()
    if arguments.at_epsilon is not None:
        values |= {"at_epsilon": arguments.at_epsilon, "delta_at_epsilon": delta_at(events, arguments.at_epsilon)}
        # Far above the ε that is spent, no double is small enough.
        found = show_delta(values["delta_at_epsilon"], 4) if values["delta_at_epsilon"] > 0 else 0
        lines.append(f"δ = {found} at ε = {arguments.at_epsilon:g}")
    if arguments.gdp:
        fit = of_events(events, delta).fit()
        values |= {"gdp_mu": fit.mu, "gdp_gap": fit.gap}
        lines.append(
            f"μ = {round_up(fit.mu)} of Gaussian differential privacy, up to δ; it overstates what a test finds by "
            f"up to {round_up(fit.gap)}"
        )
    if arguments.best_of is not None:
        runs, _, shape = arguments.best_of.partition(",")
        try:
            mean = float(runs)
            number = 1.0 if shape in ("", "fixed") else math.inf if shape == "poisson" else float(shape)
        except ValueError:
            raise PlanError(
                f"--best-of takes RUNS[,SHAPE], SHAPE a number, poisson or fixed, but is {arguments.best_of!r}"
            ) from None
        tuning = Tuning(mean, number, shape == "fixed")
        values |= {
            "best_of": tuning.as_dict(),
            "epsilon_best_of": (best := tuning.epsilon(events, delta)),
        }
        lines.append(f"ε = {round_up(best)} of publishing the best of {arguments.best_of} runs")
    if arguments.cross_check:
        values["cross_check"] = opacus_epsilon(events, delta)
        lines += [f"{name}: {found}" for name, found in values["cross_check"].items()]
    return values, lines


def _capped(arguments: argparse.Namespace, sampling: AnySampling) -> Event:
    if arguments.sampling != "poisson" or arguments.bands > 1:
        raise AccountingError("--cap is accounted for plain Poisson samples alone; leave it, --sampling or --bands out")
    return Event(sampling.rate, arguments.sigma, arguments.steps, arguments.cap, arguments.n)


def _shuffled(arguments: argparse.Namespace, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
    if arguments.cap is not None or arguments.phase or arguments.cross_check or arguments.best_of:
        raise AccountingError("--sampling shuffled takes no --cap, --phase, --cross-check or --best-of; leave them out")
    times = participations(arguments.steps, values["expected_batch"], arguments.n)
    sigma = arguments.sigma / math.sqrt(times) if arguments.sigma > 0 else math.nan
    event = Event(1.0, sigma, 1)
    value = unamplified_epsilon(
        arguments.sigma, arguments.steps, values["expected_batch"], arguments.n, values["delta"]
    )
    values |= {
        "sampling": "shuffled", "participations": times, "epsilon": value, "epsilon_rounded_up": round_up(value),
        "gdp_mu": 1 / sigma, "accountant": "exact", "estimate": "exact",
    }  # fmt: skip
    if arguments.at_epsilon is not None:
        values["delta_at_epsilon"] = delta_at([event], arguments.at_epsilon)
    text = (
        f"ε = {round_up(value)} (rounded up) without amplification: every record takes part {times} times at places "
        f"that an adversary may know, which is one Gaussian mechanism\nσ = {arguments.sigma!r}, T = {arguments.steps}, "
        f"δ = {show_delta(values['delta'], 6)}; the amplified ε of Poisson sampling may not be claimed for shuffled "
        "epochs"
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


def summary(values: dict[str, Any], sampling: AnySampling) -> str:
    method = "PLD" if values["accountant"] == "pld" else f"RDP, dp-accounting {values['dp_accounting']}"
    drawn = sampling.in_words(values["n"], values["steps"])
    return f"σ = {values['sigma']!r}, {drawn}, T = {values['steps']}, δ = {show_delta(values['delta'], 6)}; {method}"


# `account.py calibrate`: the noise, the steps or the batch that reaches an epsilon without passing it.


def calibrate(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    missing = [name for name in UNKNOWNS if getattr(arguments, name) is None]
    if len(missing) != 1:
        raise PlanError(
            f"leave out exactly one of --sigma, --steps and --batch, the one to find; {len(missing)} are missing"
        )
    (unknown,) = missing
    delta, target, by = delta_of(arguments), arguments.epsilon, arguments.accountant
    require_usable(arguments)
    batch, steps, sigma = arguments.batch, arguments.steps, arguments.sigma
    if unknown == "sigma":
        sampling = asked_sampling(arguments, batch, steps)
        sigma = calibrate_sigma(sampling.event(1.0, sampling.turns(steps)), target, delta, by)
    elif unknown == "steps":
        sampling, steps = _most_steps(arguments, delta)
    else:
        sampling, batch = _largest_batch(arguments, delta)
    event = sampling.event(sigma, sampling.turns(steps))
    value = epsilon([event], delta, by)
    if value > target:
        raise AccountingError(f"the calibrated {unknown} gives epsilon = {value}, above {target}; report this as a bug")
    found = {"sigma": sigma, "steps": steps, "batch": batch}
    values = {
        **setting(sampling, arguments.n, steps, delta, by), **found, "sampling": arguments.sampling, "unknown": unknown,
        "target_epsilon": target, "epsilon": value,
    }  # fmt: skip
    if arguments.json and by == "pld":
        values["epsilon_lower"] = epsilon_below([event], delta)
    letter = {"sigma": "σ", "steps": "T", "batch": "expected batch"}[unknown]
    gives = f"{letter} = {found[unknown]} gives ε = {round_up(value, 6):.6f} ≤ {target:g}"
    return values, f"{gives}\n{summary(values, sampling)}"


def _most_steps(arguments: argparse.Namespace, delta: float) -> tuple[AnySampling, int]:
    """Whole turns or epochs: a cut one would cost as much. An epoch has as many steps as the batch needs to take each
    record once."""
    n, batch, bands = arguments.n, arguments.batch, arguments.bands
    epoch = 1
    if arguments.sampling == "allocation":
        threshold_for(n, batch)  # refused if the batch does not fit
        epoch = max(1, round(n / batch))
    sampling = asked_sampling(arguments, batch, max(epoch, bands))
    turns = calibrate_steps(sampling.event(arguments.sigma, 1), arguments.epsilon, delta, arguments.accountant)
    return sampling, turns * sampling.period


def _largest_batch(arguments: argparse.Namespace, delta: float) -> tuple[AnySampling, float]:
    n, sigma, steps, target, by = arguments.n, arguments.sigma, arguments.steps, arguments.epsilon, arguments.accountant
    if arguments.sampling != "allocation":
        asked_sampling(arguments, min(1.0, n / arguments.bands), steps)  # refused if the steps are not possible
        batch = calibrate_batch(n, sigma, steps, target, delta, by, arguments.bands)
        return asked_sampling(arguments, batch, steps), batch
    asked_sampling(arguments, n, steps)
    sampling = RandomAllocation(calibrate_slots(n, sigma, steps, target, delta, by))
    return sampling, sampling.divisor(n)


# `account.py plan`: how epsilon grows with the steps, and how the noise per record falls with the batch.


def plan_command(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    by, steps, delta = arguments.accountant, arguments.steps, delta_of(arguments)
    sampling = asked_sampling(arguments, arguments.batch, steps)
    values = setting(sampling, arguments.n, steps, delta, by)
    if arguments.plot is not None and arguments.plot.suffix not in (".png", ".svg"):
        raise PlanError(f"--plot writes .png or .svg, not {arguments.plot.suffix!r}; name such a file")
    sigma = arguments.sigma
    if sigma is None:
        sigma = calibrate_sigma(sampling.event(1.0, sampling.turns(steps)), arguments.epsilon, delta, by)
    marks = sorted({max(1, round(steps * k / POINTS)) for k in range(1, POINTS + 1)})
    events = {t: sampling.event(sigma, sampling.turns(t)) for t in marks}
    over_steps = [{"steps": t, "epsilon": epsilon([event], delta, by)} for t, event in events.items()]
    over_batch = []
    for batch, other in sorted(_other_batches(arguments).items()):
        needed = calibrate_sigma(other.event(1.0, other.turns(steps)), arguments.epsilon, delta, by, DIGITS)
        over_batch.append({"batch": batch, "sigma": needed, "noise_per_record": needed / batch})
    values |= {
        "sigma": sigma, "target_epsilon": arguments.epsilon, "epsilon_over_steps": over_steps,
        "sigma_over_batch": over_batch,
    }  # fmt: skip
    if arguments.plot is not None:
        _plot(arguments.plot, values)
        values["plot"] = str(arguments.plot)
    return values, _table(values, sampling)


def _other_batches(arguments: argparse.Namespace) -> dict[float, AnySampling]:
    """Batches about the one that was asked for. With random allocation those that take each record a whole number of
    times in the steps."""
    found: dict[float, AnySampling] = {}
    for factor in FACTORS:
        batch = min(arguments.n / arguments.bands, max(1.0, arguments.batch * factor))
        try:
            sampling = asked_sampling(arguments, batch, arguments.steps)
        except PlanError:
            continue  # that of the command itself is possible
        found[sampling.divisor(arguments.n) if arguments.sampling == "allocation" else batch] = sampling
    return found


def _table(values: dict[str, Any], sampling: AnySampling) -> str:
    drawn = sampling.in_words(values["n"], values["steps"])
    lines = [f"σ = {values['sigma']:.5f}, {drawn}, δ = {show_delta(values['delta'], 4)}", ""]
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
    # matplotlib is slow to load and only needed here.
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


def asked_sampling(arguments: argparse.Namespace, batch: float, steps: int) -> AnySampling:
    """Who takes part in each step, as a plan would freeze it. The words are those of a config: `--sampling` is
    `privacy.sampling`, `--bands` is `privacy.noise.bands`. A config with the same numbers gets the same events."""
    if steps < 1:
        raise PlanError(f"--steps must be at least 1, but is {steps}")
    require_usable(arguments)
    bands = arguments.bands
    if bands > min(arguments.n, steps):
        raise PlanError(f"--bands {bands} needs as many records and steps, not {arguments.n} and {steps}")
    kind = "poisson" if arguments.sampling == "shuffled" else arguments.sampling
    return make_sampling(kind, arguments.n, batch, steps, bands)


def require_usable(arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.bands <= MOST_BANDS:
        raise PlanError(f"--bands must lie between 1 and {MOST_BANDS}, but is {arguments.bands}")
    if arguments.bands > 1 and arguments.sampling != "poisson":
        raise PlanError(f"--sampling {arguments.sampling} is proved for independent noise alone; leave --bands out")


def delta_of(arguments: argparse.Namespace) -> float:
    if arguments.n < 1:
        raise PlanError(f"--n must be at least 1, but is {arguments.n}")
    return parse_delta(arguments.delta, arguments.n)
