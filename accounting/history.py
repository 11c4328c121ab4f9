"""What a ledger says happened: segments, opened and committed steps, checkpoints, and the epsilon that is charged.

Every opened step is charged, committed or not, in whichever segment; a step replayed within its segment is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accounting.accountant import Accountant, Event, epsilon, merge
from accounting.facts import StepFacts
from accounting.ledger import FORMAT, Entry, LedgerError, parse
from accounting.plan import PrivacyPlan


@dataclass(frozen=True, order=True)
class StepId:
    phase: int
    segment: int
    step: int


@dataclass(frozen=True)
class Segment:
    """A stretch of steps that share their keys and everything that shapes a release."""

    phase: int
    number: int
    salt: str
    config_digest: str
    manifest_digest: str
    from_step: int
    reason: str

    @property
    def key_name(self) -> str:
        return f"{self.number}:{self.salt}"


@dataclass(frozen=True)
class CheckpointMark:
    phase: int
    segment: int
    step: int
    digest: str


@dataclass
class History:
    """The ledger, read from its first line to its last."""

    run: dict[str, Any] = field(default_factory=dict)
    plans: dict[int, PrivacyPlan] = field(default_factory=dict)
    phase_names: dict[int, str] = field(default_factory=dict)
    nonprivate: dict[int, bool] = field(default_factory=dict)
    """Phases without clipping and noise, and whether their data were declared public."""
    segments: list[Segment] = field(default_factory=list)
    opened: dict[StepId, StepFacts] = field(default_factory=dict)
    committed: dict[StepId, StepFacts] = field(default_factory=dict)
    checkpoints: list[CheckpointMark] = field(default_factory=list)
    finished: bool = False

    @staticmethod
    def of(entries: Iterable[Entry]) -> History:
        history = History()
        for entry in entries:
            history.take(entry)
        return history

    @staticmethod
    def read(path: Path) -> tuple[History, list[Entry]]:
        if not path.is_file():
            raise LedgerError(f"there is no ledger at {path}; name the run directory that holds ledger.jsonl")
        entries = parse(path.read_bytes(), path.name)
        return History.of(entries), entries

    def take(self, entry: Entry) -> None:
        handler = getattr(self, f"_{entry.kind.replace('-', '_')}", None)
        if handler is None:
            raise LedgerError(f"line {entry.index + 1}: unknown kind {entry.kind!r}; read it with a newer version")
        if (entry.kind == "run") != (entry.index == 0):
            raise LedgerError(f"line {entry.index + 1}: a ledger starts with exactly one run entry")
        try:
            handler(entry.fields)
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"line {entry.index + 1}: malformed {entry.kind!r} entry: {error}") from None

    def _run(self, fields: dict[str, Any]) -> None:
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']!r} is not {FORMAT!r}")
        self.run = fields

    def _plan(self, fields: dict[str, Any]) -> None:
        if fields["phase"] in self.plans:
            raise ValueError(f"phase {fields['phase']} has a plan already, and a plan is frozen")
        self.plans[fields["phase"]] = PrivacyPlan(**fields["plan"])
        self.phase_names[fields["phase"]] = fields["name"]

    def _nonprivate(self, fields: dict[str, Any]) -> None:
        self.nonprivate[fields["phase"]] = bool(fields["public_data"])
        self.phase_names[fields["phase"]] = fields["name"]

    def _segment(self, fields: dict[str, Any]) -> None:
        segment = Segment(**fields)
        if segment.number != len(self.segments_of(segment.phase)):
            raise ValueError(f"segment {segment.number} is out of order")
        self.segments.append(segment)

    def _open(self, fields: dict[str, Any]) -> None:
        step_id, facts = _step(fields)
        if step_id in self.opened:
            raise ValueError(f"{step_id} was opened before; a replayed step is not written twice")
        if step_id.phase not in self.plans or step_id.segment != len(self.segments_of(step_id.phase)) - 1:
            raise ValueError(f"{step_id} was opened outside the current segment")
        facts.event()
        self.opened[step_id] = facts

    def _commit(self, fields: dict[str, Any]) -> None:
        step_id, facts = _step(fields)
        if step_id not in self.opened or step_id in self.committed:
            raise ValueError(f"{step_id} was committed without being open, or twice")
        self.committed[step_id] = facts

    def _checkpoint(self, fields: dict[str, Any]) -> None:
        self.checkpoints.append(CheckpointMark(**fields))

    def _resume(self, fields: dict[str, Any]) -> None:
        del fields  # tells a reader where the run went on; nothing is charged or credited for it

    def _recovered(self, fields: dict[str, Any]) -> None:
        del fields

    def _finish(self, fields: dict[str, Any]) -> None:
        del fields
        self.finished = True

    def segments_of(self, phase: int) -> list[Segment]:
        return [segment for segment in self.segments if segment.phase == phase]

    def last_checkpoint(self) -> CheckpointMark | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def why_not_private(self) -> str | None:
        """None if the claim of privacy may be made."""
        if self.run["debug"]:
            return "NOT PRIVATE (debug): the keys come from a seed that the user gave"
        undeclared = [self.phase_names[index] for index, public in self.nonprivate.items() if not public]
        if undeclared:
            return f"NOT PRIVATE: phase {', '.join(undeclared)} trained without noise on data not declared public"
        return None if self.plans else "NOT PRIVATE: no phase of this run was private"

    def charged(self, phase: int | None = None) -> list[Event]:
        """Each opened step at the weaker of what was announced and what was done."""
        events: list[Event] = []
        for step_id, announced in self.opened.items():
            if phase is not None and step_id.phase != phase:
                continue
            done = self.committed.get(step_id, announced)
            if done.sampling != announced.sampling:
                raise LedgerError(f"{step_id}: what was sampled changed between open and commit")
            events.append(min(announced.event(), done.event(), key=lambda event: event.sigma))
        return merge(events)

    def delta(self) -> float:
        deltas = {plan.delta for plan in self.plans.values()}
        if len(deltas) != 1:
            raise LedgerError(f"the ledger has {len(deltas)} values of delta, so no single claim can be made")
        return deltas.pop()

    def epsilon(self, accountant: Accountant = "pld") -> float:
        """Of everything opened in all private phases, at the run's delta."""
        events = self.charged()
        return epsilon(events, self.delta(), accountant) if events else 0.0

    def budget(self) -> float:
        """Sum of the phases' budgets: basic composition bounds what the phases may spend together."""
        return sum(plan.epsilon_budget for plan in self.plans.values())


def _step(fields: dict[str, Any]) -> tuple[StepId, StepFacts]:
    return StepId(fields["phase"], fields["segment"], fields["step"]), StepFacts.from_dict(fields["facts"])
