"""What a phase writes into the ledger before its first step: its plan, or that it has none, and its key segment."""

from __future__ import annotations

from typing import Any

from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.ledger.facts import Segment
from murmuration.accounting.ledger.lines import PublicUse, Word
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.index.contents import pins_contents
from murmuration.data.index.keyed_digest import ledger_digests
from murmuration.data.store.place import RecordIndex
from murmuration.train.config.data import CheckpointData, ShardData
from murmuration.train.config.privacy import Privacy
from murmuration.train.recipe.open_data import hosts_of
from murmuration.train.recipe.pixels import as_json
from murmuration.train.recipe.ready_phase import ReadyPhase, plan_of_phase
from murmuration.train.run.context import RunContext
from murmuration.train.storage.model_note import described
from murmuration.train.storage.sibling_runs import RunLog


def declare(run: RunContext, phase: ReadyPhase) -> PrivacyPlan | None:
    """Declares the phase in the ledger and returns its plan, which is frozen there. Plans of later phases are declared
    before the first step, too: they depend on no output."""
    privacy = phase.settings.privacy
    records = run.contents(phase)["data"]
    _declare_origins(run, phase)
    log = RunLog.of(phase.index, run.config.run.registry)
    if privacy is None:
        if not phase.settings.data.public:
            run.enter_log(log, phase.name, None, records)
        run.writer.declare_nonprivate(phase.number, phase.name, phase.settings.data.public, records)
        declare_public_uses(run, phase)
        return None
    plan = _declare_plan(run, phase, privacy)
    declare_public_uses(run, phase)
    for host in hosts_of(phase.index):
        run.writer.declare_store(phase.number, host)
    asked = run.config.run
    words: dict[Word, bool] = {
        "private_curves": asked.private_curves or run.folder.has_private_curves(),
        "keep_key": asked.keep_key,
        "witness": asked.witness is not None,
    }
    for word, holds in words.items():
        if holds:
            run.writer.declare_word(word)
    run.enter_log(log, phase.name, plan, records)
    return plan


def _declare_origins(run: RunContext, phase: ReadyPhase) -> None:
    """The runs whose weights the phase begins with, and what these had used without noise."""
    if phase.start is None:
        return
    run.writer.declare_earlier(phase.start.without_noise)
    for origin in phase.start.origins:
        if run.writer.declare_origin(origin):
            run.board.say(f"{phase.name}  {origin.deviation()}")


def _declare_plan(run: RunContext, phase: ReadyPhase, privacy: Privacy) -> PrivacyPlan:
    known = run.writer.history.plans.get(phase.number)
    where, noise = f"phases.{phase.number}", run.config.run.noise
    units = run.contents(phase).get("units", "")
    plan = plan_of_phase(phase.settings, privacy, phase.n, where, known, noise, units)
    run.writer.declare_plan(phase.number, phase.name, plan, describe("pld"))
    return plan


def declare_public_uses(run: RunContext, phase: ReadyPhase) -> None:
    """Declares what the config says is public, apart from the phase's own records."""
    records: dict[PublicUse, RecordIndex | None] = {
        "evaluation": phase.held_out,
        "monitor": phase.monitored,
        "mixing": phase.mixed,
    }
    found: dict[PublicUse, str] = {
        use: ledger_digests(index, public=True)[0] for use, index in records.items() if index is not None
    }
    data = phase.settings.data
    if phase.start is not None and phase.start.foreign and isinstance(data, CheckpointData) and data.public:
        found["weights"] = phase.start.digest
    if isinstance(data, ShardData) and data.classes_public and phase.label_list is not None:
        found["classes"] = phase.label_list.digest
    for use, digest in found.items():
        run.writer.declare_public(phase.number, use, digest)


def segment_of(run: RunContext, phase: ReadyPhase, done: int) -> Segment:
    """The segment whose keys the next step uses."""
    contents = run.contents(phase)
    digest = run.config.digest(phase.number, contents)
    never_again = None if pins_contents(phase.index) else "the index cannot tell whether their records changed since"
    if never_again is not None:
        run.board.say(
            f"{phase.name}  the index compares records by size alone, so steps that a kill interrupts are charged "
            "twice; before another run begins, index images with --contents"
        )
    return run.segment(phase.number, phase.name, digest, contents["data"], done, never_again)


def header(run: RunContext, phase: ReadyPhase) -> dict[str, Any]:
    told = run.header(phase.number, run.contents(phase)["data"], phase.settings.objective)
    told |= described(run.config.model, phase.text, phase.settings.tokenizer, run.folder.root, phase.label_list)
    return told | as_json(phase.pixels)
