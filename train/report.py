"""One page for people: curves, captions beside public images, the certificate. Public values only."""

from __future__ import annotations

import html
import io
from typing import Any

from accounting.certificate import markdown
from accounting.escaping import printable
from train.config import Config, Phase
from train.run_dir import RunDir, measurements

BLUE, ORANGE, GREY = "#2563a8", "#d9772b", "#8a8f98"


def write_report(run_dir: RunDir, config: Config, certificate: dict[str, Any], samples: list[dict[str, str]]) -> None:
    curves = read_curves(run_dir)
    claim = certificate["claim"]
    body = [f"<h1>{html.escape(certificate['run'])}</h1>", f"<p class='claim'>{html.escape(claim['statement'])}</p>"]
    body += [f"<p>{html.escape(text)}</p>" for text in (config.about.source, config.about.expect) if text]
    body += [f"<p>{html.escape(text)}</p>" for text in outcomes(config, curves)]
    for phase in config.phases:
        points = curves.get(phase.name, {})
        if points:
            kind = "private" if phase.privacy else "non-private, public data" if phase.data.public else "NOT PRIVATE"
            body += [f"<h2>{html.escape(phase.name)} <small>({kind})</small></h2>", figure(phase, points)]
    if samples:
        title = "Captions on" if samples[0]["truth"] else "Hidden patches filled in on"
        body += [f"<h2>{title} public held-out images</h2>", "<div class='samples'>"]
        body += [
            f"<figure><img src='data:image/png;base64,{s['png']}' alt=''><figcaption>{html.escape(s['caption'])}"
            f"<small>{html.escape(s['truth'])}</small></figcaption></figure>"
            for s in samples
        ]
        body += ["</div>"]
        if samples[0]["truth"]:
            body += ["<p class='note'>Small print: the caption that belongs to the image.</p>"]
    body += ["<h2>Certificate</h2>", f"<pre>{html.escape(markdown(certificate))}</pre>"]
    temporary = run_dir.root / ".report.tmp"
    temporary.write_text(PAGE.format(title=html.escape(certificate["run"]), body="\n".join(body)))
    temporary.replace(run_dir.report)


def read_curves(run_dir: RunDir) -> dict[str, dict[str, dict[int, float]]]:
    """phase -> quantity -> step -> value; a step logged twice (resume) counts once."""
    curves: dict[str, dict[str, dict[int, float]]] = {}
    for phase, step, values in measurements(run_dir.public_log):
        for name, value in values.items():
            curves.setdefault(phase, {}).setdefault(name, {})[step] = value
    return curves


def outcomes(config: Config, curves: dict[str, dict[str, dict[int, float]]]) -> list[str]:
    """What the public measurements came to, next to where they started and to chance."""
    found: list[str] = []
    for phase in config.phases:
        points = curves.get(phase.name, {})
        settings = phase.evaluation.zero_shot if phase.evaluation else None
        for axis, labels in settings.axes.items() if settings else ():
            values = points.get(f"zero_shot_{axis}")
            if values:
                first, last = values[min(values)], values[max(values)]
                beside = f"before {phase.name}: {first:.3f}, chance {1 / len(labels):.3f}"
                found.append(f"zero-shot {axis}: {last:.3f} ({beside})")
    return found


def figure(phase: Phase, points: dict[str, dict[int, float]]) -> str:
    """The phase's panels side by side, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    panels = [name for name in ("loss", "public_loss", "epsilon", "update_snr") if name in points]
    answers = sorted(name for name in points if name.startswith("zero_shot_"))
    count = len(panels) + bool(answers)
    if not count:
        return ""
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    with plt.rc_context(style):
        drawing, axes = plt.subplots(1, count, figsize=(3.1 * count, 2.5), squeeze=False, layout="constrained")
        for axis, name in zip(axes[0], panels, strict=False):
            steps, values = zip(*sorted(points[name].items()), strict=True)
            axis.plot(steps, values, color=BLUE, marker="o" if len(steps) < 30 else None, markersize=3)
            axis.set(title=TITLES[name], xlabel="step")
            if name == "epsilon" and phase.privacy is not None:
                axis.axhline(phase.privacy.epsilon, color=ORANGE, linestyle="--", linewidth=1)
                axis.set_ylim(0, phase.privacy.epsilon * 1.1)
                axis.text(min(points[name]), phase.privacy.epsilon * 1.02, "budget", color=ORANGE, fontsize=8)
            elif name == "update_snr":
                axis.set_ylim(bottom=0)
        if answers:
            _zero_shot(axes[0][-1], phase, points, answers)
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg")
        plt.close(drawing)
    return buffer.getvalue().partition("<svg")[1] + buffer.getvalue().partition("<svg")[2]


def _zero_shot(axis: Any, phase: Phase, points: dict[str, dict[int, float]], names: list[str]) -> None:
    settings = phase.evaluation.zero_shot if phase.evaluation else None
    labels = [name.removeprefix("zero_shot_") for name in names]
    lines = []
    for name, label, colour in zip(names, labels, (BLUE, ORANGE, GREY), strict=False):
        steps, values = zip(*sorted(points[name].items()), strict=True)
        lines += axis.plot(steps, values, color=colour, marker="o", markersize=3)
        if settings is not None and label in settings.axes:
            axis.axhline(1 / len(settings.axes[label]), color=colour, linestyle=":", linewidth=1)
    axis.set(title="zero-shot accuracy\n(dotted: chance)", xlabel="step", ylim=(0, 1))
    # Set as plain texts: a legend hides labels that begin with _ and takes what stands between two $ for a formula.
    legend = axis.legend(lines, [str(number) for number in range(len(lines))], frameon=False, fontsize=8)
    for text, label in zip(legend.get_texts(), labels, strict=False):
        text.set_text(printable(label))
        text.set_parse_math(False)


TITLES = {
    "loss": "training loss\n(public records)",
    "public_loss": "loss on the public\nheld-out set",
    "epsilon": "ε spent",
    "update_snr": "update signal / noise\n(on public batches)",
}

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1c2530; max-width: 1080px; margin: 2em auto; padding: 0 1em }}
h1 {{ margin-bottom: 0 }} h2 {{ margin-top: 1.6em }} small {{ color: #68717d; font-weight: normal }}
.claim {{ font-size: 1.15em; border-left: 4px solid #2563a8; padding: .4em .8em; background: #f2f6fb }}
svg {{ max-width: 100%; height: auto }}
.samples {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 1em }}
figure {{ margin: 0 }} figure img {{ width: 100%; image-rendering: pixelated; border-radius: 4px }}
figcaption {{ font-size: .85em }} figcaption small {{ display: block; font-size: .85em }}
pre {{ background: #f6f7f9; padding: 1em; overflow-x: auto; white-space: pre-wrap; font-size: 12px }}
.note {{ color: #68717d; font-size: .85em }}
</style></head><body>
{body}
</body></html>
"""
