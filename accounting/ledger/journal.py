"""The rules by which a run writes its ledger: open before, commit after, replay only what is provably the same.

The journal refuses a step that would pass the budget, a replay that differs from what it replays, and a commit
that promises less than was announced.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from murmuration.accounting.epsilon.accountant import affordable_steps
from murmuration.accounting.errors import NEW_SEGMENT
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import FORMAT, BudgetSpent, Ledger, LedgerEntry, LedgerError
from murmuration.accounting.ledger.facts import Charge, CheckpointMark, Head, Segment, StepFacts, StepId
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.lines import Origin, PublicLine, PublicUse, RecordDigests, StepLine, StoreLine, Word
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.strict_json import read

if TYPE_CHECKING:
    from murmuration.accounting.epsilon.tuning import Declared


class Journal:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.history = History.of(ledger.entries)
        self._credit: dict[Event, int] = {}
        self.witnesses: dict[str, Callable[[Head], None]] = {}
        """Called with the ledger's head after every durable checkpoint, and at the end."""
        self.remember: Callable[[Head], None] = lambda head: None
        """Called before a line that releases something by itself: then no older ledger may be taken for the newest."""

    def head(self) -> Head:
        return Head(self.history.run_id, self.ledger.length, self.ledger.head, self.history.charges())

    def tell_witnesses(self) -> None:
        if self.witnesses:
            head = self.head()
            for tell in self.witnesses.values():
                tell(head)

    def admit_lost(self, found: tuple[Head, list[Charge]] | None, new_segment: str | None) -> None:
        """Refuses a ledger that lacks lines it is known to have had (`heads.lost_charges`), unless a new segment is
        declared: then everything that is known to have been opened is charged here, too."""
        if found is None:
            return
        newest, lost = found
        if new_segment is None:
            raise LedgerError(
                f"the ledger has {self.ledger.length} lines, but this run is known to have had another line "
                f"{newest.length}: it was restored from a backup; restore the newest ledger and checkpoints, or "
                f"declare {NEW_SEGMENT} (everything that is known to have been opened stays charged)"
            )
        lost = [*lost, *self._uneven_turns(newest)]
        charged = [charge.as_dict() for charge in lost]
        self._append("lost", length=newest.length, head=newest.head, charged=charged)
        self._credit.clear()
        self.tell_witnesses()

    def _uneven_turns(self, newest: Head) -> list[Charge]:
        """Where records take turns, a head tells the steps of the part that was drawn from most. Others may be behind
        by one step for each segment, so that more of their steps were lost than the heads' difference."""
        phases = {charge.phase for charge in newest.charged}
        return [
            Charge.of(phase, plan.event(max(1, len(self.history.segments_of(phase)))))
            for phase, plan in self.history.plans.items()
            if plan.sampling.parts > 1 and phase in phases
        ]

    def declare_choice(self, by: str) -> None:
        """Checkpoints are kept by a public metric: whichever is released, the planned budget is claimed."""
        if by not in self.history.choices:
            self._append("choice", by=by)

    def declare_public(self, phase: int, use: PublicUse, digest: str) -> None:
        """Records the owner's word that records or weights used without noise are public; it is never taken back."""
        line = PublicLine(phase, use, digest)
        if line not in self.history.public_uses:
            self._append("public", **line.__dict__)

    def declare_earlier(self, digests: Iterable[str]) -> None:
        """Records what runs before this one used without noise: whoever begins from this run's weights must know."""
        for digest in sorted(set(digests) - self.history.without_noise()):
            self._append("earlier", digest=digest)

    def declare_store(self, phase: int, host: str) -> None:
        """Records a store, which sees which records are drawn; it is never taken back."""
        line = StoreLine(phase, host)
        if line not in self.history.stores:
            self._append("store", **line.__dict__)

    def declare_word(self, what: Word) -> None:
        if what not in self.history.words:
            self._append("word", what=what)

    def _append(self, kind: str, **fields: Any) -> None:
        self.ledger.append(self._readable(kind, fields))

    def _append_soon(self, kind: str, **fields: Any) -> None:
        """For the lines of a step, whose computation need not wait for the disk: only what is released must."""
        self.ledger.append_soon(self._readable(kind, fields))

    def _readable(self, kind: str, fields: dict[str, Any]) -> LedgerEntry:
        # Taken by `History` first, so that a line that would make the ledger unreadable is never written.
        entry = self.ledger.next(kind, **fields)
        self.history.take(entry)
        return entry

    def settle(self) -> None:
        """Returns once every line is durable: what an opened step computed may be released only then."""
        self.ledger.settle()

    def start_run(
        self, name: str, key_check: str, debug: bool, versions: dict[str, str], record_digests: RecordDigests,
        signer: str, started: str | None = None,
    ) -> None:  # fmt: skip
        fields = {"name": name, "key_check": key_check, "debug": debug, "versions": versions, "signer": signer}
        dated = {} if started is None else {"started": started}
        self._append("run", format=FORMAT, record_digests=record_digests, **fields, **dated)

    def declare_plan(self, phase: int, name: str, plan: PrivacyPlan, method: dict[str, object]) -> None:
        """Freezes the plan; on resume, refuses one that differs from the frozen one."""
        if phase in self.history.nonprivate:
            raise LedgerError(
                f"phase {name!r} began without noise, so it cannot become private; start a new run directory"
            )
        known = self.history.plans.get(phase)
        if known is None:
            others = {other.delta for other in self.history.plans.values()} - {plan.delta}
            if others:
                raise LedgerError(
                    f"phase {name!r} has delta = {plan.delta:.6g} but an earlier phase has {others.pop():.6g}; "
                    "a run claims one delta, so write the same number in every privacy section"
                )
            self._append("plan", phase=phase, name=name, plan=plan.as_dict(), method=method)
        elif known != plan:
            new, old = plan.as_dict(), known.as_dict()
            both = {k: (old.get(k), new.get(k)) for k in {**old, **new} if new.get(k) != old.get(k)}
            changed = [
                f"{k} ({was:g}, now {now:g})" if isinstance(was, int | float) and isinstance(now, int | float) else k
                for k, (was, now) in both.items()
            ]
            raise LedgerError(
                f"the plan of phase {name!r} is frozen in the ledger, but {', '.join(changed)} changed; "
                "restore the config and data, or start a new run directory"
            )

    def declare_nonprivate(self, phase: int, name: str, public_data: bool, manifest_digest: str) -> None:
        """`public_data` is the user's word, and every change of it is kept; one "no" marks the run NOT PRIVATE."""
        if phase in self.history.plans:
            raise LedgerError(
                f"phase {name!r} began as a private phase, so it cannot run without noise; start a new run directory"
            )
        known = self.history.nonprivate.get(phase)
        if known is None or known > public_data or manifest_digest not in self.history.public_manifests[phase]:
            fields = {"name": name, "public_data": public_data, "manifest_digest": manifest_digest}
            self._append("nonprivate", phase=phase, **fields)

    def declare_origin(self, origin: Origin) -> bool:
        """Returns whether the origin is new."""
        if origin in self.history.origins:
            return False
        self._append("origin", **origin.as_dict())
        return True

    def declare_tuning(self, declared: Declared) -> float | None:
        """Writes it once, before the first step if known then. Returns the epsilon that it makes of the planned run."""
        planned = self.history.planned()
        cost = declared.tuning.epsilon(planned, self.history.delta()) if declared.tuning and planned else None
        if declared not in self.history.tunings:
            self._append("tuning", **declared.as_dict())
        return cost

    def begin_segment(
        self, phase: int, config_digest: str, manifest_digest: str, from_step: int, reason: str, salt: str | None = None
    ) -> Segment:
        """New keys from here on. The salt keeps two copies of a run from ever deriving the same next keys."""
        segment = Segment(
            phase=phase, number=len(self.history.segments_of(phase)), salt=salt or secrets.token_hex(16),
            config_digest=config_digest, manifest_digest=manifest_digest, from_step=from_step, reason=reason,
            keys="ratchet",
        )  # fmt: skip
        self._append("segment", **segment.as_dict())
        self._credit.clear()
        return segment

    def resumed(self, phase: int, step: int) -> None:
        self._append("resume", phase=phase, step=step)

    def open_step(self, phase: int, step: int, facts: StepFacts) -> None:
        """Nothing that the step computes may be released before `settle` has returned. A replay writes nothing and must
        be identical."""
        step_id = self._step_id(phase, step)
        if places := self.history.places_of(step_id):
            # The same noise under another sum would show the difference of the two sums.
            if self._line_at(places[0]).facts != facts:
                raise LedgerError(f"step {step} of phase {phase} would be replayed differently from how it was opened")
            return
        unfinished = self.history.pending()
        if unfinished is not None:
            raise LedgerError(
                f"step {step} of phase {phase} cannot begin while step {unfinished} is open; finish that first"
            )
        plan = self.history.plans[phase]
        if (departure := self.history.departure(step_id, facts)) is not None:
            raise LedgerError(f"step {step} of phase {phase} {departure}")
        event = self.history.event(phase, facts)
        more = self.history.charges_more(step_id, event)
        key = event.kind
        # An accountant takes seconds, so that it is asked for all steps ahead at once, and the answer used up by them.
        if more and self._credit.get(key, 0) < 1:
            wanted = max(1, plan.sampling.turns(plan.steps - step + 1))
            self._credit = {key: self._affordable(phase, event, wanted)}
        if more and self._credit[key] < 1:
            own, together = plan.epsilon_budget, self._budget(phase)
            others = "" if together == own else f" for this phase, or {together:g} for all so far"
            raise BudgetSpent(f"step {step} would pass epsilon = {own:g}{others}; the run ends here")
        self._append_soon("open", phase=phase, segment=step_id.segment, step=step, facts=facts.as_dict())
        if more:
            self._credit[key] -= 1

    def commit_step(self, phase: int, step: int, facts: StepFacts, share: float | None = None) -> float | None:
        """`share`: what is released for the next clipping norm. Returns the share in the ledger: on a replay, which may
        round differently, that of the first time, since a share is released only once."""
        step_id = self._step_id(phase, step)
        places, announced = self.history.places_of(step_id), self.history.announced
        if not places:
            raise LedgerError(f"step {step} of phase {phase} cannot be committed before it is opened")
        if len(places) > 1:
            known = self._line_at(places[1])
            if known.facts != facts:
                raise LedgerError(f"step {step} of phase {phase} was replayed differently from how it was committed")
            return known.share
        if facts != announced:
            self._credit.clear()
        more = {} if share is None else {"share": share}
        if more:  # a share is a release by itself: no ledger from before it may be taken for the newest
            self.remember(self.head())
        self._append_soon("commit", phase=phase, segment=step_id.segment, step=step, facts=facts.as_dict(), **more)
        if facts != announced:  # charged with the weaker of the two either way
            raise LedgerError(
                f"step {step} of phase {phase} did {facts} but had announced {announced}; the run stops, "
                "and the ledger charges the weaker of the two"
            )
        return share

    def clip_norm_after(self, phase: int, step: int, digest: str | None) -> float:
        """C of the step after the checkpoint with this digest, from the ledger alone; no digest: the phase begins."""
        named = [mark.segment for mark in self.history.checkpoints if mark.digest == digest]
        newest = len(self.history.segments_of(phase))
        return self.history.trails[phase].after(named[0] if named else newest, step)

    def checkpointed(self, phase: int, step: int, digest: str) -> None:
        """Call only once the checkpoint is durable: from here on, outputs that depend on it may leave the job."""
        segments = self.history.segments_of(phase)
        mark = CheckpointMark(phase, segments[-1].number if segments else 0, step, digest)
        if mark != self.history.last_checkpoint():
            self._append("checkpoint", **mark.__dict__)
            self.tell_witnesses()

    def finish(self) -> None:
        if not self.history.finished:
            self._append("finish")
            self.tell_witnesses()

    def note_copied(self, reason: str) -> None:
        """This directory is a copy, and its original may continue too: no earlier key may be used from here on."""
        self._append("copied", reason=reason, id=secrets.token_hex(16))

    def admit_checkpoint(self, phase: int, step: int, digest: str, written_at: int) -> None:
        """Refuses to continue from weights whose last step may also exist elsewhere, repeated with other rounding.

        The ledger names every checkpoint that outputs may depend on. One that it does not name is either the newest,
        whose line a kill prevented, or an orphan: of a copy, or of an abandoned segment. `written_at` is the length of
        the ledger recorded in the checkpoint: an orphan is older than the current segment, or than a resume from
        another step.
        """
        if phase not in self.history.plans or any(mark.digest == digest for mark in self.history.checkpoints):
            return
        current = self.history.segments[-1] if self.history.segments else None
        # Neither copied nor restored since the newest segment began.
        untouched = max(self.history.copied, self.history.lost_at) < len(self.history.segments)
        if current is not None and current.phase == phase and untouched:
            done = self.history.progress[phase, current.number].committed
            own = written_at > self.history.segment_lines[phase, current.number]
            # Since then the run may have continued from an older checkpoint, and repeated these very steps.
            own = own and not any(
                later.kind in ("resume", "checkpoint")
                and later.index >= written_at
                and (later.fields["phase"], later.fields["step"]) != (phase, step)
                for later in self.ledger.entries.acts
            )
            if own and done == step:
                return
        raise LedgerError(
            f"the ledger does not know this checkpoint of step {step}, and another copy of the run may have repeated "
            "the step; continue from a checkpoint that the ledger names, or start a new run directory"
        )

    def new_segment_reason(self, phase: int, step: int, config_digest: str) -> str | None:
        """Why steps after `step` must not be replayed under their old keys; None if they may be.

        They may be only if nothing that depends on them can have left the job: the last durable checkpoint of the
        whole run is the one at `step`, in the segment that was begun last.
        """
        segments = self.history.segments_of(phase)
        if not segments:
            return "first"
        current = segments[-1]
        # First, because the caller demands a declaration for it, and a rollback must not hide it.
        if current.config_digest != config_digest:
            return "the config changed"
        if self.history.lost_at >= len(self.history.segments):
            return "a part of the ledger was lost, and its steps may have been released"
        if self.history.copied >= len(self.history.segments):
            return "the run directory was copied, and its original may go on with the same keys"
        if current is not self.history.segments[-1]:
            return f"another phase was trained after phase {phase}"
        trail = self.history.trails.get(phase)
        if trail is not None and trail.told(current.number) > step + 1:
            # The first share after the checkpoint came from its weights; later ones came from weights that are lost.
            return f"the ledger tells shares of clipped records from weights that were lost after step {step}"
        return self._reason_of_checkpoints(current, step)

    def _reason_of_checkpoints(self, current: Segment, step: int) -> str | None:
        """Why the checkpoint of `step` is not the last state of this segment that outputs may depend on; None if it is.

        Where the segment has no checkpoint yet, that state is the one it began from.
        """
        phase = current.phase
        marks = self.history.checkpoints[self.history.marks_before[phase, current.number] :]
        if not marks:
            # Nothing of this segment has left the job, so it may be done again from where it began.
            if step == current.from_step:
                return None
            return f"the checkpoint is of step {step}, but the segment began after step {current.from_step}"
        last = marks[-1]
        if (last.phase, last.segment) != (phase, current.number):
            return f"phase {last.phase} was trained after phase {phase}"
        if last.step > step:
            return f"rolled back to step {step} of phase {phase}, behind a checkpoint that outputs may depend on"
        # A kill between a checkpoint and its line leaves a checkpoint of the newest committed step.
        # (The step after it may be open: it was interrupted, and released nothing.)
        if last.step < step != self.history.progress[phase, current.number].committed:
            return f"the checkpoint of step {step} is not the last one that the ledger knows of"
        return None

    def _line_at(self, place: int) -> StepLine:
        """Steps that may be replayed stay in the file: without checkpoints there may be millions."""
        return read(StepLine, self.ledger.entries[place].fields)

    def _step_id(self, phase: int, step: int) -> StepId:
        segments = self.history.segments_of(phase)
        if not segments:
            raise LedgerError(f"phase {phase} has no segment; begin one before its first step")
        return StepId(phase, segments[-1].number, step)

    def _budget(self, phase: int) -> float:
        """The budget of the phases up to this one, and of later ones that were begun before a rollback to here."""
        reached = max([phase, *(segment.phase for segment in self.history.segments)])
        return sum(plan.epsilon_budget for index, plan in self.history.plans.items() if index <= reached)

    def _affordable(self, phase: int, event: Event, wanted: int) -> int:
        """Steps that fit the budgets of all phases together and of this one: an earlier one's rest may not be spent."""
        history, own = self.history, self.history.plans[phase].epsilon_budget
        return min(
            affordable_steps(charged, event, wanted, budget, history.delta())
            for charged, budget in ((history.charged(), self._budget(phase)), (history.charged(phase), own))
        )
