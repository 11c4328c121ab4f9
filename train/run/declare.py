"""What a phase writes into the ledger before its first step: its plan, or that it has none, and its key segment."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from murmuration.accounting.ledger.facts import Segment
from murmuration.accounting.ledger.lines import PublicUse, Word
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.index.contents import pins_contents
from murmuration.data.index.keyed_digest import ledger_digests
from murmuration.train.config.data import CheckpointData, ShardData
from murmuration.train.recipe.open_data import hosts_of
from murmuration.train.recipe.pixels import as_json
from murmuration.train.recipe.ready_phase import ReadyPhase, plan_of_phase
from murmuration.train.run.context import RunContext
from murmuration.train.storage.model_note import described
from murmuration.train.storage.sibling_runs import RunLog


def declare(run: RunContext, phase: ReadyPhase) -> PrivacyPlan | None:
    """On the main rank: declares the phase in the ledger and returns its plan; None without one."""
    start = phase.start
    contents, asked = run.contents(phase), run.config.run
    log, public = RunLog.of(phase.index, asked.registry), public_uses(phase)
    without_noise, origins = (start.without_noise, start.origins) if start is not None else ((), ())
    if not phase.private:
        run.declare_start(phase.name, without_noise, origins)
        if not phase.settings.data.public:
            run.enter_log(log, phase.name, None, contents["data"])
        run.writer.declare_nonprivate(phase.number, phase.name, phase.settings.data.public, contents["data"])
        for use, digest in public.items():
            run.writer.declare_public(phase.number, use, digest)
        return None
    words: dict[Word, bool] = {
        "private_curves": asked.private_curves or run.folder.has_private_curves(),
        "keep_key": asked.keep_key,
        "witness": asked.witness is not None,
    }
    return run.declare(
        phase.number, phase.name,
        lambda known: plan_of_phase(
            phase.settings, phase.n, phase.where, asked.noise, known, contents.get("units", "")
        ),
        log, contents["data"], without_noise=without_noise, origins=origins, public=public,
        stores=hosts_of(phase.index), words=[word for word, holds in words.items() if holds],
    )  # fmt: skip


def public_uses(phase: ReadyPhase) -> dict[PublicUse, str]:
    """What the config says is public, apart from the phase's own records: digests."""
    found: dict[PublicUse, str] = {use: ledger_digests(index, public=True)[0] for use, _, index in phase.public_records}
    data = phase.settings.data
    if phase.start is not None and phase.start.foreign and isinstance(data, CheckpointData) and data.public:
        found["weights"] = phase.start.digest
    if isinstance(data, ShardData) and data.classes_public and phase.label_list is not None:
        found["classes"] = phase.label_list.digest
    weights = phase.shape.head.weights
    if weights is not None and phase.settings.objective == "classify" and phase.settings.privacy is not None:
        found["class-weights"] = hashlib.sha256(json.dumps(weights).encode()).hexdigest()
    return found


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
    settings = phase.settings
    told |= described(
        run.config.model, phase.text, settings.tokenizer, run.folder.root, phase.label_list, settings.view
    )  # fmt: skip
    return told | as_json(phase.pixels)
