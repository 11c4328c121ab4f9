"""One page for people: curves, captions beside public images, the certificate. Public values only."""

from __future__ import annotations

import hashlib
import io
import json
import math
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.pages import html_sections
from murmuration.accounting.certificate.verify import Verdict
from murmuration.accounting.durable import atomic
from murmuration.accounting.epsilon.accountant import show_delta
from murmuration.accounting.escaping import html_page, printable
from murmuration.accounting.ledger.journal import Journal
from murmuration.data.store.place import is_url, without_access
from murmuration.model.statistics_head import CROSS, GRAM, SOLVING
from murmuration.model.whitened_head import WHITENING
from murmuration.train.config.root import Config, Phase
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.measures.shares import TITLES
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.context import RunContext
from murmuration.train.run.report_pictures import samples
from murmuration.train.storage.certify import Told, finish
from murmuration.train.storage.checkpoint import Checkpoints, Keep, Loaded
from murmuration.train.storage.run_dir import RunDir, measurements
from murmuration.train.storage.sibling_runs import RunLog

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


NEXT = [
    ("recompute ε from the ledger", "python launch/account.py verify RUN_DIR"),
    ("weights with their certificate", "python launch/export.py RUN_DIR OUT"),
    ("what the model can do", "python launch/evaluate.py --help"),
]
"""What people do with a finished run. Whoever reads the page may have it elsewhere."""


def write_report(run_dir: RunDir, config: Config, certificate: dict[str, Any], samples: list[dict[str, str]]) -> None:
    curves = read_curves(run_dir)
    # ε is what all phases so far have spent, and so is its budget.
    budgets = accumulate(0.0 if phase.privacy is None else phase.privacy.epsilon for phase in config.phases)
    page = html_page(
        Path(__file__).parent / "report.html.jinja",
        run=certificate["run"],
        statement=printable(certificate["claim"]["statement"]),
        texts=[text for text in (config.about.source, config.about.expect) if text] + outcomes(config, curves),
        phases=[
            {"name": phase.name, "kind": _kind(phase), "figure": figure(phase, curves[phase.name], budget)}
            for phase, budget in zip(config.phases, budgets, strict=True)
            if curves.get(phase.name)
        ],
        facts=facts(certificate),
        config=shown_config(config),
        samples=[sample | {"words": _judged(sample)} for sample in samples],
        next=NEXT,
        certificate=html_sections(certificate),
    )
    with atomic(run_dir.report) as file:
        file.write(page.encode())


def facts(certificate: dict[str, Any]) -> list[tuple[str, str]]:
    """What a reader asks first. How long the run took is not among it: private steps take as long as their records
    make them."""
    dates = certificate.get("dates") or {}
    told = {
        "model": certificate.get("model"),
        "trained by": certificate.get("engine"),
        "on": certificate.get("machine"),
        "first start": dates.get("first_start"),
        "last start": dates.get("last_start"),
        "versions": ", ".join(f"{name} {version}" for name, version in certificate["versions"].items()),
    }
    for phase in certificate["phases"]:
        if plan := phase.get("plan"):
            told[phase["name"]] = (
                f"n = {plan['records']:,}, q = {phase['sampling_rate']:.6g}, σ = {plan['noise_multiplier']:g}, "
                f"C = {plan['clip_norm']:g}, T = {plan['steps']:,}, δ = {show_delta(plan['delta'])}"
            )
    return [(name, str(value)) for name, value in told.items() if value]


def shown_config(config: Config) -> str:
    """The config with all defaults, for public pages. Addresses are cut where they may carry somebody's access."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(each) for key, each in value.items()}
        if isinstance(value, list):
            return [cut(each) for each in value]
        return without_access(value) if is_url(value) else value

    told = cut(config.model_dump(by_alias=True, exclude_none=True))
    if config.run.witness is not None:  # a hook's address, or a command's arguments, is often all that one needs for it
        told["run"]["witness"] = "not shown"
    return json.dumps(told, indent=2, ensure_ascii=False)


def _judged(sample: dict[str, str]) -> list[tuple[str, bool]]:
    """Each word of a caption, and whether it belongs to the picture. To say less is not wrong."""
    true = set(sample["truth"].lower().split())
    return [(word, not true or word.lower() in true) for word in sample["caption"].split()]


def _kind(phase: Phase) -> str:
    if phase.privacy:
        return "private"
    return "non-private, public data" if phase.data.public else "NOT PRIVATE"


def read_curves(run_dir: RunDir) -> dict[str, dict[str, dict[int, float]]]:
    """phase -> quantity -> step -> value; a step logged twice (resume) counts once."""
    curves: dict[str, dict[str, dict[int, float]]] = {}
    for phase, step, values in measurements(run_dir.public_log):
        for name, value in values.items():
            curves.setdefault(phase, {}).setdefault(name, {})[step] = value
    return curves


def outcomes(config: Config, curves: dict[str, dict[str, dict[int, float]]]) -> list[str]:
    """The last public measurements, beside the first ones and chance."""
    found: list[str] = []
    for phase in config.phases:
        points = curves.get(phase.name, {})
        for name, (label, chance) in answers_of(phase, points).items():
            values = points[name]
            first, last = values[min(values)], values[max(values)]
            beside = [f"before {phase.name}: {first:.3f}"] if phase.trains else []
            beside += [f"chance {chance:.3f}"] if chance is not None else []
            how = "zero-shot " if phase.objective == "caption" else ""
            found.append(f"{how}{label}: {last:.3f}" + (f" ({', '.join(beside)})" if beside else ""))
    return found


# After the last step: public captions, the certificate, the report, all of them from the durable checkpoint.


def certified(run: RunContext, phases: list[ReadyPhase], latest: Loaded) -> Verdict:
    """On the main rank. What is shown is written with the certificate, while another one could still be signed."""
    config, run_dir, board = run.config, run.folder, run.board
    shown = samples(phases, latest)
    run_dir.evaluation.write_text(json.dumps(shown) + "\n")

    def publish(document: dict[str, Any]) -> None:
        write_report(run_dir, config, document, shown)
        told = pages.markdown(document)
        board.certified(told, phases[latest.position.phase].name, latest.position.step, shown)
        # The claim and what it rests on; what it means in plain words is in the files.
        board.say(told.partition("## What this means")[0])
        for text in outcomes(config, read_curves(run_dir)):
            board.say(text)

    return finish(
        run, [RunLog.of(phase.index, config.run.registry) for phase in phases if phase.private], latest,
        lambda: _told(config, phases, latest), others=lambda: _best(config, run_dir, run.writer, latest),
        keep_key=config.run.keep_key, audited=config.run.audit, publish=publish,
    )  # fmt: skip


def _told(config: Config, phases: list[ReadyPhase], latest: Loaded) -> Told:
    identity = json.dumps(config.model_dump(by_alias=True), sort_keys=True).encode()
    contents = {phase.name: phase.contents() for phase in phases}
    mixed = {name: found["mixed"] for name, found in contents.items() if "mixed" in found}
    return Told(
        _model(config, latest), EngineSettings.of(config), {name: found["data"] for name, found in contents.items()},
        config.about.data, config.about.owner, {"config_sha256": hashlib.sha256(identity).hexdigest()},
        {"mixed_in": mixed} if mixed else {},
    )  # fmt: skip


def _model(config: Config, latest: Loaded) -> str:
    sums = tuple(f".{part}" for part in (GRAM, CROSS, SOLVING, WHITENING))  # that make a head, no weights of the model
    shapes: dict[str, list[int]] = latest.manifest["shapes"]
    parameters = sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith(sums))
    sees = "texts" if config.model.reads_texts else f"pictures of {config.model.image_size} px"
    return f"{config.model.title}, {sees}, {parameters:,} parameters"


def _best(config: Config, run_dir: RunDir, journal: Journal, latest: Loaded) -> list[Loaded]:
    """The checkpoint that export.py --best would take, where that is not the newest one."""
    if config.run.keep_best is None:
        return []
    found = Keep(best=config.run.keep_best).best_of(Checkpoints.listed(run_dir.checkpoints))
    known = {mark.digest for mark in journal.history.checkpoints}
    if not found or (entry := found[max(found)]).manifest_sha256 == latest.digest or entry.manifest_sha256 not in known:
        return []
    return [Loaded.open(run_dir.checkpoints / entry.folder, entry.manifest_sha256)]


def answers_of(phase: Phase, points: dict[str, dict[int, float]]) -> dict[str, tuple[str, float | None]]:
    """The measured shares of right answers: what people call them, and chance where the config knows the labels."""
    zero_shot = phase.evaluation.zero_shot if phase.evaluation else None
    axes = (zero_shot.axes or {}) if zero_shot else {}
    known = {f"zero_shot_{axis}": (axis, 1 / len(labels)) for axis, labels in axes.items()}
    others = sorted(name for name in points if name.startswith("zero_shot_") and name not in known)
    found = known | {name: (name.removeprefix("zero_shot_"), None) for name in others}
    found |= {name: (title, None) for name, title in TITLES.items()}
    return {name: answer for name, answer in found.items() if name in points}


def figure(phase: Phase, points: dict[str, dict[int, float]], budget: float) -> str:
    """The phase's panels side by side, as SVG. `budget`: of all phases so far."""
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
                axis.axhline(budget, color=ORANGE, linestyle="--", linewidth=1)
                axis.set_ylim(0, budget * 1.1)
                axis.text(min(points[name]), budget * 1.02, "budget", color=ORANGE, fontsize=8)
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
