"""`account.py compare`: what Poisson samples, random allocation and correlated noise add to the weights' path at the
same epsilon.

The noise of a step is not what the weights keep: over many steps it adds up. Correlated noise has more of it per step
and less in the sum. How much less follows from the plan's numbers alone and is computed here; what training makes of it
does not.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

from murmuration.accounting.banded import MOST_BANDS, best_banded
from murmuration.accounting.epsilon.accountant import describe, round_up, show_delta
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.errors import AccountingError, PlanError
from murmuration.accounting.plan import parse_delta
from murmuration.accounting.sampling import RandomAllocation, make_sampling, threshold_for
from murmuration.accounting.strict_json import JsonError, parse

BANDS = (1, *(2**power for power in range(1, int(math.log2(MOST_BANDS)) + 1)))
CAUTION = (
    "accumulated noise is not accuracy: optimizers with momentum, decay or a second moment keep more or less of this"
)
ALLOCATION = "allocation"
GIVEN = ("n", "batch", "steps", "epsilon")


class Numbers(NamedTuple):
    n: int
    batch: float
    steps: int
    epsilon: float
    delta: float
    horizon: int


def compare_command(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if arguments.plot is not None and arguments.plot.suffix not in (".png", ".svg"):
        raise PlanError(f"--plot writes .png or .svg, not {arguments.plot.suffix!r}; name such a file")
    asked = _numbers(arguments)
    rows = [row for bands in BANDS if (row := _row(asked, bands, arguments.accountant)) is not None]
    if not rows:
        raise AccountingError("not even independent noise reaches this epsilon; allow a larger one")
    first = rows[0]
    if (allocated := _allocated(asked, arguments.accountant)) is not None:
        rows.insert(1, allocated)
    for row in rows:
        row["accumulated_ratio"] = row["accumulated"] / first["accumulated"]
        row["per_step_ratio"] = row["per_step"] / first["per_step"]
    best = min(rows, key=lambda row: row["accumulated"])
    values = {**asked._asdict(), **describe(arguments.accountant), "rows": rows, "best": best["noise"]}
    values |= {"best_accumulated_ratio": best["accumulated_ratio"], "caution": CAUTION}
    if arguments.plot is not None:
        _plot(arguments.plot, rows)
        values["plot"] = str(arguments.plot)
    return values, _table(values, best)


def _row(asked: Numbers, bands: int, by: Any) -> dict[str, Any] | None:
    """None where a part of the records cannot hold the batch, or a block not be filled, or no noise is enough."""
    if bands > min(asked.steps, asked.horizon) or bands * asked.batch > asked.n:
        return None
    sampling = make_sampling("poisson", asked.n, asked.batch, asked.steps, bands)
    turns = sampling.turns(asked.steps)
    try:
        sigma = calibrate_sigma(sampling.event(1.0, turns), asked.epsilon, asked.delta, by)
    except AccountingError:
        return None
    matrix = None if bands == 1 else best_banded(bands, asked.horizon)
    accumulated = math.sqrt((asked.steps + 1) / 2) if matrix is None else matrix.accumulated(asked.steps)
    return {
        "noise": "independent" if matrix is None else f"banded, {bands} bands",
        "bands": bands,
        "rate": sampling.rate,
        "turns": turns,
        "sigma": sigma,
        "per_step": sigma * (1.0 if matrix is None else matrix.typical_spread),
        "accumulated": sigma * accumulated,
        "draws_per_step": 1.0 if matrix is None else matrix.draws,
    }


def _allocated(asked: Numbers, by: Any) -> dict[str, Any] | None:
    """None where each step has all records anyway, or a record cannot take part a whole number of times. Where the
    batch is not quite the one that was asked for, the noise is stated as it would weigh beside that one."""
    try:
        sampling = make_sampling("allocation", asked.n, asked.batch, asked.steps)
        if not isinstance(sampling, RandomAllocation):
            return None
        epochs = sampling.turns(asked.steps)
        sigma = calibrate_sigma(sampling.event(1.0, epochs), asked.epsilon, asked.delta, by)
    except (AccountingError, PlanError):
        return None
    per_step = sigma * asked.batch / sampling.divisor(asked.n)
    return {
        "noise": ALLOCATION,
        "bands": 1,
        "rate": sampling.rate,
        "turns": epochs,
        "slots": sampling.slots,
        "sigma": sigma,
        "per_step": per_step,
        "accumulated": per_step * math.sqrt((asked.steps + 1) / 2),
        "draws_per_step": 1.0,
    }


def _numbers(arguments: argparse.Namespace) -> Numbers:
    given = {name: getattr(arguments, name) for name in (*GIVEN, "delta")}
    if arguments.config is not None:
        # The numbers of a config's private phase, as they stand there; a run takes n from its index.
        try:
            phases = [each for each in parse(arguments.config.read_bytes())["phases"] if each.get("privacy")]
        except (JsonError, KeyError, TypeError, AttributeError):
            raise PlanError(
                f"{arguments.config} is no config in plain JSON; give --n, --batch, --steps and --epsilon"
            ) from None
        names = [str(each.get("name")) for each in phases]
        chosen = [each for each in phases if arguments.phase in (None, each.get("name"))]
        if len(chosen) != 1:
            had = f"has the private phases {', '.join(names)}; choose by --phase" if names else "has no private phase"
            raise PlanError(f"{arguments.config} {had}")
        phase, privacy = chosen[0], chosen[0]["privacy"]
        n, batch = phase.get("data", {}).get("expected_records"), privacy.get("expected_batch")
        steps = phase.get("steps")
        if steps is None and n and batch and phase.get("epochs"):
            steps = math.ceil(phase["epochs"] * n / batch)
        found = {"n": n, "batch": batch, "steps": steps, **{key: privacy.get(key) for key in ("epsilon", "delta")}}
        odd = [key for key in GIVEN if found[key] is not None and not isinstance(found[key], int | float)]
        if odd:
            raise PlanError(f"{arguments.config} gives no number for {', '.join(odd)}; give --{odd[0]}")
        given = {name: found[name] if value is None else value for name, value in given.items()}
    elif arguments.phase is not None:
        raise PlanError("--phase names a phase of --config; give that, too")
    if missing := [f"--{name}" for name in GIVEN if given[name] is None]:
        raise PlanError(f"compare needs {', '.join(missing)}, or a --config that has them")
    n, steps, batch = given["n"], given["steps"], given["batch"]
    if n < 1 or steps < 1:
        raise PlanError(f"--n and --steps must be at least 1, but are {n} and {steps}")
    threshold_for(n, batch)  # refused if the batch does not fit
    horizon = steps if arguments.horizon is None else arguments.horizon
    return Numbers(n, float(batch), steps, float(given["epsilon"]), parse_delta(given["delta"], n), horizon)


def _table(values: dict[str, Any], best: dict[str, Any]) -> str:
    lines = [
        f"n = {values['n']:,}, batch {values['batch']:,.0f}, T = {values['steps']:,}, ε = {values['epsilon']:g}, δ = "
        f"{show_delta(values['delta'], 4)}; noise in units of C, on the sum; 'added up' is the root mean square over "
        "all steps",
        "",
        f"{'noise':<18} {'rate':>10} {'turns':>7} {'σ':>9} {'per step':>9} {'ratio':>7} {'added up':>10} {'ratio':>7} "
        f"{'draws':>6}",
    ]
    for row in values["rows"]:
        lines.append(
            f"{row['noise']:<18} {row['rate']:>10.4g} {row['turns']:>7,} {row['sigma']:>9.5f} {row['per_step']:>9.4g} "
            f"{row['per_step_ratio']:>7.3f} {row['accumulated']:>10.4g} {row['accumulated_ratio']:>7.3f} "
            f"{row['draws_per_step']:>6g}"
        )
    if best["noise"] == ALLOCATION:
        verdict = f"least adds up with random allocation: {round_up(best['accumulated_ratio'])} of Poisson samples"
    elif best["bands"] == 1:
        verdict = "least adds up with independent noise; correlated noise gains nothing here"
    else:
        verdict = f"least adds up with {best['noise']}: {round_up(best['accumulated_ratio'])} of independent noise"
    lines += ["", verdict, CAUTION]
    return "\n".join([*lines, f"plot: {values['plot']}"] if "plot" in values else lines)


def _plot(path: Path, rows: list[dict[str, Any]]) -> None:
    # matplotlib is slow to load and only needed here.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    allocated = next((row for row in rows if row["noise"] == ALLOCATION), None)
    rows = [row for row in rows if row is not allocated]
    bands = [row["bands"] for row in rows]
    for axes, name, title in zip(
        figure.subplots(1, 2),
        ("accumulated_ratio", "per_step_ratio"),
        ("noise added up over the steps", "noise of one step"),
        strict=True,
    ):
        axes.plot(bands, [row[name] for row in rows], marker="o")
        axes.axhline(1.0, linestyle=":", color="grey")
        if allocated is not None:
            axes.plot([1], [allocated[name]], marker="x", linestyle="none", label=ALLOCATION)
            axes.legend()
        axes.set(xlabel="bands (1: independent noise)", ylabel="of independent noise", title=title, ylim=(0, None))
        axes.set_xscale("log", base=2)
    figure.savefig(path)
