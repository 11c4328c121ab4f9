"""A certificate as pages for people: Markdown and HTML of the same content, with a model-card block.

The explanation follows the questions of NIST SP 800-226, "Guidelines for Evaluating Differential Privacy
Guarantees": what is protected, from whom, how strongly, on what assumptions, and what is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from murmuration.accounting import template
from murmuration.accounting.certificate.explain import explain
from murmuration.accounting.epsilon.accountant import show_delta
from murmuration.accounting.escaping import printable_leaves

HERE = Path(__file__).parent
VERIFY = "python launch/account.py verify RUN_DIR"


@dataclass(frozen=True)
class Block:
    """What both pages show, each in its own markup. Texts are plain: what looks like markup in them came with a name.

    `text` and `strong` hold a paragraph, `code` lines that are shown as they are, none of which may begin with a fence,
    `list` its entries and `table` its rows, the first of which is the head.
    """

    kind: Literal["text", "strong", "code", "list", "table"]
    content: Any
    language: str = ""


class Section(NamedTuple):
    title: str
    blocks: list[Block]


def markdown(certificate: dict[str, Any]) -> str:
    sections = _sections(printable_leaves(certificate))
    return template.markdown_page(HERE / "certificate.md.jinja", sections=sections).rstrip() + "\n"


def html_page(certificate: dict[str, Any]) -> str:
    return template.html_page(HERE / "certificate.html.jinja", sections=_sections(printable_leaves(certificate)))


def _sections(certificate: dict[str, Any]) -> list[Section]:
    claim = certificate["claim"]
    ledger = certificate["ledger"]
    meaning = [Block("text", text) for text in _meaning(claim, certificate["unit"])]
    found = [
        Section(
            f"Privacy certificate: {certificate['run']}",
            [Block("strong", claim["statement"]), Block("list", _facts(certificate))],
        ),
        Section("Steps", [Block("table", _phase_table(certificate))]),
        Section("What this means", meaning),
        Section("Evaluation after NIST SP 800-226", [Block("table", _nist(certificate))]),
        Section("Known deviations", [Block("list", certificate["known_deviations"])]),
    ]
    if certificate.get("siblings"):
        siblings = [_sibling(each) for each in certificate["siblings"]]
        found.append(Section("Other runs on the same records", [Block("list", siblings)]))
    found.append(Section("Model card block", [Block("code", model_card(certificate), "yaml")]))
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
        lines += [
            f"ε = {claim['epsilon_rounded_up']} spent (rounded up) of a budget of {claim['epsilon_budget']:g}, "
            f"δ = {show_delta(claim['delta'])}; by PLD, interval {claim['method']['interval']}",
            f"ε = {claim['epsilon_claimed']} claimed: {claim['claimed_because']}",
            f"RDP, as a second opinion: {_show(claim['epsilon_rdp'])}",
        ]
    lines += [f"unit: {certificate['unit']}", f"neighbours: {certificate['adjacency']}"]
    return [*lines, f"mechanism: {certificate['mechanism']}"]


def _phase_table(certificate: dict[str, Any]) -> list[list[str]]:
    rows = [["phase", "private", "steps", "events (q, σ, count)"]]
    for phase in certificate["phases"]:
        events = "; ".join(f"({e['rate']:.6g}, {e['sigma']:.6g}, {e['count']})" for e in phase.get("events", []))
        rows.append([phase["name"], "yes" if phase["private"] else "no", str(phase.get("steps_opened", "")), events])
    return rows


def _meaning(claim: dict[str, Any], unit: str) -> list[str]:
    stands_for = claim.get("stands_for")
    objection = None if claim["private"] or stands_for else claim["statement"]
    text = explain(claim["epsilon_claimed"] or 0.0, _delta(claim) or 1.0, unit, objection)
    return [*([f"{stands_for}. The following is about what was run."] if stands_for else []), *text.split("\n\n")]


def _nist(certificate: dict[str, Any]) -> list[list[str]]:
    claim = certificate["claim"]
    public = [p["name"] for p in certificate["phases"] if not p["private"]]
    strength = "no promise" if not (claim["private"] or "stands_for" in claim) else (
        f"ε = {claim['epsilon_claimed']}, δ = {show_delta(_delta(claim))}"
    )  # fmt: skip
    return [
        ["question", "answer"],
        ["What is the privacy unit?", f"{certificate['unit']}; a person with k records has k times the ε at most"],
        ["What are neighbouring data sets?", certificate["adjacency"]],
        ["How strong is it?", strength],
        ["Over what does it compose?", "every step that the ledger opened, released or not; each release of this run"],
        ["Who must be trusted?", "the curator: whoever holds the records, the machine and the run's secret folder"],
        ["Which mechanism?", certificate["mechanism"]],
        ["Who can use the outputs?", "anybody, for any purpose: post-processing does not weaken it"],
        ["What else was trained on?", f"non-private phases: {', '.join(public) or 'none'}"],
        ["Was anything tuned on the private data?", _tuned(certificate["tuned_on_private_data"])],
        ["What is not covered?", "side channels of the machine, private logs, several runs on the same records"],
        ["How can it be checked?", f"hash-chained ledger; {VERIFY}"],
    ]


def _tuned(declarations: list[dict[str, Any]]) -> str:
    if not declarations:
        return "nothing was declared"
    return "; ".join(
        f"{each['statement']} ({'charged in the claim' if 'epsilon' in each else 'declared, not charged'})"
        for each in declarations
    )


def _delta(claim: dict[str, Any]) -> float:
    """Of the claim; what was spent is given at the plans' own."""
    return claim.get("delta_claimed", claim["delta"])


def _sibling(sibling: Any) -> str:
    if not isinstance(sibling, dict):
        return str(sibling)
    return ", ".join(f"{key}: {value}" for key, value in sibling.items())


def model_card(certificate: dict[str, Any]) -> str:
    """YAML that can be pasted into a model card; numbers are rounded to the safe side."""
    claim = certificate["claim"]
    lines = ["differential_privacy:", f"  private: {'true' if claim['private'] else 'false'}"]
    if claim["private"]:
        lines += [f"  epsilon: {claim['epsilon_claimed']}", f"  delta: {show_delta(_delta(claim))}"]
        lines += ["  unit: one record", "  neighbours: zero-out", "  accountant: PLD", "  sampling: Poisson"]
    else:
        lines.append(f"  reason: {_quoted(claim['statement'])}")
    lines.append(f"  ledger_head: {certificate['ledger']['head']}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """For YAML inside a page: characters that a page could take for its own markup are written as their numbers."""
    return "".join(f"\\u{ord(each):04x}" if each in "`<>&" else each for each in json.dumps(text))


def _show(value: float | str | None) -> str:
    return f"ε = {value:.4f}" if isinstance(value, float) else str(value)
