"""`account.py verify`, `explain` and `statement`: what a run's ledger proves, and what that means."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any, NamedTuple

from murmuration.accounting.certificate import withdrawal
from murmuration.accounting.certificate.explain import Attacks, explain, percent
from murmuration.accounting.certificate.limits import claimed_events, row
from murmuration.accounting.certificate.signature import public_key, signed
from murmuration.accounting.certificate.statement import may_claim
from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.cli.epsilon import asked_sampling, delta_of
from murmuration.accounting.durable import atomic
from murmuration.accounting.epsilon import trade_off
from murmuration.accounting.epsilon.accountant import epsilon, round_up, show_delta, show_epsilon
from murmuration.accounting.epsilon.neighbours import group_epsilon, replacement_epsilon
from murmuration.accounting.errors import DONE, NOT_ALL_CHECKED, NOT_STRICT, REFUTED, PlanError
from murmuration.accounting.escaping import printable
from murmuration.accounting.event import Event
from murmuration.accounting.keys import load
from murmuration.accounting.ledger.history import History
from murmuration.accounting.plan import parse_delta
from murmuration.accounting.strict_json import parse
from murmuration.accounting.unit import RECORD, unit_in_words


def verify_command(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    verdict = verify(arguments.target, arguments.accountant, arguments.signer, arguments.witness)
    lines = [f"ledger of {verdict.run}: {verdict.lines} lines, unbroken, head {verdict.head}"]
    if verdict.checkpoints:
        lines.append(f"{verdict.checkpoints} checkpoints were written with this ledger")
    if verdict.delta is not None:
        lines.append(
            f"ε = {round_up(verdict.epsilon, 6):.6f} of {verdict.budget:g} at δ = {show_delta(verdict.delta, 6)}, "
            f"recomputed {'by RDP ' if arguments.accountant == 'rdp' else ''}from "
            f"{verdict.opened} opened steps ({verdict.committed} committed)"
        )
    if verdict.claimed is not None and verdict.delta_claimed is not None:
        claim = f"ε = {show_epsilon(verdict.claimed)} at δ = {show_delta(verdict.delta_claimed, 6)}"
        told = f"claims {claim} because {verdict.claimed_because}" if verdict.objection is None else "claims nothing"
        lines.append(f"the certificate agrees; it {told}")
    elif verdict.delta is not None:
        lines.append("there is no certificate yet")
    if arguments.witness is not None:
        lines.append("every head that the witness recorded is a line of this ledger, or lost, declared and charged")
    if verdict.attached is not None:
        lines += verdict.attached.checked
    if verdict.objection:
        lines.append(verdict.objection)
    unchecked = verdict.unchecked
    lines.append(
        f"what was checked holds; not checked: {'; '.join(unchecked)}"
        if unchecked
        else "all that can be recomputed was checked; what the certificate says of data, model, machine and other runs "
        "is its signer's word"
    )
    lines += [f"REFUTED by the run's own audit: {each}" for each in verdict.refuted]
    code = DONE if not unchecked else NOT_STRICT if arguments.strict else NOT_ALL_CHECKED
    code = REFUTED if verdict.refuted else code
    return {**asdict(verdict), "unchecked": unchecked, "exit_code": code}, "\n".join(map(printable, lines))


def explain_command(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Explains a run directory, an epsilon and delta, or the numbers of a training run."""
    claim = _claim_of(arguments)
    curve = (
        trade_off.of_point(claim.epsilon, claim.delta)
        if claim.events is None
        else trade_off.of_events(claim.events, claim.delta)
    )
    attacks = Attacks.of_curve(curve)
    text = explain(round_up(claim.epsilon), claim.delta, claim.unit, attacks, claim.objection, claim.n)
    if claim.refuted is not None:
        text = f"REFUTED by the run's own audit: {claim.refuted}. What follows is what was claimed.\n\n{text}"
    private = claim.objection is None
    values = {
        "private": private,
        **({"refuted": claim.refuted} if claim.refuted is not None else {}),
        "epsilon": round_up(claim.epsilon) if private else None,
        "delta": float(show_delta(claim.delta)) if private else None,
        "best_guess": attacks.best_guess if private else 1.0,
        "attack_power_at_1_percent": attacks.at_one_percent if private else 1.0,
        "attack_power_at_0.1_percent": attacks.at_one_in_a_thousand if private else 1.0,
        "explanation": text,
    }
    if (records := arguments.records_per_person) is None or not private:
        return values, text
    if claim.unit != RECORD:
        raise PlanError(
            f"--records-per-person counts records, but this run protects {claim.unit}, however many records that has; "
            "its certificate has the rows for a person with several units"
        )
    if claim.no_groups is not None:
        raise PlanError(f"--records-per-person: {claim.no_groups}")
    if claim.events is None:
        raise PlanError(f"--records-per-person needs the steps that were made, but was given {claim.holds_for}")
    events, delta = claim.events, claim.delta
    values |= {
        "records_per_person": records,
        "epsilon_per_person": (group := row(lambda: group_epsilon(events, delta, records)))["epsilon"],
        "epsilon_replacement": (replaced := row(lambda: replacement_epsilon(events, delta)))["epsilon"],
    }
    lines = [
        f"For a person with {records} records: {_shown(group, delta)}.",
        f"For a record that is exchanged for another one, or gets another label: {_shown(replaced, delta)}.",
    ]
    return values, "\n\n".join([text, *lines])


def statement_command(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    folder = arguments.target
    verdict = verify(folder)
    if verdict.attached is None:
        raise PlanError(f"{folder} has no certificate yet; statements are made of runs that have ended")
    if verdict.objection:
        raise PlanError(
            f"{verdict.objection}, so nothing limits what withdrawing records changes; no statement is made"
        )
    if verdict.refuted:
        raise PlanError(f"the run's own audit refutes its claim ({verdict.refuted[0]}); no statement is made of it")
    history, _ = History.read(folder / "ledger.jsonl")
    certificate = parse((folder / "certificate.json").read_bytes())
    bound = withdrawal.bound_of(history, certificate, arguments.records, arguments.unit)
    document = withdrawal.compose(certificate, arguments.records, arguments.unit, bound)
    if arguments.key is not None:
        key = load(arguments.key)
        if public_key(key) != history.run["signer"]:
            raise PlanError(f"{arguments.key} is not the key of this run; give its own, or leave --key out")
        document = signed(document, key)
    name = f"{withdrawal.name_of(arguments.records, arguments.unit)}.json"
    content = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    files = withdrawal.page(document) | {name: content.encode("utf-8", "backslashreplace")}
    for file, data in files.items():
        with atomic(folder / file) as written:
            written.write(data)
    low, high = bound["true_positives"]
    lines = [
        document["statement"],
        f"a test with 0.1 % false alarms finds at most {percent(low['at_most'])}, with 1 % at most "
        f"{percent(high['at_most'])}; advantage at most {percent(bound['advantage'])}",
        f"written: {', '.join(str(folder / file) for file in files)}"
        + ("" if arguments.key else " (not signed: it follows from the signed certificate)"),
    ]
    return document, "\n".join(map(printable, lines))


class ClaimToExplain(NamedTuple):
    """The promise to explain, with the steps behind it if they are known."""

    epsilon: float
    delta: float
    objection: str | None
    events: list[Event] | None
    holds_for: str
    no_groups: str | None = None
    """Why nothing is proved for several records of one person."""
    unit: str = RECORD
    n: int | None = None
    refuted: str | None = None
    """What of it does not stand by the run's own audit."""


def _claim_of(arguments: argparse.Namespace) -> ClaimToExplain:
    numbers = (arguments.n, arguments.batch, arguments.steps, arguments.sigma)
    if arguments.target is not None:
        return _of_run(arguments)
    if arguments.epsilon is not None:
        if arguments.delta is None and arguments.n is None:
            raise PlanError("explain --epsilon needs --delta (or --n, for the default 1/(2n))")
        spent, delta = arguments.epsilon, parse_delta(arguments.delta, arguments.n or 1)
        if not (0 <= spent < float("inf") and 0 < delta < 1):
            raise PlanError(f"epsilon must be at least 0 and delta in (0, 1), but they are {spent} and {delta}")
        instead = "one (ε, δ); give --n, --batch, --steps and --sigma instead"
        return ClaimToExplain(spent, delta, None, None, instead, n=arguments.n)
    if all(value is not None for value in numbers):
        delta = delta_of(arguments)
        sampling = asked_sampling(arguments, arguments.batch, arguments.steps)
        events = [sampling.event(arguments.sigma, sampling.turns(arguments.steps))]
        spent = epsilon(events, delta, arguments.accountant)
        return ClaimToExplain(spent, delta, None, events, "the steps", sampling.no_groups, n=arguments.n)
    raise PlanError("explain needs a RUN_DIR, or --epsilon and --delta, or --n, --batch, --steps and --sigma")


def _of_run(arguments: argparse.Namespace) -> ClaimToExplain:
    verdict = verify(arguments.target, arguments.accountant)
    if verdict.delta is None:
        return ClaimToExplain(0.0, 1.0, printable(verdict.objection or ""), None, "no private step")
    folder = arguments.target if arguments.target.is_dir() else arguments.target.parent
    history, _ = History.read(folder / "ledger.jsonl")
    spent = may_claim(history) if verdict.claimed is None else verdict.claimed
    events, holds_for = claimed_events(history, finished=verdict.claimed is not None)
    objection = printable(verdict.objection) if verdict.objection else None
    no_groups = next((plan.sampling.no_groups for plan in history.plans.values() if plan.sampling.no_groups), None)
    unit = unit_in_words(history.unit)
    n = max(plan.records for plan in history.plans.values())
    refuted = printable(verdict.refuted[0]) if verdict.refuted else None
    return ClaimToExplain(spent, history.claimed_delta(), objection, events, holds_for, no_groups, unit, n, refuted)


def _shown(found: dict[str, Any], delta: float) -> str:
    if found["epsilon"] is None:
        return f"no epsilon is proved ({found['reason']})"
    return f"epsilon = {round_up(found['epsilon'])} at the same delta = {show_delta(delta)}"
