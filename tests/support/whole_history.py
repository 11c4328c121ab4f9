"""What every step of a ledger announced and did: the product forgets what no replay may need."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from murmuration.accounting.ledger.facts import StepFacts, StepId
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.ledger.lines import StepLine
from murmuration.accounting.strict_json import read


class Steps(NamedTuple):
    """In the order of the lines."""

    opened: dict[StepId, StepFacts]
    committed: dict[StepId, StepFacts]


def steps_of(run: Path | Journal) -> Steps:
    """The steps of a run directory, or of what a journal wrote."""
    entries = run.ledger.entries if isinstance(run, Journal) else History.read(run / "ledger.jsonl")[1]
    found: dict[str, dict[StepId, StepFacts]] = {"open": {}, "commit": {}}
    for entry in entries:
        if entry.kind in found:
            line = read(StepLine, entry.fields)
            found[entry.kind][line.step_id] = line.facts
    return Steps(found["open"], found["commit"])
