"""What a run promises, as JSON and Markdown, and the check that the ledger alone supports it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accounting.accountant import Accountant, AccountingError, describe, epsilon, round_up
from accounting.history import History
from accounting.ledger import Entry, LedgerError
from accounting.plan import ADJACENCY, UNIT

FORMAT = "murmuration-certificate/1"
AGREEMENT = 1e-6
DEVIATIONS = [
    "Noise and sums are floating-point numbers (64-bit draws, 32-bit sums), not samples of the ideal distributions.",
    "A restored copy of the whole run directory, secret folder included, cannot be told from the original.",
]


class CertificateError(ValueError):
    """The certificate and the ledger do not support each other; the message says where."""


def compose(history: History, entries: list[Entry], extra: dict[str, Any]) -> dict[str, Any]:
    """Everything a reader needs to recompute the claim; `extra` holds hashes, deviations and declared tuning."""
    private = bool(history.plans)
    objection = history.why_not_private()
    spent = history.epsilon() if private else None
    claim: dict[str, Any] = {
        "private": objection is None,
        "statement": objection or _statement(history, spent),
        "epsilon": spent,
        "epsilon_rounded_up": None if spent is None else round_up(spent),
        "delta": history.delta() if private else None,
        "epsilon_budget": history.budget() if private else None,
        "epsilon_rdp": _second_opinion(history) if private else None,
        "method": describe("pld"),
    }
    phases: list[dict[str, Any]] = []
    for index, name in sorted(history.phase_names.items()):
        plan = history.plans.get(index)
        if plan is None:
            public = history.nonprivate[index]
            phases.append({"phase": index, "name": name, "private": False, "data_declared_public": public})
            continue
        opened = [s for s in history.opened if s.phase == index]
        phases.append(
            {
                "phase": index,
                "name": name,
                "private": True,
                "plan": plan.as_dict(),
                "sampling_rate": plan.sampling_rate,
                "steps_opened": len(opened),
                "steps_committed": sum(1 for s in history.committed if s.phase == index),
                "segments": len(history.segments_of(index)),
                "events": [
                    {"mechanism": "Poisson-subsampled Gaussian", "rate": e.rate, "sigma": e.sigma, "count": e.count}
                    for e in history.charged(index)
                ],
            }
        )
    return {
        "format": FORMAT,
        "run": history.run["name"],
        "claim": claim,
        "unit": UNIT,
        "adjacency": ADJACENCY,
        "mechanism": "per-record gradients clipped in L2 norm over all trainable parameters, summed over an exact "
        "Poisson sample, Gaussian noise added once to the sum, divided by the constant q·n",
        "phases": phases,
        "segments": [segment.__dict__ for segment in history.segments],
        "known_deviations": DEVIATIONS + extra.pop("known_deviations", []),
        **extra,
        "ledger": {"length": len(entries), "head": entries[-1].hash},
    }


def _statement(history: History, spent: float | None) -> str:
    return (
        f"({round_up(spent or 0.0)}, {history.delta():.3g})-differential privacy for {UNIT}, "
        "for everything that this run released"
    )


def _second_opinion(history: History) -> float | str:
    try:
        return epsilon(history.charged(), history.delta(), "rdp")
    except AccountingError as error:
        return f"refused: {error}"


def markdown(certificate: dict[str, Any]) -> str:
    claim = certificate["claim"]
    lines = [f"# Privacy certificate: {certificate['run']}", "", f"**{claim['statement']}**", ""]
    if claim["epsilon"] is not None:
        lines += [
            f"- ε = {claim['epsilon_rounded_up']} (rounded up) of a budget of {claim['epsilon_budget']:g}, "
            f"δ = {claim['delta']:.6g}; by PLD, interval {claim['method']['interval']}",
            f"- RDP, as a second opinion: {_show(claim['epsilon_rdp'])}",
        ]
    lines += [f"- unit: {certificate['unit']}", f"- neighbours: {certificate['adjacency']}"]
    lines += [f"- mechanism: {certificate['mechanism']}", "", "| phase | private | steps | events (q, σ, count) |"]
    lines += ["|---|---|---|---|"]
    for phase in certificate["phases"]:
        events = "; ".join(f"({e['rate']:.6g}, {e['sigma']:.6g}, {e['count']})" for e in phase.get("events", []))
        lines.append(
            f"| {phase['name']} | {'yes' if phase['private'] else 'no'} | {phase.get('steps_opened', '')} | {events} |"
        )
    lines += ["", "Known deviations:", ""] + [f"- {text}" for text in certificate["known_deviations"]]
    ledger = certificate["ledger"]
    lines += ["", f"Ledger: {ledger['length']} lines, head `{ledger['head']}`.", ""]
    lines += ["Check it: `python launch/account.py verify RUN_DIR`"]
    return "\n".join(lines) + "\n"


def _show(value: float | str | None) -> str:
    return f"ε = {value:.4f}" if isinstance(value, float) else str(value)


def write(certificate: dict[str, Any], run_dir: Path) -> None:
    for name, text in (
        ("certificate.json", json.dumps(certificate, indent=2, ensure_ascii=False) + "\n"),
        ("certificate.md", markdown(certificate)),
    ):
        temporary = run_dir / f".{name}.tmp"
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(run_dir / name)


@dataclass(frozen=True)
class Verdict:
    """What could be recomputed from the ledger alone."""

    run: str
    objection: str | None
    epsilon: float
    delta: float | None
    budget: float
    opened: int
    committed: int
    lines: int
    head: str
    certified: float | None


def verify(target: Path, accountant: Accountant = "pld") -> Verdict:
    """Recomputes epsilon from the ledger of a run directory (or beside a certificate) and compares."""
    run_dir = target if target.is_dir() else target.parent
    certificate_path = target if target.is_file() and target.suffix == ".json" else run_dir / "certificate.json"
    history, entries = History.read(run_dir / "ledger.jsonl")
    if not entries:
        raise LedgerError(f"{run_dir / 'ledger.jsonl'} is empty")
    private = bool(history.plans)
    spent = history.epsilon(accountant) if private else 0.0
    if private and spent > history.budget():
        raise CertificateError(f"the ledger charges epsilon = {spent:.6f}, above the budget of {history.budget():g}")
    certified = None
    if certificate_path.is_file():
        try:
            certificate = json.loads(certificate_path.read_text())
            certified = _compare(certificate, history, entries, history.epsilon("pld") if private else None)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise CertificateError(f"{certificate_path.name} is damaged: {error!r}") from None
    return Verdict(
        run=history.run["name"], objection=history.why_not_private(), epsilon=spent,
        delta=history.delta() if private else None, budget=history.budget() if private else 0.0,
        opened=len(history.opened), committed=len(history.committed), lines=len(entries), head=entries[-1].hash,
        certified=certified,
    )  # fmt: skip


def _compare(
    certificate: dict[str, Any], history: History, entries: list[Entry], recomputed: float | None
) -> float | None:
    if certificate["format"] != FORMAT:
        raise CertificateError(f"the certificate has format {certificate['format']!r}, not {FORMAT!r}")
    length, head = certificate["ledger"]["length"], certificate["ledger"]["head"]
    if len(entries) < length:
        raise CertificateError(
            f"the ledger has {len(entries)} lines but the certificate was written after {length}: lines were removed"
        )
    if length < 1 or entries[length - 1].hash != head:
        raise CertificateError(f"ledger line {length} is not the one that the certificate names as its head")
    if any(entry.kind == "open" for entry in entries[length:]):
        raise CertificateError("steps were opened after the certificate was written; it no longer covers the run")
    if certificate["claim"]["private"] != (history.why_not_private() is None):
        raise CertificateError("the certificate and the ledger disagree on whether the run was private")
    claimed = certificate["claim"]["epsilon"]
    if (claimed is None) != (recomputed is None):
        raise CertificateError("the certificate and the ledger disagree on whether any phase was private")
    if claimed is None or recomputed is None:
        return None
    if abs(claimed - recomputed) > AGREEMENT or certificate["claim"]["epsilon_rounded_up"] < recomputed:
        raise CertificateError(f"the certificate claims epsilon = {claimed}, but the ledger gives {recomputed}")
    if certificate["claim"]["delta"] != history.delta():
        raise CertificateError("the certificate and the ledger disagree on delta")
    return float(claimed)
