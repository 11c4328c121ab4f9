"""Results side by side: a table, and accuracy against ε where certificates say what was spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from murmuration.accounting.epsilon.accountant import show_delta, show_epsilon
from murmuration.accounting.escaping import first_line, printable
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.session.result import read, shown

SHARES = ("top-1", "accuracy", "mIoU", "box AP", "mask AP")
Axis = Literal["epsilon", "parameters", "batch", "records"]
AXES: dict[Axis, str] = {
    "epsilon": "ε", "parameters": "parameters of the model", "batch": "expected batch of its private training",
    "records": "private records that it was trained on",
}  # fmt: skip
BLUE, GREY = "#2563a8", "#8a8f98"


@dataclass(frozen=True)
class Line:
    model: str
    protocol: str
    measure: str
    number: dict[str, Any]
    epsilon: float | None
    delta: float | None
    refuted: bool
    private: bool | None
    """None without a certificate."""
    records: str
    """Which records were scored, as far as a digest says."""
    places: dict[str, float | None] = field(default_factory=dict)
    """Where it stands on each axis of a plot; None where nothing says."""

    @property
    def privacy(self) -> str:
        if self.private is None:
            return "no certificate"
        if self.epsilon is None:
            return "NOT PRIVATE"
        at = "" if self.delta is None else f" at δ = {show_delta(self.delta)}"
        claim = f"ε = {show_epsilon(self.epsilon)}{at}"
        return f"{claim}, REFUTED" if self.refuted else claim


def lines_of(paths: list[Path]) -> list[Line]:
    return [line for path in paths for line in _lines(path)]


def _lines(path: Path) -> list[Line]:
    found = read(path)
    if found.get("private"):
        raise EvaluationError(f"{path} is private, and a comparison is printed for all to see; leave it out")
    try:
        certificate, way = found["certificate"] or {}, found["settings"].get("way")
        protocol = found["protocol"] + (f" ({way})" if way else "")
        scored = found["data"]["test"]["digest"]
        places = {**certificate, "parameters": found["model"].get("parameters")}
        places = {axis: places.get(axis) for axis in get_args(Axis)}
        _require_parts(found, certificate)
        return [
            Line(
                found["model"]["what"],
                protocol,
                name,
                number,
                certificate.get("epsilon"),
                certificate.get("delta"),
                bool(certificate.get("refuted")),
                certificate.get("private"),
                scored,
                places,
            )
            for name, number in found["numbers"].items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EvaluationError(
            f"{path} is not what an evaluation writes ({first_line(error)}); evaluate again"
        ) from None


def _require_parts(found: dict[str, Any], certificate: dict[str, Any]) -> None:
    """What the table and the plot take for granted."""
    if not isinstance(found["model"]["what"], str) or not isinstance(found["data"]["test"]["digest"], str):
        raise ValueError("its model or its records have no name")
    for name in ("epsilon", "delta"):
        if not isinstance(certificate.get(name), int | float | None):
            raise ValueError(f"the certificate's {name} is no number")
    for name, number in found["numbers"].items():
        shown(number)
        if not float(number["low"]) <= float(number["value"]) <= float(number["high"]):
            raise ValueError(f"{name} lies outside its interval")


def table(lines: list[Line]) -> str:
    rows = [("model", "protocol", "measure", "privacy", "value (95 % interval, records; ± over draws)")]
    rows += [(line.model, line.protocol, line.measure, line.privacy, shown(line.number)) for line in lines]
    return aligned([tuple(map(printable, row)) for row in rows])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The columns of a table below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def plot(lines: list[Line], path: Path, by: Axis = "epsilon") -> None:
    """Shares against ε or what else `by` names, in which the papers' figures put them; those that have none as dashed
    lines."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shares = [line for line in lines if line.measure.split(",")[0] in SHARES]
    if not shares:
        raise EvaluationError(
            "none of these results has an accuracy to draw; name those of probe, zero-shot or classify"
        )
    with rc_context({"svg.hashsalt": "murmuration", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axis: Any = figure.subplots()
        # An ε says nothing without its δ: on the axis if it is one for all, at each point otherwise.
        deltas = {line.delta for line in shares if line.delta is not None} if by == "epsilon" else set()
        common = f" at δ = {show_delta(next(iter(deltas)))}" if len(deltas) == 1 else ""
        for line in shares:
            claim = [line.privacy] if line.refuted or (len(deltas) > 1 and line.epsilon is not None) else []
            _draw(axis, line, line.places.get(by), claim)
        axis.set(xlabel=AXES[by] + common, ylabel="accuracy, with 95 % interval", ylim=(0, 1))
        if by == "epsilon":
            axis.set_xlim(left=0)
        elif any(line.places.get(by) for line in shares):
            axis.set_xscale("log")
        figure.savefig(path, metadata={"Date": None})


def _draw(axis: Any, line: Line, place: float | None, claim: list[str]) -> None:
    value, of = line.number["value"], line.measure.partition(", ")[2]
    name = printable(", ".join(filter(None, (line.model, line.protocol, of, *claim))))
    if place is None:
        axis.axhline(value, color=GREY, linestyle="--", linewidth=1)
        axis.text(1, value, name, transform=axis.get_yaxis_transform(), ha="right", va="bottom", parse_math=False)
        return
    error = [[value - line.number["low"]], [line.number["high"] - value]]
    axis.errorbar([place], [value], yerr=error, fmt="o", color=BLUE, capsize=3)
    axis.annotate(name, (place, value), (4, 4), textcoords="offset points", parse_math=False)
