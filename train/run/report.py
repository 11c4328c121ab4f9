"""One page for people: curves, captions beside public images, the certificate. Public values only."""

from __future__ import annotations

import hashlib
import io
import json
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from murmuration.accounting.certificate import certificate
from murmuration.accounting.certificate.amended import KEY as AMENDS
from murmuration.accounting.certificate.certificate import html_sections
from murmuration.accounting.certificate.composition import composed, known_runs
from murmuration.accounting.durable import atomic
from murmuration.accounting.escaping import printable
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.template import html_page
from murmuration.evaluation.shares import TITLES
from murmuration.train.config.root import Config, Phase
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.private import ALLOWANCE, SECRET_FOLDER, WATCHED
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.run.board import Board
from murmuration.train.run.report_pictures import samples
from murmuration.train.storage.certify import completed, earlier_certificate
from murmuration.train.storage.checkpoint import Checkpoints, Keep, Loaded
from murmuration.train.storage.run_dir import RunDir, measurements
from murmuration.train.storage.sibling_runs import RunLog

BLUE, ORANGE, GREY = "#2563a8", "#d9772b", "#8a8f98"


def write_report(run_dir: RunDir, config: Config, certificate: dict[str, Any], samples: list[dict[str, str]]) -> None:
    curves = read_curves(run_dir)
    page = html_page(
        Path(__file__).parent / "report.html.jinja",
        run=certificate["run"],
        statement=certificate["claim"]["statement"],
        texts=[text for text in (config.about.source, config.about.expect) if text] + outcomes(config, curves),
        phases=[
            {"name": phase.name, "kind": _kind(phase), "figure": figure(phase, curves[phase.name])}
            for phase in config.phases
            if curves.get(phase.name)
        ],
        samples=samples,
        certificate=html_sections(certificate),
    )
    with atomic(run_dir.report, one_writer=True) as file:
        file.write(page.encode())


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
        for name, (label, chance) in _answers(phase, points).items():
            values = points[name]
            first, last = values[min(values)], values[max(values)]
            beside = [f"before {phase.name}: {first:.3f}"] if phase.trains else []
            beside += [f"chance {chance:.3f}"] if chance is not None else []
            how = "zero-shot " if phase.objective == "caption" else ""
            found.append(f"{how}{label}: {last:.3f}" + (f" ({', '.join(beside)})" if beside else ""))
    return found


def _answers(phase: Phase, points: dict[str, dict[int, float]]) -> dict[str, tuple[str, float | None]]:
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

    panels = [name for name in ("loss", "public_loss", "epsilon", "update_snr") if name in points]
    answers = _answers(phase, points)
    count = len(panels) + bool(answers)
    if not count:
        return ""
    # Ids inside the SVG follow from what is drawn, and no date is written: it would say when the run ended.
    style: Any = {
        "svg.hashsalt": "murmuration",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "none",
    }
    with plt.rc_context(style):
        drawing, axes = plt.subplots(1, count, figsize=(3.1 * count, 2.5), squeeze=False, layout="constrained")
        for axis, name in zip(axes[0], panels, strict=False):
            steps, values = zip(*sorted(points[name].items()), strict=True)
            axis.plot(steps, values, color=BLUE, marker="o" if len(steps) < 30 else None, markersize=3)
            axis.set(title=PANELS[name], xlabel="step")
            if name == "epsilon" and phase.privacy is not None:
                axis.axhline(phase.privacy.epsilon, color=ORANGE, linestyle="--", linewidth=1)
                axis.set_ylim(0, phase.privacy.epsilon * 1.1)
                axis.text(min(points[name]), phase.privacy.epsilon * 1.02, "budget", color=ORANGE, fontsize=8)
            elif name == "update_snr":
                axis.set_ylim(bottom=0)
        if answers:
            _right_answers(axes[0][-1], phase, points, answers)
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None})
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


PANELS = {
    "loss": "training loss\n(public records)",
    "public_loss": "loss on the public\nheld-out set",
    "epsilon": "ε spent",
    "update_snr": "update signal / noise\n(on public batches)",
}

# After the last step: public captions, the certificate, the report, all of them from the durable checkpoint.

DEVIATIONS = [
    ALLOWANCE,
    "Proved here on the devices listed under `machine`; kernels of other devices may round a record's gradient "
    "depending on its row.",
    WATCHED,
    SECRET_FOLDER,
]


def write_certificate(
    config: Config, phases: list[ReadyPhase], run_dir: RunDir, journal: Journal, latest: Loaded, board: Board
) -> None:
    journal.finish()
    shown = samples(phases, latest)
    run_dir.evaluation.write_text(json.dumps(shown) + "\n")
    document = earlier_certificate(run_dir, journal.history, journal.ledger.entries)
    if document is None:
        document = _composed(config, phases, run_dir, journal, latest, board.times.day)
    elif AMENDS in document and document["claim"]["private"]:
        for log in _logs(config, phases):
            log.claim(journal.history.run_id, document["claim"]["epsilon_claimed"])
    certificate.write(document, run_dir.root)
    write_report(run_dir, config, document, shown)
    # The claim and what it rests on; what it means in plain words is in the files.
    board.say(certificate.markdown(document).partition("## What this means")[0])
    for text in outcomes(config, read_curves(run_dir)):
        board.say(text)


def _composed(
    config: Config, phases: list[ReadyPhase], run_dir: RunDir, journal: Journal, latest: Loaded, day: str
) -> dict[str, Any]:
    identity = json.dumps(config.model_dump(by_alias=True), sort_keys=True).encode()
    contents = {phase.name: phase.contents(journal.history.keyed) for phase in phases}
    mixed = {name: found["mixed"] for name, found in contents.items() if "mixed" in found}
    logs = _logs(config, phases)
    siblings = _siblings(logs, journal)
    extra: dict[str, Any] = {
        "known_deviations": DEVIATIONS,
        # Where a sibling's folder lies is not published.
        "siblings": [{key: value for key, value in other.items() if key != "folder"} for other in siblings],
        "about": {"data": config.about.data, "owner": config.about.owner},
        "model": f"{config.model.title}, pictures of {config.model.image_size} px",
        # Of the last start, like the files' times: when the run ended would reveal how long its private steps took.
        "dates": {"last_start": day},
        "engine": str(EngineSettings.of(config)),
        "machine": "cuda" if torch.cuda.is_available() else "cpu (gloo); not yet proved on GPUs with NCCL",
        "hashes": {
            "config_sha256": hashlib.sha256(identity).hexdigest(),
            "data_manifests": {name: found["data"] for name, found in contents.items()},
            **({"mixed_in": mixed} if mixed else {}),
            "checkpoint_manifest_sha256": latest.digest,
        },
    }
    document = certificate.compose(journal.history, journal.ledger.entries, extra)
    if (claimed := document["claim"]["epsilon_claimed"]) is not None and document["claim"]["private"]:
        for log in logs:
            log.claim(journal.history.run_id, claimed)
        if others := known_runs(siblings):
            document["composition"] = composed(journal.history, journal.ledger.entries, claimed, others)
    return completed(run_dir, journal.history, document, [latest, *_best(config, run_dir, journal, latest)])


def _best(config: Config, run_dir: RunDir, journal: Journal, latest: Loaded) -> list[Loaded]:
    """The checkpoint that export.py --best would take, where that is not the newest one."""
    if config.run.keep_best is None:
        return []
    found = Keep(best=config.run.keep_best).best_of(Checkpoints.listed(run_dir.checkpoints))
    known = {mark.digest for mark in journal.history.checkpoints}
    if not found or (entry := found[max(found)]).manifest_sha256 == latest.digest or entry.manifest_sha256 not in known:
        return []
    return [Loaded.open(run_dir.checkpoints / entry.folder, entry.manifest_sha256)]


def _logs(config: Config, phases: list[ReadyPhase]) -> list[RunLog]:
    return [RunLog.of(phase.index, config.run.registry) for phase in phases if phase.private]


def _siblings(logs: list[RunLog], journal: Journal) -> list[dict[str, Any]]:
    """Other runs on the records that this one protects; where this run could not be logged, neither could others."""
    own = journal.history.run_id
    found: dict[str, dict[str, Any]] = {}
    for log in logs:
        others = log.siblings({own})
        if log.files and not log.knows(own):
            others.append({"id": "unknown", "run": "no log of runs could be written, so other runs are not known"})
        found |= {json.dumps(other, sort_keys=True): other for other in others}
    return list(found.values())
