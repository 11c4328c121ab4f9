"""The curves of a phase as one drawing: public values only."""

from __future__ import annotations

import io
from itertools import cycle
from typing import Any

from murmuration.accounting.escaping import printable
from murmuration.train.config.phase import Phase
from murmuration.train.measures.shares import TITLES

BLUE, ORANGE, GREY = "#2563a8", "#d9772b", "#8a8f98"
COLUMNS = 3
"""Panels side by side, as many as a page is wide."""

PANELS = {
    "loss": "training loss\n(public records)",
    "public_loss": "loss on the public\nheld-out set",
    "lr": "learning rate",
    "epsilon": "ε spent",
    "update_snr": "update signal / noise\n(on public batches)",
}


def answers_of(phase: Phase, points: dict[str, dict[int, float]]) -> dict[str, tuple[str, float | None]]:
    """The measured shares of right answers: what people call them, and chance where the config knows the labels."""
    zero_shot = phase.evaluation.zero_shot if phase.evaluation else None
    axes = (zero_shot.axes or {}) if zero_shot else {}
    known = {f"zero_shot_{axis}": (axis, 1 / len(labels)) for axis, labels in axes.items()}
    others = sorted(name for name in points if name.startswith("zero_shot_") and name not in known)
    found = known | {name: (name.removeprefix("zero_shot_"), None) for name in others}
    found |= {name: (title, None) for name, title in TITLES.items()}
    return {name: answer for name, answer in found.items() if name in points}


def figure(phase: Phase, points: dict[str, dict[int, float]]) -> str:
    """The phase's panels side by side, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    panels = [name for name in PANELS if name in points]
    answers = answers_of(phase, points)
    count = len(panels) + bool(answers)
    if not count:
        return ""
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    # Ids inside the SVG follow from what is drawn, and no date is written: it would say when the run ended.
    style: Any = {
        "svg.hashsalt": "murmuration",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "none",
    }
    with plt.rc_context(style):
        drawing, grid = plt.subplots(
            rows, columns, figsize=(4 * columns, 2.6 * rows), squeeze=False, layout="constrained"
        )
        axes = list(grid.flat)
        for unused in axes[count:]:
            unused.remove()
        for axis, name in zip(axes, panels, strict=False):
            steps, values = zip(*sorted(points[name].items()), strict=True)
            axis.plot(steps, values, color=BLUE, marker="o" if len(steps) < 30 else None, markersize=3)
            axis.set(title=PANELS[name], xlabel="step")
            if name == "epsilon" and phase.privacy is not None:
                axis.axhline(phase.privacy.epsilon, color=ORANGE, linestyle="--", linewidth=1)
                axis.set_ylim(0, phase.privacy.epsilon * 1.1)
                axis.text(min(points[name]), phase.privacy.epsilon * 1.02, "budget", color=ORANGE, fontsize=8)
            elif name in ("lr", "update_snr"):
                axis.set_ylim(bottom=0)
        if answers:
            _right_answers(axes[count - 1], phase, points, answers)
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
        plt.close(drawing)
    return buffer.getvalue().partition("<svg")[1] + buffer.getvalue().partition("<svg")[2]


def _right_answers(
    axis: Any, phase: Phase, points: dict[str, dict[int, float]], answers: dict[str, tuple[str, float | None]]
) -> None:  # fmt: skip
    lines = []
    for (name, (_, chance)), colour in zip(answers.items(), cycle((BLUE, ORANGE, GREY))):
        steps, values = zip(*sorted(points[name].items()), strict=True)
        lines += axis.plot(steps, values, color=colour, marker="o", markersize=3)
        if chance is not None:
            axis.axhline(chance, color=colour, linestyle=":", linewidth=1)
    how = "zero-shot accuracy" if phase.objective == "caption" else "accuracy on the\npublic held-out set"
    known = any(chance is not None for _, chance in answers.values())
    axis.set(title=how + ("\n(dotted: chance)" if known else ""), xlabel="step", ylim=(0, 1))
    # Set as plain text: a legend hides labels that begin with _ and reads what lies between two $ as a formula.
    legend = axis.legend(lines, [str(number) for number in range(len(lines))], frameon=False, fontsize=8)
    for text, (label, _) in zip(legend.get_texts(), answers.values(), strict=False):
        text.set_text(printable(label))
        text.set_parse_math(False)
