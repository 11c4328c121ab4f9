"""What a study found: one table, one figure, and what its runs cost the records together, as JSON, HTML and PNG."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from murmuration.accounting.certificate.composition import SUMS, composed, known_runs
from murmuration.accounting.durable import atomic
from murmuration.accounting.epsilon.accountant import show_delta, show_epsilon
from murmuration.accounting.escaping import html_page
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.heads import logs_of
from murmuration.accounting.ledger.history import History
from murmuration.evaluation.measures.interval import mean, spread
from murmuration.evaluation.study.study_file import Measure, Run, Study, Value
from murmuration.evaluation.study.train_runs import Folder, Trained
from murmuration.train.storage.sibling_runs import RunLog

COLOURS = ("#2563a8", "#c2410c", "#15803d", "#7c3aed", "#b91c1c", "#0e7490", "#a16207", "#4b5563")
BARS_WITH_LEVEL_NAMES = 4
ERRORS = (
    "After ± and in the figure: the standard deviation over runs, which differ in keys and initial weights. In "
    "brackets: Student's 95 % interval of their mean. Neither tells what other test records would change."
)
ONE_EACH = "One run each, which tells nothing of how much runs vary."


def outcome_of(study: Study, runs: Sequence[Run], ended: Sequence[Trained], folder: Folder) -> dict[str, Any]:
    """Every arm at every value: mean, deviation and 95 % interval over its seeds."""
    rows = []
    for arm in study.arms:
        places = list(dict.fromkeys(run.place for run in runs if run.arm == arm.name))
        for place in places:
            here = [each for each in ended if (each.run.arm, each.run.place) == (arm.name, place)]
            good = [each for each in here if each.fault is None]
            row: dict[str, Any] = {"arm": arm.name, "place": place, "runs": len(good), "failed": len(here) - len(good)}
            labels = [measure.label for measure in study.measures]
            numbers = [[each.numbers[label] for each in good if label in each.numbers] for label in labels]
            row["measures"] = {
                measure.label: _summary(measure, values)
                for measure, values in zip(study.measures, numbers, strict=True)
            }  # fmt: skip
            rows.append(row)
    faults = [{"run": each.run.name, "why": each.fault} for each in ended if each.fault is not None]
    left = [run.name for run in runs if run not in [each.run for each in ended]]
    return {
        "format": "murmuration-study/1",
        "title": study.title,
        "about": study.about,
        "axis": None if study.axis is None else study.axis.model_dump(),
        "rows": rows,
        "failed": faults,
        "missing": left,
        "cost": cost_of(folder.all_runs()),
    }


def _summary(measure: Measure, values: list[float]) -> dict[str, Any] | None:
    if not values:
        return None
    found = asdict(mean(values)) | {"sd": spread(values), "values": values}
    if measure.share:  # Student's interval of a few shares near 0 or 1 may leave what is possible
        found |= {"low": max(0.0, found["low"]), "high": min(1.0, found["high"])}
    return found


def cost_of(folders: Sequence[Path]) -> dict[str, Any] | None:
    """What all private runs together cost a record: the price of looking at all of them, and of choosing among them,
    and so with those whose folders beside these were removed, as far as the logs of the records know. None where no
    run is private."""
    lines, bare, unread = [], 0, list[str]()
    ids, logs = set[str](), dict[Path, str]()
    for folder in folders:
        if not (folder / "ledger.jsonl").exists():  # nothing was trained there
            continue
        try:
            history, _ = History.read(folder / "ledger.jsonl")
        except (OSError, LedgerError):
            unread.append(folder.name)
            continue
        bare += not all(history.nonprivate.values())
        ids |= set(history.ids)
        logs |= {log: history.run_id for noted in logs_of(folder) for log in noted.logs}
        if history.plans:
            lines.append({"id": history.run_id, "folder": str(folder)})
    removed = _removed({folder.resolve().parent for folder in folders}, ids, logs)
    without_noise = {line["id"] for line in removed if line.get("private") is False}
    bare += len(without_noise)
    found_here = [run for line in lines for run in known_runs([line])]
    gone = known_runs(line for line in removed if line["id"] not in without_noise)
    # Each at what it claims, whichever comes first: a run may claim more than it has charged.
    known = sorted((*found_here, *gone), key=lambda run: (not run.private, run.history is None))
    if not known and not unread:
        return None
    found: dict[str, Any]
    if unread:  # a sum without it would be too small
        found = {"because": f"the ledger of {', '.join(unread)} cannot be read"}
    elif (first := known[0]).history is None or first.entries is None:
        found = {"because": "none of them keeps a promise"}
    else:
        found = composed(first.history, first.entries, first.epsilon, known[1:])
    told = {name: found.get(name) for name in (*SUMS, "because")}
    return {"runs": len(known) + len(unread), "without_noise": bare, **told}


def _removed(parents: set[Path], ids: set[str], logs: dict[Path, str]) -> list[dict[str, Any]]:
    """The lines of other runs that lay in these folders. `logs`: each with a run on the records in question."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for log, run in logs.items():
        for line in RunLog.of_run([log], run).siblings(ids):
            if Path(str(line.get("folder"))).parent in parents:
                found.setdefault((line["id"], str(line.get("phase"))), line)
    return list(found.values())


def table_of(study: Study, found: dict[str, Any]) -> list[list[str]]:
    axis = [] if study.axis is None else [study.axis.label]
    rows = [["arm", *axis, "runs", *(measure.label for measure in study.measures)]]
    for row in found["rows"]:
        place = [] if study.axis is None else [_shown(row["place"])]
        runs = f"{row['runs']}" + (f" ({row['failed']} failed)" if row["failed"] else "")
        rows.append([row["arm"], *place, runs, *(_number(row["measures"][each.label]) for each in study.measures)])
    return rows


def cost_in_words(cost: dict[str, Any] | None) -> str:
    if cost is None:
        return "No run of this study was private."
    if cost["epsilon_sum"] is None:
        return f"What the {cost['runs']} runs cost a record together is not known: {cost.get('because')}."
    bare = cost["without_noise"]
    more = f" {bare} more trained without noise on records not declared public, which no ε covers." if bare else ""
    choice = "To choose among them by these numbers costs that much, not the ε of the chosen run."
    return f"{sums_in_words(cost)} {choice}{more}"


def sums_in_words(cost: dict[str, Any]) -> str:
    told = [
        f"ε = {show_epsilon(cost[f'epsilon_{by}'], 2)} at δ = {show_delta(cost[f'delta_{by}'])}"
        for by in ("together", "sum")
    ]
    # Steps of one run compose to its claim, or, before it has ended, to a little more: they are counted whole.
    if cost["runs"] == 1:
        return f"The one private run costs a record {told[1]}."
    fixed, otherwise = f"{told[0]} if their settings were fixed beforehand", f"{told[1]} in any case"
    return f"The {cost['runs']} private runs together cost a record {fixed}, and {otherwise}."


def _shown(value: Value) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _number(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    text = f"{found['value']:.4f}"
    return text if found["n"] == 1 else f"{text} ± {found['sd']:.4f} ({found['low']:.4f} … {found['high']:.4f})"


def write(study: Study, found: dict[str, Any], out: Path) -> None:
    figure = draw(study, found)
    page = html_page(
        Path(__file__).with_name("study.html.jinja"), title=study.title, about=study.about, rows=table_of(study, found),
        figure=base64.b64encode(figure).decode(), cost=cost_in_words(found["cost"]), failed=found["failed"],
        missing=found["missing"], errors=ERRORS if study.seeds > 1 else ONE_EACH,
    )  # fmt: skip
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    for name, content in (("study.json", text.encode()), ("study.html", page.encode()), ("study.png", figure)):
        with atomic(out / name, 0o644) as file:
            file.write(content)


def draw(study: Study, found: dict[str, Any]) -> bytes:
    """A panel for each of the first measures: a line per arm with the deviation over seeds, or a bar per arm."""
    from io import BytesIO

    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = study.measures[: study.panels]
    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(6 * len(shown), 4), dpi=150, layout="constrained")
        panels: Any = figure.subplots(1, len(shown), squeeze=False)
        for measure, axis in zip(shown, panels[0], strict=True):
            _panel(study, found, measure.label, axis)
        figure.suptitle(study.title, parse_math=False, fontsize=10)
        buffer = BytesIO()
        figure.savefig(buffer, metadata={"Software": None})
    return buffer.getvalue()


def _panel(study: Study, found: dict[str, Any], label: str, axis: Any) -> None:
    for number, arm in enumerate(study.arms):
        rows = [row for row in found["rows"] if row["arm"] == arm.name and row["measures"][label]]
        heights = [row["measures"][label]["value"] for row in rows]
        errors = [row["measures"][label]["sd"] for row in rows]
        colour = COLOURS[number % len(COLOURS)]
        if study.axis is None:
            axis.bar([arm.name] * len(rows), heights, yerr=errors, color=colour, capsize=3)
            continue
        places = [_place(study, row["place"]) for row in rows]
        axis.errorbar(places, heights, yerr=errors, color=colour, marker="o", capsize=3, label=arm.name)
    axis.set_ylabel(label, parse_math=False)
    axis.grid(alpha=0.3)
    if study.axis is None:
        if len(study.arms) > BARS_WITH_LEVEL_NAMES:
            for name in axis.get_xticklabels():
                name.set(rotation=30, ha="right")
        return
    axis.set_xlabel(study.axis.label, parse_math=False)
    if study.axis.scale == "log":
        axis.set_xscale("log")
    values = [_place(study, value) for value in study.axis.values]
    axis.set_xticks(values, [_shown(value) for value in study.axis.values], minor=False)
    axis.minorticks_off()
    axis.legend()


def _place(study: Study, value: Value) -> float:
    """Numbers stand at their value; others one after the other."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    assert study.axis is not None
    return float(1 + study.axis.values.index(value)) if value in study.axis.values else 0.0
