"""Means, spreads and differences of the learning benchmark, as numbers, as a table and as a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runs import deviation
from scipy.stats import t as student

ARMS = {
    "random": "random weights", "warm": "warm start alone", "mae": "+ private MAE, equal cost",
    "small": "+ private captioner, batch / 16", "caption": "+ private captioner",
}  # fmt: skip
CLAIMS = {"beats_warm_start": "warm", "beats_mae_of_equal_cost": "mae", "large_batch_beats_small": "small"}
"""For each claim, the arm that the captioner should beat."""
DECIDES = "colour_few"
"""The axis on which claims are tested and by which learning rates are chosen; the others are also reported.

Few labels, as DP-Cap reports: with many, a probe compensates for much that the encoder did not learn."""

Runs = list[dict[str, dict[str, float]]]


def spread(runs: Runs, axes: Iterable[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Arm -> axis -> mean and standard deviation over seeds."""
    return {arm: {axis: _spread([run[arm][axis] for run in runs]) for axis in axes} for arm in runs[0]}


def compared(runs: Runs, axes: Iterable[str], tested: int) -> dict[str, dict[str, dict[str, float]]]:
    """Claim -> axis -> difference between the captioner and the other, seed by seed, since both share a warm start.

    `tested` records were probed: all seeds share them, so their sampling error does not average out over seeds.
    """
    return {
        claim: {
            axis: _difference([run["caption"][axis] for run in runs], [run[other][axis] for run in runs], tested)
            for axis in axes
        }
        for claim, other in CLAIMS.items()
        if other in runs[0]
    }


def verdicts(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, str]:
    """Claim -> one sentence: whether it was shown on the deciding axis, and on which others."""
    sentences = {}
    for claim, axes in found.items():
        beside = [axis for axis, difference in axes.items() if difference["holds"] and axis != DECIDES]
        shown = "shown" if axes[DECIDES]["holds"] else "not shown"
        sentences[claim] = f"{shown} on {DECIDES}; of the others, on {', '.join(beside) or 'none'}"
    return sentences


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "std": deviation(values)}


def _difference(ours: list[float], theirs: list[float], tested: int) -> dict[str, float]:
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    # As if the two were probed on different records, which overstates it; the spread over few seeds may be too small.
    sampling = math.sqrt(sum(p * (1 - p) for p in map(statistics.mean, (ours, theirs))) / tested)
    error = deviation(differences) / math.sqrt(len(differences))
    apart = statistics.mean(differences) / math.hypot(error, sampling)
    return {
        "mean": statistics.mean(differences), "standard_error": error, "sampling_error": sampling,
        "standard_errors_apart": apart, "holds": apart > least_apart(len(differences)),
    }  # fmt: skip


def least_apart(seeds: int) -> float:
    """Standard errors from which a difference counts: Student's t, exceeded once in twenty times if nothing differs."""
    return float(student.ppf(0.95, seeds - 1)) if seeds > 1 else math.inf


def _arms(runs: Runs) -> dict[str, str]:
    return {arm: name for arm, name in ARMS.items() if arm in runs[0]}


def table(result: Mapping[str, Any]) -> str:
    axes = list(result["setting"]["chance"])
    lines = [" " * 33 + "".join(f"{axis:>16}" for axis in axes)]
    for arm, name in _arms(result["runs"]).items():
        cells = (result["spread"][arm][axis] for axis in axes)
        lines.append(f"{name:33}" + "".join(f"{cell['mean']:>8.3f} ± {cell['std']:.3f}" for cell in cells))
    for claim, found in result["compared"].items():
        cells = (f"{found[axis]['mean']:>+8.3f} ± {found[axis]['standard_error']:.3f}" for axis in axes)
        lines.append(f"{claim:33}" + "".join(cells) + f"   {result['verdicts'][claim]}")
    return "\n".join(lines)


def plot(result: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    setting, runs = result["setting"], result["runs"]
    arms = _arms(runs)
    panels = {axis: f"{axis}, {setting['size']['fitted']} labels" for axis in ("colour", "shape", "label")}
    panels["label"] = panels["label"].replace("label,", "both,")
    panels["colour_few"] = f"colour, {setting['shots']} labels a class"
    figure, places = plt.subplots(1, len(panels), figsize=(14, 3.2), sharey=True, layout="constrained")
    for place, (axis, name) in zip(places, sorted(panels.items()), strict=True):
        for row, arm in enumerate(arms):
            found = result["spread"][arm][axis]
            place.barh(row, found["mean"], xerr=found["std"], color="#4c72b0" if arm == "caption" else "#b0b8c8")
            place.plot([run[arm][axis] for run in runs], [row] * len(runs), "k.", markersize=4)
        values = [run[arm][axis] for run in runs for arm in arms]
        # Starts near the lowest value, or the bars would look alike; chance may be below.
        place.set_xlim(0.95 * min(values), min(1.0, 1.02 * max(values)))
        place.set_xlabel(f"{name} (chance {setting['chance'][axis]:.2f})")
    places[0].set_yticks(range(len(arms)), list(arms.values()))
    figure.suptitle(
        f"Linear-probe accuracy, ε = {setting['epsilon']:g}, {len(runs)} seeds (bars: mean and deviation; axes are cut)"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
