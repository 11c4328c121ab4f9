"""The rules by which a run writes its ledger: open before, commit after, replay only what is provably the same.

The journal refuses a step that would pass the budget, a replay that differs from what it replays, and a commit
that promises less than was announced.
"""

from __future__ import annotations

import secrets
from typing import Any

from accounting.accountant import Event
from accounting.calibrate import affordable_steps
from accounting.facts import StepFacts
from accounting.history import CheckpointMark, History, Segment, StepId
from accounting.ledger import FORMAT, Ledger, LedgerError, make_entry
from accounting.plan import PrivacyPlan


class BudgetSpent(RuntimeError):
    """The next step would pass the planned epsilon."""


class Journal:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.history = History.of(ledger.entries)
        self._credit: dict[tuple[float, float], int] = {}

    def _append(self, kind: str, **fields: Any) -> None:
        # Read by the rules first, so that a line that would make the ledger unreadable is never written.
        self.history.take(make_entry(self.ledger.length, kind, fields, self.ledger.head))
        self.ledger.append(kind, **fields)

    def start_run(self, name: str, key_check: str, debug: bool, versions: dict[str, str]) -> None:
        self._append("run", format=FORMAT, name=name, key_check=key_check, debug=debug, versions=versions)

    def declare_plan(self, phase: int, name: str, plan: PrivacyPlan, method: dict[str, object]) -> None:
        """Freezes the plan; on resume, refuses one that differs from the frozen one."""
        known = self.history.plans.get(phase)
        if known is None:
            self._append("plan", phase=phase, name=name, plan=plan.as_dict(), method=method)
        elif known != plan:
            changed = [k for k, v in plan.as_dict().items() if v != known.as_dict()[k]]
            raise LedgerError(
                f"the plan of phase {name!r} is frozen in the ledger, but {', '.join(changed)} changed; "
                "restore the config and data, or start a new run directory"
            )

    def declare_nonprivate(self, phase: int, name: str, public_data: bool, manifest_digest: str) -> None:
        """`public_data` is the user's word; without it the whole run is marked NOT PRIVATE."""
        if phase not in self.history.nonprivate:
            fields = {"name": name, "public_data": public_data, "manifest_digest": manifest_digest}
            self._append("nonprivate", phase=phase, **fields)

    def begin_segment(
        self, phase: int, config_digest: str, manifest_digest: str, from_step: int, reason: str, salt: str | None = None
    ) -> Segment:
        """New keys from here on. The salt keeps two copies of a run from ever deriving the same next keys."""
        segment = Segment(
            phase=phase, number=len(self.history.segments_of(phase)), salt=salt or secrets.token_hex(16),
            config_digest=config_digest, manifest_digest=manifest_digest, from_step=from_step, reason=reason,
        )  # fmt: skip
        self._append("segment", **segment.__dict__)
        self._credit.clear()
        return segment

    def resumed(self, phase: int, step: int) -> None:
        self._append("resume", phase=phase, step=step)

    def open_step(self, phase: int, step: int, facts: StepFacts) -> None:
        """Durable before anything of the step is computed; a replay writes nothing and must be identical."""
        step_id = self._step_id(phase, step)
        known = self.history.opened.get(step_id)
        if known is not None:
            if known != facts:
                raise LedgerError(f"step {step} of phase {phase} would be replayed differently from how it was opened")
            return
        event = facts.event()
        plan = self.history.plans[phase]
        if (facts.sampling.records, facts.noise.divisor) != (plan.records, plan.divisor):
            raise LedgerError(
                f"step {step} of phase {phase} would use n = {facts.sampling.records} and divisor "
                f"{facts.noise.divisor:g}, but the plan says {plan.records} and {plan.divisor:g}"
            )
        key = (event.rate, event.sigma)
        if self._credit.get(key, 0) < 1:
            self._credit = {key: self._affordable(phase, event, max(1, plan.steps - step + 1))}
        if self._credit[key] < 1:
            raise BudgetSpent(f"step {step} would pass epsilon = {self._budget(phase):g}; the run ends here")
        self._append("open", phase=phase, segment=step_id.segment, step=step, facts=facts.as_dict())
        self._credit[key] -= 1

    def commit_step(self, phase: int, step: int, facts: StepFacts) -> None:
        step_id = self._step_id(phase, step)
        known = self.history.committed.get(step_id)
        if known is not None:
            if known != facts:
                raise LedgerError(f"step {step} of phase {phase} was replayed differently from how it was committed")
            return
        announced = self.history.opened[step_id]
        self._append("commit", phase=phase, segment=step_id.segment, step=step, facts=facts.as_dict())
        if facts != announced:  # charged with the weaker of the two either way
            raise LedgerError(
                f"step {step} of phase {phase} did {facts} but had announced {announced}; the run stops, "
                "and the ledger charges the weaker of the two"
            )

    def checkpointed(self, phase: int, step: int, digest: str) -> None:
        """Only after the checkpoint is durable: from here on, what depends on it may leave the job."""
        segments = self.history.segments_of(phase)
        mark = CheckpointMark(phase, segments[-1].number if segments else 0, step, digest)
        if mark != self.history.last_checkpoint():
            self._append("checkpoint", **mark.__dict__)

    def finish(self) -> None:
        if not self.history.finished:
            self._append("finish")

    def new_segment_reason(self, phase: int, step: int, config_digest: str) -> str | None:
        """Why steps after `step` must not be replayed under their old keys; None if they may be."""
        segments = self.history.segments_of(phase)
        if not segments:
            return "first"
        last = self.history.last_checkpoint()
        if last is not None and (last.phase, last.step) > (phase, step):
            return f"rolled back to step {step} of phase {phase}, behind a checkpoint that outputs may depend on"
        if segments[-1].config_digest != config_digest:
            return "the config changed"
        return None

    def _step_id(self, phase: int, step: int) -> StepId:
        return StepId(phase, self.history.segments_of(phase)[-1].number, step)

    def _budget(self, phase: int) -> float:
        return sum(plan.epsilon_budget for index, plan in self.history.plans.items() if index <= phase)

    def _affordable(self, phase: int, event: Event, wanted: int) -> int:
        return affordable_steps(
            self.history.charged(), event.rate, event.sigma, wanted, self._budget(phase), self.history.delta()
        )
