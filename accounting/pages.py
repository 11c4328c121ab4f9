"""A certificate as pages for people: Markdown and HTML of the same content, with a model-card block.

The explanation follows the questions of NIST SP 800-226, "Guidelines for Evaluating Differential Privacy
Guarantees": what is protected, from whom, how strongly, on what assumptions, and what is left out.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from typing import Any

from accounting.accountant import show_delta
from accounting.escaping import markdown_text, printable_leaves
from accounting.explain import explain

Table = list[list[str]]


@dataclass(frozen=True)
class Strong:
    text: str


@dataclass(frozen=True)
class Code:
    """Lines shown as they are; none of them may begin with a fence."""

    text: str
    language: str = ""


# Texts are plain: what looks like markup in them came with a name, and is shown as it stands.
Block = str | Strong | Code | list[str] | Table


def markdown(certificate: dict[str, Any]) -> str:
    out: list[str] = []
    for title, blocks in _sections(printable_leaves(certificate)):
        out += [f"{'#' if not out else '##'} {markdown_text(title)}", ""]
        for block in blocks:
            out += [*_markdown_block(block), ""]
    return "\n".join(out).rstrip() + "\n"


def html_page(certificate: dict[str, Any]) -> str:
    certificate = printable_leaves(certificate)
    body: list[str] = []
    for title, blocks in _sections(certificate):
        tag = "h2" if body else "h1"
        body += [f"<{tag}>{html.escape(title)}</{tag}>", *(_html_block(block) for block in blocks)]
    return PAGE.format(title=html.escape(f"Privacy certificate: {certificate['run']}"), body="\n".join(body))


def _sections(certificate: dict[str, Any]) -> list[tuple[str, list[Block]]]:
    claim = certificate["claim"]
    ledger = certificate["ledger"]
    found: list[tuple[str, list[Block]]] = [
        (f"Privacy certificate: {certificate['run']}", [Strong(claim["statement"]), _facts(certificate)]),
        ("Steps", [_phase_table(certificate)]),
        ("What this means", list(_meaning(claim, certificate["unit"]))),
        ("Evaluation after NIST SP 800-226", [_nist(certificate)]),
        ("Known deviations", [list(certificate["known_deviations"])]),
    ]
    if certificate.get("siblings"):
        found.append(("Other runs on the same records", [[_sibling(s) for s in certificate["siblings"]]]))
    found.append(("Model card block", [Code(model_card(certificate), "yaml")]))
    found.append(
        ("Check it", [f"Ledger: {ledger['length']} lines, head {ledger['head']}.",
                      "Recompute everything from the ledger alone:", Code(VERIFY)])
    )  # fmt: skip
    return found


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


def _phase_table(certificate: dict[str, Any]) -> Table:
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


def _nist(certificate: dict[str, Any]) -> Table:
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


def _is_table(block: Block) -> bool:
    return isinstance(block, list) and bool(block) and isinstance(block[0], list)


def _markdown_block(block: Block) -> list[str]:
    if isinstance(block, str):
        return [markdown_text(block)]
    if isinstance(block, Strong):
        return [f"**{markdown_text(block.text)}**"]
    if isinstance(block, Code):
        return [f"```{block.language}", *block.text.splitlines(), "```"]
    if not _is_table(block):
        return [f"- {markdown_text(str(item))}" for item in block]
    rows = [f"| {' | '.join(markdown_text(str(cell)) for cell in row)} |" for row in block]
    return [rows[0], "|" + "---|" * len(block[0]), *rows[1:]]


def _html_block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{html.escape(block)}</p>"
    if isinstance(block, Strong):
        return f"<p class='claim'>{html.escape(block.text)}</p>"
    if isinstance(block, Code):
        return f"<pre>{html.escape(block.text.strip())}</pre>"
    if not _is_table(block):
        return "<ul>" + "".join(f"<li>{html.escape(str(item))}</li>" for item in block) + "</ul>"
    rows = []
    for number, row in enumerate(block):
        tag = "td" if number else "th"
        rows.append("<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row) + "</tr>")
    return "<table>" + "".join(rows) + "</table>"


VERIFY = "python launch/account.py verify RUN_DIR"
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 54em; margin: 2em auto; padding: 0 1em; color: #1c2530 }}
.claim {{ font-size: 1.15em; border-left: 4px solid #2563a8; padding: .4em .8em; background: #f2f6fb }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #ccd4de; padding: .3em .6em; text-align: left }}
pre {{ background: #f5f5f5; padding: .8em; overflow-x: auto }}
</style>
<body>
{body}
</body></html>
"""
