"""A tiny run for the ledger's tests: a plan, honest facts of a step, and a journal on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from murmuration.accounting.banded import BandedNoise
from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.signature import public_key, signed
from murmuration.accounting.certificate.statement import compose
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.keys import RunKey
from murmuration.accounting.ledger.chain import GENESIS, Ledger, LedgerEntry, Lines, make_entry
from murmuration.accounting.ledger.facts import (
    ClippingFact,
    CorrelationFact,
    MetricFact,
    NoiseFact,
    SamplingFact,
    StepFacts,
)
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.ledger.lines import KEYED, RecordDigests
from murmuration.accounting.noise import EXACT, ExactGrid
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import Poisson

# q = 1: every epsilon is exact and takes no time, so that histories can be tried by the thousand.
PLAN = PrivacyPlan(
    records=100, sampling=Poisson(2**32), clip_norm=1.0, noise_multiplier=20.0, steps=40, delta=1e-3, epsilon_budget=2.0
)
CONFIG, DATA = "config-1", "data-1"
GRID = 2.0**-22
"""Of exact noise: as coarse as a plan's charge for it allows."""
KEY = RunKey(bytes(range(32)))
SIGNER = public_key(KEY)


def facts(
    step: int, plan: PrivacyPlan = PLAN, keyed: str = "", begun_after: int = 0, **changes: float
) -> StepFacts:  # fmt: skip
    """What honest parts report of a step, whatever its plan asks of them, in a segment that began after `begun_after`;
    `changes` are planted lies of the acting objects."""
    digest = hashlib.sha256(f"{keyed}|{step}".encode()).hexdigest()
    sampling = SamplingFact(
        Poisson(int(changes["threshold"])) if "threshold" in changes else plan.sampling, plan.records, digest
    )
    clipping = ClippingFact("flat", changes.get("sensitivity", plan.clip_norm))
    std, grid = changes.get("std", plan.noise_std), 0.0
    noise = NoiseFact(std, changes.get("divisor", plan.divisor), int(changes.get("elements", 10)))
    if isinstance(plan.noise, BandedNoise):
        correlation = CorrelationFact(plan.noise.digest, std * plan.noise.spread(step, begun_after + 1))
        noise = replace(noise, correlation=correlation)
    if isinstance(plan.noise, ExactGrid):
        grid = changes.get("grid", GRID)
        noise = replace(noise, generator=EXACT, grid=grid)
    metrics = tuple(MetricFact(metric.name, metric.bound, metric.std, grid) for metric in plan.metrics)
    return StepFacts(sampling, clipping, noise, metrics)


def parsed(content: bytes) -> list[LedgerEntry]:
    """The lines of a ledger that need be in no file."""
    lines = Lines(Path("ledger.jsonl"))
    return [lines.follow(raw) for raw in BytesIO(content)]


def reopen(folder: Path) -> Journal:
    return Journal(Ledger.open(folder / "ledger.jsonl"))


def begin(
    folder: Path, plan: PrivacyPlan = PLAN, debug: bool = False, key: RunKey = KEY, records: RecordDigests = KEYED
) -> Journal:  # fmt: skip
    """Before its first step. `records`: how the ledger names them."""
    journal = reopen(folder)
    versions = {"dp-accounting": "0.6.0"}
    journal.start_run("tiny", key.check_value(), debug, versions, records, public_key(key))
    journal.declare_plan(0, "private", plan, describe("pld"))
    journal.begin_segment(0, CONFIG, DATA, 0, "first")
    return journal


def train(
    journal: Journal, steps: range, plan: PrivacyPlan = PLAN, phase: int = 0, begun_after: int = 0
) -> None:  # fmt: skip
    for step in steps:
        honest = facts(step, plan, begun_after=begun_after)
        journal.open_step(phase, step, honest)
        journal.commit_step(phase, step, honest)


def whole_run(folder: Path, steps: int = 3, plan: PrivacyPlan = PLAN, key: RunKey = KEY) -> Journal:
    """Trained to the end of a plan of so many steps, with one checkpoint, finished."""
    plan = replace(plan, steps=steps)
    journal = begin(folder, plan, key=key)
    train(journal, range(1, steps + 1), plan)
    journal.checkpointed(0, steps, "digest")
    journal.finish()
    return journal


def document_of(journal: Journal, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a certificate of it says now, signed."""
    return signed(compose(journal.history, journal.ledger.entries, extra or {}), KEY)


def certified(journal: Journal, extra: dict[str, Any] | None = None, key: RunKey = KEY) -> dict[str, Any]:
    """The same beside the ledger, signed by `key`; the ledger is closed."""
    document = signed(document_of(journal, extra), key)
    pages.write(document, journal.ledger.path.parent)
    journal.ledger.close()
    return document


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The ledger with some lines changed and every hash made anew, as a forger would do it."""
    path = folder / "ledger.jsonl"
    previous, lines = GENESIS, []
    for index, raw in enumerate(path.read_text().splitlines()):
        fields = {k: v for k, v in json.loads(raw).items() if k not in ("index", "kind", "previous", "hash")}
        fields["kind"] = json.loads(raw)["kind"]
        change(fields)
        entry = make_entry(index, fields.pop("kind"), fields, previous)
        previous = entry.hash
        lines.append(entry.line)
    path.write_bytes(b"".join(lines))


Change = Callable[[dict[str, Any]], object]


def to(places: dict[str, Any]) -> Change:
    """Other values at places like "claim.epsilon" and "limits.events.0", or what functions make of those there."""

    def change(document: dict[str, Any]) -> None:
        for place, value in places.items():
            holder: Any = document
            *way, last = place.split(".")
            for key in way:
                holder = holder[int(key) if key.isdigit() else key]
            holder[last] = value(holder.get(last)) if callable(value) else value

    return change


def on(kinds: str, places: dict[str, Any]) -> Change:
    """In the lines of these kinds alone."""
    return lambda line: to(places)(line) if line["kind"] in kinds.split() else None


def every(*changes: Change) -> Change:
    return lambda line: [change(line) for change in changes]
