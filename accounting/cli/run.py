"""`account.py verify` and `account.py explain`: what a run's ledger proves, and what that means."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from murmuration.accounting.certificate.certificate import compose, verify, write
from murmuration.accounting.certificate.explain import attack_power, best_guess, explain
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.cli.epsilon import setting
from murmuration.accounting.epsilon.accountant import Event, epsilon, round_up, show_delta
from murmuration.accounting.escaping import printable
from murmuration.accounting.keys import destroy, load
from murmuration.accounting.ledger.chain import Ledger, LedgerError
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.plan import UNIT, PlanError, parse_delta

RETIRED = [
    "The run was retired before its end. Nothing was exported with this certificate, and other runs on the same "
    "records were not looked up.",
    "Everything is as private as the run directory's secret folder was while the run lasted.",
]


def verify_command(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    verdict = verify(arguments.target, arguments.accountant, arguments.signer, arguments.witness)
    lines = [f"ledger of {verdict.run}: {verdict.lines} lines, unbroken, head {verdict.head}"]
    if verdict.checkpoints:
        lines.append(f"{verdict.checkpoints} checkpoints were written with this ledger")
    if verdict.delta is not None:
        lines.append(
            f"ε = {verdict.epsilon:.6f} of {verdict.budget:g} at δ = {verdict.delta:.6g}, recomputed from "
            f"{verdict.opened} opened steps ({verdict.committed} committed)"
        )
    if verdict.claimed is not None:
        lines.append(f"the certificate agrees; it claims ε = {verdict.claimed:g} because {verdict.claimed_because}")
    elif verdict.delta is not None:
        lines.append("there is no certificate yet")
    if arguments.witness is not None:
        lines.append("every head that the witness was told is a line of this ledger")
    if verdict.attached is not None:
        lines += verdict.attached.checked
        lines += [f"not checked: {sentence}" for sentence in verdict.attached.unchecked]
    if verdict.objection:
        lines.append(verdict.objection)
    return asdict(verdict), "\n".join(printable(line) for line in lines)


def retire_command(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Closes the ledger of a run that will not go on, certifies what it spent, and destroys its key."""
    root: Path = arguments.target
    if not (root / "ledger.jsonl").is_file():
        raise LedgerError(f"there is no ledger in {root}; name a run directory")
    journal = Journal(Ledger.open(root / "ledger.jsonl"))
    try:
        history, keys = journal.history, [root / "secret" / name for name in ("run.key", "new.key")]
        lines = []
        if history.finished:
            lines.append(f"{history.run['name']} was finished before; its certificate stays as it is")
        else:
            key = load(keys[0]) if history.run["signer"] else None
            journal.finish()
            document = compose(history, journal.ledger.entries, {"known_deviations": RETIRED, "siblings": []})
            write(document if key is None else signed(document, key), root)
            lines.append(f"{history.run['name']} is finished and certified as far as it went; it cannot be continued")
        destroyed = [destroy(path) for path in keys]
        lines.append("its key is destroyed" if any(destroyed) else "there was no key any more")
    finally:
        journal.ledger.close()
    return {"run": history.run["name"], "destroyed": any(destroyed)}, "\n".join(printable(line) for line in lines)


def explain_command(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """From a run directory, from epsilon and delta, or from the numbers of a training."""
    objection = None
    numbers = (arguments.n, arguments.batch, arguments.steps, arguments.sigma)
    if arguments.target is not None:
        verdict = verify(arguments.target, arguments.accountant)
        # Without a certificate the run may still go on: its budget is what can be said by now.
        spent = verdict.budget if verdict.claimed is None else verdict.claimed
        delta, objection = verdict.delta or 1.0, verdict.objection
    elif arguments.epsilon is not None:
        if arguments.delta is None and arguments.n is None:
            raise PlanError("explain --epsilon needs --delta (or --n, for the default 1/(2n))")
        spent, delta = arguments.epsilon, parse_delta(arguments.delta, arguments.n or 1)
        if not (0 <= spent < float("inf") and 0 < delta < 1):
            raise PlanError(f"epsilon must be at least 0 and delta in (0, 1), but they are {spent} and {delta}")
    elif all(value is not None for value in numbers):
        values = setting(arguments.n, arguments.batch, arguments.steps, arguments.delta, arguments.accountant)
        delta = values["delta"]
        spent = epsilon([Event(values["rate"], arguments.sigma, arguments.steps)], delta, arguments.accountant)
    else:
        raise PlanError("explain needs a RUN_DIR, or --epsilon and --delta, or --n, --batch, --steps and --sigma")
    text = explain(round_up(spent), delta, UNIT, printable(objection) if objection else None)
    values = {
        "private": objection is None,
        "epsilon": None if objection else round_up(spent),
        "delta": None if objection else float(show_delta(delta)),
        "best_guess": 1.0 if objection else best_guess(spent, delta),
        "attack_power_at_1_percent": 1.0 if objection else attack_power(spent, delta),
        "explanation": text,
    }
    return values, text
