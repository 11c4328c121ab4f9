"""Means, spreads and differences of the learning benchmark, as numbers, as a table and as a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ARMS = {
    "random": "random weights", "warm": "warm start alone", "mae": "+ private MAE, equal cost",
    "small": "+ private captioner, batch / 8", "caption": "+ private captioner",
}  # fmt: skip
CLAIMS = {"beats_warm_start": "warm", "beats_mae_of_equal_cost": "mae", "large_batch_beats_small": "small"}
"""What the captioner is to be better than."""
APART = 2.92
"""Standard errors from which a difference counts: Student's t for three seeds, once in twenty if nothing differs."""

Runs = list[dict[str, dict[str, float]]]


def spread(runs: Runs, axes: Iterable[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Arm -> axis -> mean and standard deviation over seeds."""
    return {arm: {axis: _spread([run[arm][axis] for run in runs]) for axis in axes} for arm in runs[0]}


def compared(runs: Runs, axes: Iterable[str], tested: int) -> dict[str, dict[str, dict[str, float]]]:
    """Claim -> axis -> difference of the captioner to the other, seed by seed since they share a warm start.

    `tested` records were probed: all seeds share them, so what so few leave undecided does not average out over seeds.
    """
    return {
        claim: {
            axis: _difference(*([run[arm][axis] for run in runs] for arm in ("caption", other)), tested)
            for axis in axes
        }
        for claim, other in CLAIMS.items()
    }


def verdicts(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, str]:
    """Claim -> in one sentence, on which axes it was shown."""
    sentences = {}
    for claim, axes in found.items():
        shown = [axis for axis, difference in axes.items() if difference["holds"]]
        sentences[claim] = f"shown on {', '.join(shown)} alone" if shown else "not shown on any axis"
    return sentences


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "std": _std(values)}


def _difference(ours: list[float], theirs: list[float], tested: int) -> dict[str, float]:
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    # As if the two were probed on different records, which overstates it: a spread over few seeds may come out small.
    sampling = math.sqrt(sum(p * (1 - p) for p in map(statistics.mean, (ours, theirs))) / tested)
    error = _std(differences) / math.sqrt(len(differences))
    apart = statistics.mean(differences) / math.hypot(error, sampling)
    return {
        "mean": statistics.mean(differences), "standard_error": error, "sampling_error": sampling,
        "standard_errors_apart": apart, "holds": apart > APART,
    }  # fmt: skip


def _std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def table(result: Mapping[str, Any]) -> str:
    axes = list(result["setting"]["chance"])
    lines = ["arm                              " + "".join(f"{axis:>16}" for axis in axes)]
    for arm, name in ARMS.items():
        cells = (result["spread"][arm][axis] for axis in axes)
        lines.append(f"{name:33}" + "".join(f"{cell['mean']:>8.3f} ± {cell['std']:.3f}" for cell in cells))
    for claim, found in result["compared"].items():
        cells = (f"{found[axis]['mean']:>+8.3f} ± {found[axis]['standard_error']:.3f}" for axis in axes)
        lines.append(f"{claim:33}" + "".join(cells))
        lines.append(" " * 33 + "".join(f"{'holds' if found[axis]['holds'] else 'not shown':>16}" for axis in axes))
    return "\n".join(lines)


def plot(result: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size, chance = result["setting"]["size"], result["setting"]["chance"]
    panels = {"colour": f"colour, {size['fitted']} labels", "colour_few": f"colour, {size['few']} labels"}
    panels |= {"shape": f"shape, {size['fitted']} labels", "label": f"both, {size['fitted']} labels"}
    figure, places = plt.subplots(1, len(panels), figsize=(13, 3), sharey=True, layout="constrained")
    for place, (axis, name) in zip(places, panels.items(), strict=True):
        for row, arm in enumerate(ARMS):
            found = result["spread"][arm][axis]
            place.barh(row, found["mean"], xerr=found["std"], color="#4c72b0" if arm == "caption" else "#b0b8c8")
            place.plot([run[arm][axis] for run in result["runs"]], [row] * len(result["runs"]), "k.", markersize=4)
        place.axvline(chance[axis], color="#c44e52", linestyle=":", label="chance")
        place.set_xlabel(name)
        values = [result["spread"][arm][axis]["mean"] for arm in ARMS]
        if min(values) > 0.5:  # else the bars look alike
            place.set_xlim(0.5, 1)
    places[0].set_yticks(range(len(ARMS)), list(ARMS.values()))
    places[-1].legend(fontsize=7)
    seeds, epsilon = len(result["runs"]), result["setting"]["epsilon"]
    figure.suptitle(f"Linear-probe accuracy, ε = {epsilon:g}, {seeds} seeds (bars: mean and standard deviation)")
    figure.savefig(path, dpi=130)
    plt.close(figure)
