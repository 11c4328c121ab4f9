"""What a phase writes into the ledger before its first step: its plan or its want of one, and its segment of keys."""

from __future__ import annotations

from typing import Any

from accounting.accountant import describe
from accounting.facts import Segment
from accounting.keys import Purpose, RunKey
from accounting.ledger import LedgerError
from accounting.plan import PrivacyPlan
from train.recipe import ReadyPhase, make_plan
from train.run_context import RunContext
from train.siblings import register

PUBLIC_SEGMENT = "public"


def declare(run: RunContext, phase: ReadyPhase) -> PrivacyPlan | None:
    """Into the ledger, frozen. Plans of later phases are declared before the first step: they depend on no output."""
    privacy = phase.settings.privacy
    if phase.start is not None:
        for origin in phase.start.origins:
            if run.writer.declare_origin(origin):
                run.board.say(f"{phase.name}  {origin.deviation()}")
    if privacy is None:
        run.writer.declare_nonprivate(phase.number, phase.name, phase.settings.data.public, phase.index.manifest_digest)
        return None
    known = run.writer.history.plans.get(phase.number)
    plan = make_plan(phase.settings, privacy, phase.index.records, f"phases.{phase.number}", known)
    run.writer.declare_plan(phase.number, phase.name, plan, describe("pld"))
    warning = register(
        phase.index.folder, run.writer.ledger.entries[0].hash, phase.name, run.name, plan.epsilon_budget, plan.delta
    )  # fmt: skip
    if warning is not None:
        run.board.say(warning)
    return plan


def segment_of(run: RunContext, phase: ReadyPhase, done: int) -> Segment:
    """The segment whose keys the next step uses; a new one wherever the old keys must not be used again."""
    contents = phase.contents()
    digest = run.config.digest(phase.number, contents)
    reason = run.writer.new_segment_reason(phase.number, done, digest)
    known = run.writer.history.segments_of(phase.number)
    if known and known[-1].manifest_digest != contents["data"]:
        raise LedgerError(
            f"the records of phase {phase.name!r} changed since the run began; "
            "restore them or start a new run directory"
        )
    if reason is None:
        run.writer.resumed(phase.number, done)
        return known[-1]
    if known and run.new_segment is None and reason == "the config changed":
        raise LedgerError(
            f"phase {phase.name!r} was configured differently when it began; restore the config, or declare the "
            "change with --new-segment 'why' (all opened steps stay charged)"
        )
    salt = "debug" if run.key.debug else None
    return run.writer.begin_segment(phase.number, digest, contents["data"], done, run.new_segment or reason, salt)


def derive_key(key: RunKey, phase: int, segment: Segment | None, purpose: Purpose) -> bytes:
    return key.derive(purpose, phase, segment.key_name if segment else PUBLIC_SEGMENT)


def header(run: RunContext, phase: ReadyPhase) -> dict[str, Any]:
    """What ties a checkpoint to its run: ledger head and length, plan, data. Never a key."""
    ledger = run.writer.ledger
    plan = run.writer.history.plans.get(phase.number)
    return {
        "run": run.name,
        "ledger": {"length": ledger.length, "head": ledger.head},
        "plan": plan.as_dict() if plan else None,
        "manifest_digest": phase.index.manifest_digest,
        "objective": phase.settings.objective,
    }
