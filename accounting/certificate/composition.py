"""What all known runs on the same records cost together, as numbers that a reader can recompute.

There are two numbers because they need different assumptions. The sum of the runs' claims (basic composition) holds
whatever the reason for starting the later runs was. The composition of the steps that these claims rest on
(`limits.claimed_events`: the opened steps or, where outputs may have decided when to stop, all that the budget would
have allowed) is smaller, and holds if no run's plan was chosen by looking at another's outputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from murmuration.accounting.certificate.limits import claimed_events
from murmuration.accounting.certificate.statement import may_claim
from murmuration.accounting.epsilon.accountant import epsilon, merge
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import LedgerError, Lines
from murmuration.accounting.ledger.history import History
from murmuration.accounting.unit import RECORD, unit_in_words

SUMS = ("epsilon_sum", "delta_sum", "epsilon_together", "delta_together")


@dataclass(frozen=True)
class Known:
    """Another run on the same records. `history` is None if its ledger is not available."""

    run: str
    id: str
    private: bool
    epsilon: float
    delta: float
    history: History | None = None
    entries: Lines | None = None
    unit: str = RECORD
    """What its promise is about, in words."""

    def as_dict(self) -> dict[str, Any]:
        how = _by(self.history)
        return {"run": self.run, "id": self.id, "epsilon": self.epsilon, "delta": self.delta, "by": how}


def known_runs(logged: Iterable[dict[str, Any]]) -> list[Known]:
    """The runs in a log of runs, which has one line for each phase."""
    by_id: dict[str, list[dict[str, Any]]] = {}
    for line in logged:
        by_id.setdefault(line["id"], []).append(line)
    return [_known(lines) for name, lines in by_id.items() if name != "unknown"]


def _known(lines: list[dict[str, Any]]) -> Known:
    first = lines[0]
    budgets, deltas = ([line.get(name) for line in lines] for name in ("epsilon_budget", "delta"))
    # A line without both states no promise that could be added.
    private = all(isinstance(number, int | float) for number in (*budgets, *deltas))
    claim = math.fsum(budget for budget in budgets if isinstance(budget, int | float)) if private else math.inf
    # What its phases promise adds up, and only their ledger tells which of them were composed at one delta.
    delta = math.fsum(float(each) for each in deltas if isinstance(each, int | float))
    ledger = _ledger(first.get("folder"), first["id"])
    if ledger is None:
        # A run that was chosen among several claims more than the budgets of its phases.
        told = [line["claimed"] for line in lines if isinstance(line.get("claimed"), int | float)]
        unit = str(first.get("unit", RECORD))
        return Known(str(first.get("run")), first["id"], private, max([claim, *told]), delta, unit=unit)
    history, entries = ledger
    if history.why_not_private() is not None:
        return Known(history.run["name"], first["id"], False, math.inf, delta)
    claimed = may_claim(history)
    unit = unit_in_words(history.unit)
    return Known(history.run["name"], first["id"], True, claimed, history.claimed_delta(), history, entries, unit)


def _ledger(folder: object, run: str) -> tuple[History, Lines] | None:
    try:
        history, entries = History.read(Path(str(folder)) / "ledger.jsonl")
    except (OSError, LedgerError):
        return None
    return (history, entries) if history.run_id == run and history.plans else None


def composed(history: History, entries: Lines, claimed: float, others: list[Known]) -> dict[str, Any]:
    """`claimed` is this run's own epsilon. Without any other run there is nothing to add up."""
    delta = history.claimed_delta()
    runs = [{"run": history.run["name"], "id": history.run_id, "epsilon": claimed, "delta": delta, "by": _by(history)}]
    runs += [other.as_dict() for other in others]
    if open_runs := [other.run for other in others if not other.private]:
        because = f"{', '.join(sorted(set(open_runs)))} trained on these records without a promise"
        return {"runs": [_shown(run) for run in runs], "epsilon_sum": None, "because": because}
    if unlike := sorted({other.run for other in others if other.unit != unit_in_words(history.unit)}):
        because = (
            f"this run protects {unit_in_words(history.unit)}, and {', '.join(unlike)} something else; nobody has "
            "proved what promises for different units come to"
        )
        return {"runs": [_shown(run) for run in runs], "epsilon_sum": None, "because": because}
    everyone = [(history, entries), *((o.history, o.entries) for o in others)]
    at_hand = [(found, lines) for found, lines in everyone if found and lines and _by(found) == "ledger"]
    events = merge(_all_events(at_hand))
    return total(runs, [event.as_dict() for event in events], history.delta())


def total(runs: list[dict[str, Any]], events: list[dict[str, Any]], delta: float) -> dict[str, Any]:
    """Computed only from what a certificate states, so that anyone who reads it can do the same."""
    claims = [run for run in runs if run["by"] == "claim"]
    together = epsilon([Event.of_dict(each) for each in events], delta)
    return {
        "runs": runs,
        "epsilon_sum": math.fsum(run["epsilon"] for run in runs),
        "delta_sum": math.fsum(run["delta"] for run in runs),
        "events": events,
        "delta": delta,
        "epsilon_together": together + math.fsum(run["epsilon"] for run in claims),
        "delta_together": delta + math.fsum(run["delta"] for run in claims),
    }


def _by(history: History | None) -> str:
    """`ledger` if the steps that the run's claim follows from are known, otherwise `claim`."""
    known = history is not None and claimed_events(history, history.finished)[0] is not None
    return "ledger" if known else "claim"


def _shown(run: dict[str, Any]) -> dict[str, Any]:
    return {**run, "epsilon": run["epsilon"] if math.isfinite(run["epsilon"]) else None}


def _all_events(ledgers: list[tuple[History, Lines]]) -> list[Event]:
    """Steps that a copied run made before it was copied are in several ledgers, and are counted once."""
    counted: list[Lines] = []
    events: list[Event] = []
    for history, entries in ledgers:
        shared = max((_common(entries, other) for other in counted), default=0)
        before = Counter({each.kind: each.count for each in History.of(islice(entries, shared)).charged(fewest=True)})
        claimed, _ = claimed_events(history, history.finished)  # an unfinished run counts up to its whole budget
        own = Counter({each.kind: each.count for each in claimed or ()})
        events += [replace(kind, count=count) for kind, count in (own - before).items()]
        counted.append(entries)
    return events


def _common(one: Lines, other: Lines) -> int:
    """Length of the common prefix of two ledgers: each line's hash covers all lines before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1].hash == other[middle - 1].hash else (low, middle - 1)
    return low
