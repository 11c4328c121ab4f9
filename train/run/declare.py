"""What a phase writes into the ledger before its first step: its plan or its want of one, and its segment of keys."""

from __future__ import annotations

from typing import Any

from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.ledger.facts import Segment
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.recipe.ready_phase import ReadyPhase, make_plan
from murmuration.train.run.context import RunContext
from murmuration.train.storage.sibling_runs import register


def declare(run: RunContext, phase: ReadyPhase) -> PrivacyPlan | None:
    """Into the ledger, frozen. Plans of later phases are declared before the first step: they depend on no output."""
    privacy = phase.settings.privacy
    records = run.contents(phase)["data"]
    if phase.start is not None:
        for origin in phase.start.origins:
            if run.writer.declare_origin(origin):
                run.board.say(f"{phase.name}  {origin.deviation()}")
    if privacy is None:
        run.writer.declare_nonprivate(phase.number, phase.name, phase.settings.data.public, records)
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
    """The segment whose keys the next step uses."""
    contents = run.contents(phase)
    digest = run.config.digest(phase.number, contents)
    return run.segment(phase.number, phase.name, digest, contents["data"], done)


def header(run: RunContext, phase: ReadyPhase) -> dict[str, Any]:
    return run.header(phase.number, run.contents(phase)["data"], phase.settings.objective)
