"""A certificate as pages for people: Markdown and HTML of the same content, with a model-card block.

The evaluation follows the components of NIST SP 800-226 (March 2025), "Guidelines for Evaluating Differential Privacy
Guarantees": the guarantee, the algorithms, the deployment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from murmuration.accounting import escaping
from murmuration.accounting.certificate.evidence import refutations, rows
from murmuration.accounting.certificate.explain import Attacks, explain, percent
from murmuration.accounting.certificate.limits import curve_of, delta_of
from murmuration.accounting.durable import atomic
from murmuration.accounting.epsilon.accountant import round_up, show_delta
from murmuration.accounting.escaping import printable_leaves
from murmuration.accounting.metrics import metric_of_dict
from murmuration.accounting.sampling import sampling_of_dict
from murmuration.accounting.unit import Unit, contribution_in_words, noun_of

HERE = Path(__file__).parent
VERIFY = "python launch/account.py verify RUN_DIR"
# Limits that most readers ask for; the picture shows all of them.
TOLD = (1e-4, 1e-3, 1e-2, 0.1)
NOT_STATED = "not stated (the config's about section)"


@dataclass(frozen=True)
class Block:
    """Content that both pages show, each in its own markup. Texts are plain: any markup in them came with a name.

    `text`, `strong` and `alarm` contain a paragraph; `code`, lines that are shown as they are, none of which may begin
    with a fence; `list`, its entries; `table`, its rows, the first of which is the header; and `picture`, an SVG
    drawing made of numbers alone, which is left out where pictures cannot be shown.
    """

    kind: Literal["text", "strong", "alarm", "code", "list", "table", "picture"]
    content: Any
    language: str = ""


class Section(NamedTuple):
    title: str
    blocks: list[Block]


def markdown(certificate: dict[str, Any]) -> str:
    sections = _sections(printable_leaves(certificate))
    return escaping.markdown_page(HERE / "certificate.md.jinja", sections=sections).rstrip() + "\n"


def html_page(certificate: dict[str, Any]) -> str:
    """With the scripts that check the certificate against a ledger, and the certificate itself for them: every number
    as it is signed, and no `<`, which could end the element."""
    embedded = json.dumps(certificate).replace("<", "\\u003c")
    sections = _sections(printable_leaves(certificate))
    return escaping.html_page(
        HERE / "certificate.html.jinja", sections=sections, certificate=embedded, scripts=_scripts()
    )


def check_page() -> str:
    """The same checks for any certificate: docs/verify.html."""
    return escaping.html_page(HERE / "certificate.html.jinja", sections=[], certificate=None, scripts=_scripts())


def _scripts() -> str:
    names = ("accountant.js", "ledger.js", "page.js")
    return "\n".join((HERE / "browser" / name).read_text(encoding="utf-8") for name in names)


def pages(certificate: dict[str, Any]) -> dict[str, bytes]:
    """The files for people, by name. Lone surrogates, which file names may contain, are written as JSON writes them."""
    texts = {"certificate.html": html_page(certificate), "certificate.md": markdown(certificate)}
    return {name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()}


def html_sections(certificate: dict[str, Any]) -> str:
    """The same content as part of another page, which has its own title above it."""
    sections = _sections(printable_leaves(certificate))
    return escaping.html_page(HERE / "certificate_sections.html.jinja", sections=sections, top=2)


def _sections(certificate: dict[str, Any]) -> list[Section]:
    claim = certificate["claim"]
    ledger = certificate["ledger"]
    found = [
        Section(
            f"Privacy certificate: {certificate['run']}",
            [
                *(Block("alarm", f"REFUTED by this run's own audit: {each}") for each in refutations(certificate)),
                Block("strong", claim["statement"]),
                Block("list", _facts(certificate)),
            ],
        ),
        Section("Steps", [Block("table", _phase_table(certificate))]),
        Section("What this means", [Block("text", text) for text in _meaning(certificate)]),
        *_limits(certificate),
        *_audited(certificate),
        Section("Evaluation after NIST SP 800-226", nist(certificate)),
        Section("Known deviations", [Block("list", certificate["known_deviations"])]),
    ]
    if certificate.get("siblings"):
        siblings = [
            ", ".join(f"{key}: {value}" for key, value in each.items()) if isinstance(each, dict) else str(each)
            for each in certificate["siblings"]
        ]
        as_of = Block("text", "Those that were known when this certificate was written; later ones are not among them.")
        found.append(
            Section("Other runs on the same records", [as_of, Block("list", siblings), *_composition(certificate)])
        )
    if certificate["versions"]:
        versions = [["part", "version"], *([name, str(each)] for name, each in certificate["versions"].items())]
        found.append(Section("Versions", [Block("table", versions)]))
    found.append(Section("Model card block", [Block("code", model_card(certificate), "yaml")]))
    entry = [
        Block("text", "In the fields of the Differential Privacy Deployments Registry. What only the owner knows is to "
              "be added before it is sent in."),
        Block("code", _unmarked(json.dumps(registry_entry(certificate), indent=2, ensure_ascii=False)) + "\n", "json"),
    ]  # fmt: skip
    found.append(Section("Registry entry", entry))
    check = [
        Block("text", f"Ledger: {ledger['length']} lines, head {ledger['head']}."),
        Block("text", "Recompute everything from the ledger alone:"),
        Block("code", VERIFY),
    ]
    return [*found, Section("Check it", check)]


def _facts(certificate: dict[str, Any]) -> list[str]:
    claim = certificate["claim"]
    lines = []
    if claim["epsilon"] is not None:
        rdp = claim["epsilon_rdp"]
        lines += [
            f"ε = {claim['epsilon_rounded_up']} spent (rounded up) of a budget of {claim['epsilon_budget']:g}, "
            f"δ = {show_delta(claim['delta'])}; by PLD, interval {claim['method']['interval']}",
            f"ε = {claim['epsilon_claimed']} claimed at δ = {show_delta(delta_of(claim))}: {claim['claimed_because']}"
            if claim["private"]
            else "nothing is claimed: what private steps spent is no promise about this run",
            f"RDP, as a second opinion: {f'ε = {round_up(rdp)}' if isinstance(rdp, float) else rdp}",
        ]
    about = certificate.get("about") or {}
    lines += [f"data: {about.get('data') or NOT_STATED}", f"responsible: {about.get('owner') or NOT_STATED}"]
    for phase in certificate["phases"]:
        for metric in map(metric_of_dict, (phase.get("plan") or {}).get("metrics", [])):
            lines += metric.in_a_certificate(phase["name"])
        if views := (phase.get("plan") or {}).get("views"):
            lines.append(
                f"views in {phase['name']}: each drawn record is seen {views} times in a step, and the mean of these "
                "gradients is clipped as one, so that a record counts once"
            )
    if certificate.get("model"):
        lines.append(f"model: {certificate['model']}")
    dates = certificate.get("dates") or {}
    starts = [("first", "first_start"), ("last", "last_start")]
    if started := [f"{name} started on {dates[key]}" for name, key in starts if key in dates]:
        lines.append(f"date: the run was {', '.join(started)} (UTC)")
    for phase in certificate["phases"]:
        if units := (phase.get("plan") or {}).get("units"):
            added = contribution_in_words(Unit(**units))
            lines.append(f"n in {phase['name']} counts units; what a unit adds to a step is {added}, clipped as one")
    lines += [f"unit: {certificate['unit']}", f"neighbours: {certificate['adjacency']}"]
    return [*lines, f"mechanism: {_mechanism(certificate)}"]


def _mechanism(certificate: dict[str, Any]) -> str:
    """Without the name of a key: how many of a unit's records a step takes is a fact of its own."""
    return certificate["mechanism"].replace(
        "at most `units.rows` of the unit's records, as the plan says", "its records"
    )


def _phase_table(certificate: dict[str, Any]) -> list[list[str]]:
    rows = [["phase", "private", "n", "C", "q", "σ", "T", "steps opened", "charged (q, σ, count)"]]
    for phase in certificate["phases"]:
        events = []
        for each in phase.get("events", []):
            times = f"{each['count']} epochs of {each['slots']}" if "slots" in each else each["count"]
            events.append(f"({each['rate']:.6g}, {each['sigma']:.6g}, {times})")
        plan = phase.get("plan") or {}
        numbers = [plan.get(name, "") for name in ("records", "clip_norm")]
        numbers += [phase.get("sampling_rate", ""), plan.get("noise_multiplier", ""), plan.get("steps", "")]
        shown = [f"{each:.6g}" if isinstance(each, float) else str(each) for each in numbers]
        private = "yes" if phase["private"] else "no"
        rows.append([phase["name"], private, *shown, str(phase.get("steps_opened", "")), "; ".join(events)])
    return rows


def _meaning(certificate: dict[str, Any]) -> list[str]:
    claim = certificate["claim"]
    objection = None if claim["private"] else claim["statement"]
    limits = certificate["limits"]
    attacks = Attacks.of_limits(limits) if limits else Attacks.of_curve(curve_of(certificate))
    n = max((phase["plan"]["records"] for phase in certificate["phases"] if phase.get("plan")), default=None)
    delta = delta_of(claim) or 1.0
    text = explain(claim["epsilon_claimed"] or 0.0, delta, certificate["unit"], attacks, objection, n)
    return text.split("\n\n")


def _limits(certificate: dict[str, Any]) -> list[Section]:
    limits, claim, one = certificate["limits"], certificate["claim"], noun_of(certificate["unit"])
    if not limits or not claim["private"]:  # what the private steps alone would limit, somebody would read as a promise
        return []
    points = [(point["false_alarms"], point["at_most"]) for point in limits["true_positives"]]
    alone = curve_of(certificate)
    drawn = trade_off_svg(points, [(alpha, alone.power(alpha)) for alpha, _ in points])
    told = [
        [percent_of(alpha), percent(found)] for alpha, found in points if any(abs(alpha / t - 1) < 1e-9 for t in TOLD)
    ]
    attack = [
        Block("text", f"Proved for {limits['holds_for']}, against any test by which somebody decides for one {one} "
              "whether it was used."),
        Block("picture", drawn),
        Block("table", [["false alarms", f"used {one}s found, at most"], *told]),
        Block("text", f"A guess at even odds is right in at most {percent(limits['best_guess'])} of the cases. "
              + _gaussian(limits["gaussian"])),
    ]  # fmt: skip
    delta = show_delta(limits["delta"])
    changed, part = ("gets another label", "its label") if one == "record" else (
        "any of whose records is added, changed or taken away", "some of its records"
    )  # fmt: skip
    people = [
        Block("text", f"Somebody with several {one}s, all of which are there or blank, is not promised so many times "
              f"the ε of one {one}: where something is proved, it is composed from its own pair of outputs, at the "
              f"same δ. A {one} that is exchanged for another one, or {changed}, has a row of its own."),
        Block("table", [
            ["what may change", f"ε at δ = {delta}"], [f"one {one}", f"{claim['epsilon_claimed']}"],
            *([f"{each[f'{one}s']} {one}s of one person", _bound(each)] for each in limits["groups"]),
            [f"one {one} for another, or {part}", _bound(limits["replacement"])],
        ]),
        Block("table", [["δ", f"ε of one {one}"], *([f"{r['delta']:g}", _bound(r)] for r in limits["other_deltas"])]),
    ]  # fmt: skip
    return [Section("Limits on every attack", attack), Section(f"Several {one}s, and other values of δ", people)]


def _audited(certificate: dict[str, Any]) -> list[Section]:
    if "audit" not in certificate:
        return []
    told = Block("text", "Evidence, and no part of the claim: an audit can refute a claim, never prove one.")
    return [Section("Audit of the recipe after the run", [told, Block("table", rows(certificate["audit"]))])]


def _gaussian(fit: dict[str, Any]) -> str:
    if fit["mu"] is None:
        return "No Gaussian mechanism describes this curve."
    more = show_delta(fit["delta"]) if fit["delta"] > 0 else "nothing"
    return (
        f"Gaussian differential privacy: μ = {round_up(fit['mu'])}. At every share of false alarms no test finds more "
        f"than that Gaussian allows, plus {more}; the Gaussian allows up to {percent(fit['gap'])} more "
        "than is proved here, which is the error of the fit."
    )


def _bound(found: dict[str, Any]) -> str:
    return f"not proved: {found['reason']}" if found["epsilon"] is None else f"{round_up(found['epsilon'])}"


def percent_of(share: float) -> str:
    return f"{100 * share:g} %"


def nist(certificate: dict[str, Any]) -> list[Block]:
    """The components that the publication names, from the guarantee down to what everything else rests on."""
    claim = certificate["claim"]
    public = [p["name"] for p in certificate["phases"] if not p["private"]]
    strength = "no promise" if not claim["private"] else (
        f"ε = {claim['epsilon_claimed']}, δ = {show_delta(delta_of(claim))}"
        + ("; REFUTED by this run's own audit" if refutations(certificate) else "")
    )  # fmt: skip
    about = certificate.get("about") or {}
    floating = any("floating-point" in str(each) for each in certificate["known_deviations"])
    deviations = "floating point and further" if floating else "known"
    return [
        Block("table", [
            ["the guarantee", ""],
            ["Privacy parameters", strength],
            ["Unit of privacy", f"{certificate['unit']}; {_people(certificate)}"],
            ["Neighbouring data sets", certificate["adjacency"]],
            ["Variant", "none" if strength == "no promise" else
             "approximate differential privacy, computational: see the assumption below"],
            ["Assumption", certificate["assumption"]],
        ]),
        Block("table", [
            ["the algorithm", ""],
            ["Mechanism", _mechanism(certificate)],
            ["Composition", "every step that the ledger opened, released or not; each release of this run"],
            ["Post-processing", "anybody may use the outputs for any purpose: that does not weaken the promise"],
            ["Tuning on private data", _tuned(certificate)],
            ["Trained on without noise", f"non-private phases of this run: {', '.join(public) or 'none'}; public "
             "records that were mixed in, and what initial weights had seen before where they are not random, are "
             "stated among the deviations"],
            ["Utility and bias", "not measured here; groups that are rare in the data may be learned less well than "
             "without noise"],
        ]),
        Block("table", [
            ["the deployment", ""],
            ["Query model", "non-interactive: one training, whose weights are released"],
            ["Trust model", "central: whoever holds the records, the machine and the run's secret folder is trusted"],
            ["Implementation and side channels", f"{deviations} deviations are listed below; side "
             "channels of the machine and private logs are not covered, nor are other runs on the same records, which "
             "are listed as far as they are known"],
            ["Data security and access", "the run key lies in the run's secret folder and is destroyed with the final "
             "certificate, unless it is kept on request; the records' own storage is outside of this certificate"],
            ["Data collection", about.get("data") or NOT_STATED],
            ["Responsible", about.get("owner") or NOT_STATED],
            ["Check", f"hash-chained ledger; {VERIFY}"],
        ]),
    ]  # fmt: skip


def _people(certificate: dict[str, Any]) -> str:
    limits, several = certificate["limits"], f"{noun_of(certificate['unit'])}s"
    stated = limits and certificate["claim"]["private"]
    rows = [each for each in limits["groups"] if each["epsilon"] is not None] if stated else []
    if not rows:
        return f"what it means for a person with several {several} is not stated, and not in proportion"
    told = ", ".join(f"{each[several]} {several} ε = {round_up(each['epsilon'])}" for each in rows)
    return f"for a person with {told}, at the same δ"


def _tuned(certificate: dict[str, Any]) -> str:
    charged, free = "charged in the claim, as runs with the plan of this one", "declared, not charged"
    told = [
        f"{each['statement']} ({charged if 'epsilon' in each else free})"
        for each in certificate["tuned_on_private_data"]
    ]
    others = [each for each in certificate.get("siblings") or [] if isinstance(each, dict)]
    if twins := sorted({str(each.get("run")) for each in others if each.get("private") is False}):
        told.append(f"runs without noise on the same records: {', '.join(twins)}; what they showed is not charged")
    return "; ".join(told) or "nothing was declared"


def _composition(certificate: dict[str, Any]) -> list[Block]:
    found = certificate.get("composition")
    if not found:
        return []
    rows = [["run", "ε", "known by its"]]
    rows += [[run["run"], "no promise" if run["epsilon"] is None else f"{round_up(run['epsilon'])}", run["by"]]
             for run in found["runs"]]  # fmt: skip
    if found["epsilon_sum"] is None:
        told = f"All of them together promise nothing: {found['because']}."
    else:
        told = (
            f"All of them together: ε = {round_up(found['epsilon_sum'])} at δ = {show_delta(found['delta_sum'])}, the "
            "sum of their claims, whatever made somebody start the later ones; "
            f"ε = {round_up(found['epsilon_together'])} at δ = {show_delta(found['delta_together'])}, the composition "
            "of the steps that these claims rest on, if no run's plan was chosen by looking at another's outputs."
        )
    return [Block("table", rows), Block("text", told)]


def model_card(certificate: dict[str, Any]) -> str:
    """YAML that can be pasted into a model card; numbers are rounded to the safe side."""
    claim = certificate["claim"]
    lines = ["differential_privacy:", f"  private: {'true' if claim['private'] else 'false'}"]
    if claim["private"]:
        lines += [f"  epsilon: {claim['epsilon_claimed']}", f"  delta: {show_delta(delta_of(claim))}"]
        unit = "one record" if noun_of(certificate["unit"]) == "record" else _quoted(certificate["unit"])
        lines += [f"  unit: {unit}", "  neighbours: zero-out"]
        plans = [phase["plan"] for phase in certificate["phases"] if phase.get("plan")]
        kinds = {sampling_of_dict(plan["sampling"]).name for plan in plans}
        drawn = any((each["runs"] or {}).get("fixed") is False for each in certificate["tuned_on_private_data"])
        accountant = "PLD, and PLD or RDP for the choice among runs" if drawn else "PLD"
        lines += [f"  accountant: {accountant}", f"  sampling: {' and '.join(sorted(kinds)) or 'Poisson'}"]
    else:
        lines.append(f"  reason: {_quoted(claim['statement'])}")
    lines += [f"  refuted: {_quoted(each)}" for each in refutations(certificate)[:1]]
    lines.append(f"  ledger_head: {certificate['ledger']['head']}")
    if "signature" in certificate:
        lines.append(f"  signer: {certificate['signature']['public_key']}")
    return "\n".join(lines) + "\n"


def registry_entry(certificate: dict[str, Any]) -> dict[str, Any]:
    """The certificate as an entry of the Differential Privacy Deployments Registry (its fields as of 2025).

    The registry (of OpenDP and others) has one document per deployment, which its editors review. This fills in what
    the run knows; what only its owner knows (intended use, region, release date) is left out and must be added before
    submission. Numbers are rounded to the safe side.
    """
    claim, about = certificate["claim"], certificate.get("about") or {}
    private = bool(claim["private"])
    limits = certificate["limits"]
    steps = limits["holds_for"] if limits else "every step that the ledger opened"
    product: dict[str, Any] = {"name": certificate["run"], "data_product_type": "Machine learning model"}
    if about.get("owner"):
        product["data_curators"] = [about["owner"]]
    flavor: dict[str, Any] = {
        "name": "Approximate DP" if private else "none",
        "input_metric": certificate["adjacency"],
        "bound_on_input_distance": 1,
        "unprotected_quantities": "n, sampling rate, clipping norm, noise, number of steps and δ, as public constants; "
        "classes, vocabulary, which records are used without noise and the form of the data, by the owner's word",
    }
    if about.get("data"):
        flavor["data_domain"] = about["data"]
    loss: dict[str, Any] = {
        "privacy_unit": "Record-level" if noun_of(certificate["unit"]) == "record" else "User-level",
        "privacy_unit_description": f"{certificate['unit']}; {certificate['adjacency']}",
    }
    told, refuted = claim["statement"], refutations(certificate)
    if private and not refuted:
        loss["privacy_parameters"] = {"epsilon": claim["epsilon_claimed"], "delta": float(show_delta(delta_of(claim)))}
    loss["privacy_parameters_description"] = "; REFUTED by this run's own audit: ".join([told, *refuted[:1]])
    return {
        "deployment": {
            "product": product,
            "dp_flavor": flavor,
            "privacy_loss": loss,
            "model": {
                "model_name": "Central",
                "actors": "The curator holds the records, the machine and the run's secret folder and is trusted. "
                "Whoever sees what was released is not.",
                "release_type": "Multiple releases: the weights of every checkpoint, and what was published meanwhile",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": "Any use of the released weights.",
                "composition": f"Privacy loss distributions of {steps}; {claim['claimed_because']}.",
            },
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": _tuned(certificate),
                "mechanisms": _mechanism(certificate),
            },
            "resources": {"sources": f"Murmuration; ledger head {certificate['ledger']['head']}"},
        }
    }


def _quoted(text: str) -> str:
    """Quoted for YAML inside a page."""
    return _unmarked(json.dumps(text))


def _unmarked(text: str) -> str:
    """JSON with the characters that a page could take for its own markup written as \\u escapes."""
    return "".join(f"\\u{ord(each):04x}" if each in "`<>&" else each for each in text)


# The trade-off curve as SVG for use inside a page: false alarms on the x axis, records found on the y axis.

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 74, 34, 40, 62
SMALLEST = 1e-6
BLUE, GREY, ORANGE, INK = "#2563a8", "#8a8f98", "#d9772b", "#1c2530"
MARKED = (1e-3, 1e-2)


def trade_off_svg(proved: Points, by_epsilon_alone: Points) -> str:
    """Points are shares of false alarms and the most records found: only numbers, so nothing has to be escaped."""
    inner = [
        *_axes(),
        _line([(_shares(step), _shares(step)) for step in range(61)], GREY, 'stroke-dasharray="6 4"'),
        _line(by_epsilon_alone, ORANGE, 'stroke-dasharray="2 3"'),
        _line([*proved, (1.0, 1.0)], BLUE, 'stroke-width="2.5"'),
    ]
    for alpha, found in proved:
        if any(math.isclose(alpha, mark) for mark in MARKED):
            inner.append(f'<circle cx="{_x(alpha):.1f}" cy="{_y(found):.1f}" r="4" fill="{BLUE}"/>')
            inner.append(_text(_x(alpha) - 6, _y(found) - 8, f"{math.ceil(1000 * found) / 10:.1f} %", "end", BLUE))
    inner += _legend()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
        "<title>Most records that any test finds, at each share of false alarms</title>" + "".join(inner) + "</svg>"
    )


def _axes() -> Iterable[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for power in range(round(math.log10(SMALLEST)), 1):
        x = _x(10.0**power)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e3e7ec"/>'
        yield _text(x, bottom + 18, f"{10.0 ** (power + 2):.4f}".rstrip("0").rstrip(".") + " %", "middle")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e3e7ec"/>'
        yield _text(LEFT - 8, y + 4, f"{100 * share:.0f} %", "end")
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>'
    yield _text((LEFT + right) / 2, HEIGHT - 14, "false alarms: share of unused records that are accused", "middle")
    middle = (TOP + bottom) / 2
    yield (
        f'<text x="16" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 16 {middle:.1f})">'
        "used records found, at most</text>"
    )


def _legend() -> Iterable[str]:
    for place, (colour, dash, label) in enumerate((
        (BLUE, "", "proved for this run"), (ORANGE, "2 3", "from (ε, δ) alone"),
        (GREY, "6 4", "without the model"),
    )):  # fmt: skip
        x, y = LEFT + 185 * place, TOP - 22
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        yield f'<line x1="{x}" y1="{y}" x2="{x + 28}" y2="{y}" stroke="{colour}" stroke-width="2"{dashed}/>'
        yield _text(x + 35, y + 4, label, "start")


def _line(points: Points, colour: str, style: str) -> str:
    drawn = " ".join(f"{_x(alpha):.1f},{_y(found):.1f}" for alpha, found in points)
    return f'<polyline points="{drawn}" fill="none" stroke="{colour}" {style}/>'


def _text(x: float, y: float, words: str, anchor: str, colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def _shares(step: int) -> float:
    return SMALLEST ** (1 - step / 60)


def _x(share: float) -> float:
    along = 1 - math.log10(max(share, SMALLEST)) / math.log10(SMALLEST)
    return LEFT + along * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def write(certificate: dict[str, Any], run_dir: Path) -> None:
    """Writes each file atomically and durably. JSON comes last: its presence means that all of them are there."""
    document = json.dumps(certificate, indent=2, ensure_ascii=False) + "\n"
    files = pages(certificate) | {"certificate.json": document.encode("utf-8", "backslashreplace")}
    for name, content in files.items():
        with atomic(run_dir / name) as file:
            file.write(content)


if __name__ == "__main__":
    print(check_page(), end="")
