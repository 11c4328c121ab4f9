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
LEAST_ERROR = 0.01
"""Of a difference of accuracies: what a spread that happens to come out near zero over few seeds is taken for."""

APART = 2.92
"""Standard errors from which a difference counts: Student's t for three seeds, once in twenty if nothing differs."""

Runs = list[dict[str, dict[str, float]]]


def spread(runs: Runs, axes: Iterable[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Arm -> axis -> mean and standard deviation over seeds."""
    return {arm: {axis: _spread([run[arm][axis] for run in runs]) for axis in axes} for arm in runs[0]}


def compared(runs: Runs, axes: Iterable[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Claim -> axis -> difference of the captioner to the other, seed by seed since they share a warm start."""
    return {
        claim: {axis: _difference([run["caption"][axis] - run[other][axis] for run in runs]) for axis in axes}
        for claim, other in CLAIMS.items()
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "std": _std(values)}


def _difference(values: list[float]) -> dict[str, float]:
    error = math.hypot(_std(values) / math.sqrt(len(values)), LEAST_ERROR)
    return {
        "mean": statistics.mean(values), "standard_error": _std(values) / math.sqrt(len(values)),
        "standard_errors_apart": statistics.mean(values) / error, "holds": statistics.mean(values) / error > APART,
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
        lines.append(f"{claim:33}" + "".join(cells) + "   holds: " + str({a: found[a]["holds"] for a in axes}))
    return "\n".join(lines)


def plot(result: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chance = result["setting"]["chance"]
    figure, panels = plt.subplots(1, len(chance), figsize=(4 * len(chance), 3), sharey=True, layout="constrained")
    for panel, (axis, level) in zip(panels, chance.items(), strict=True):
        for row, arm in enumerate(ARMS):
            found = result["spread"][arm][axis]
            panel.barh(row, found["mean"], xerr=found["std"], color="#4c72b0" if arm == "caption" else "#b0b8c8")
            panel.plot([run[arm][axis] for run in result["runs"]], [row] * len(result["runs"]), "k.", markersize=4)
        panel.axvline(level, color="#c44e52", linestyle=":", label="chance")
        panel.set_xlabel("colour and shape, 32 classes" if axis == "label" else axis)
        panel.set_xlim(0, 1)
    panels[0].set_yticks(range(len(ARMS)), list(ARMS.values()))
    panels[-1].legend(fontsize=7)
    seeds, epsilon = len(result["runs"]), result["setting"]["epsilon"]
    figure.suptitle(f"Linear-probe accuracy, ε = {epsilon:g}, {seeds} seeds (bars: mean and standard deviation)")
    figure.savefig(path, dpi=130)
    plt.close(figure)
