"""Where a run continues: at the newest checkpoint that its ledger names, or nowhere.

The ledger is the authority. The pointer `checkpoints/latest` repeats what it says, and is rebuilt from it if it is
lost. An older checkpoint than the newest one is taken only if a new segment was declared, because that is a rollback.
"""

from __future__ import annotations

import contextlib
import json

from accounting.journal import Journal
from accounting.ledger import LedgerError
from train.checkpoint import CheckpointError, Entry, Loaded
from train.checkpoint_read import ledger_of
from train.ranks import spoken_for
from train.run_context import RunContext
from train.stop_rules import measured_before


def latest_checkpoint(run: RunContext) -> Loaded | None:
    """The last durable checkpoint, if it belongs to this ledger and the ledger was not cut behind it."""
    checkpoints, ranks = run.checkpoints, run.ranks
    ranks.on_main(lambda: recover(run))
    try:
        loaded = checkpoints.latest()
    except CheckpointError as damage:
        if run.new_segment is None:
            raise spoken_for(
                CheckpointError(
                    f"{damage}; restore it, or declare --new-segment 'why' to continue from the newest checkpoint that "
                    "is whole (all opened steps stay charged)"
                )
            ) from None
        loaded = checkpoints.fall_back()
        run.board.say(f"{damage}; continuing from {loaded.position.folder}, and all opened steps stay charged")

    def check() -> None:
        if loaded is not None:
            stored = ledger_of(loaded.manifest)
            if stored is None:
                raise CheckpointError(f"{loaded.position.folder} does not say which ledger it belongs to; restore it")
            length, head = stored
            run.writer.admit_checkpoint(loaded.position.phase, loaded.position.step, loaded.digest, length)
            _require_ledger(run.writer, length, head, loaded.position.folder)

    ranks.on_main(check)
    ranks.require_same("the last checkpoint (is the run directory shared?)", loaded.digest if loaded else None)
    return loaded


def recover(run: RunContext) -> None:
    """Pointer and folders as the ledger knows them. It names every checkpoint before the pointer does."""
    history, folder, best = run.writer.history, run.checkpoints.folder, run.config.run.keep_best
    for manifest in folder.glob("phase*-step*/manifest.json"):  # before any of them is retired
        with contextlib.suppress(OSError, ValueError, RecursionError):  # what is damaged vouches for nothing
            stored = ledger_of(json.loads(manifest.read_bytes()))
            if stored is not None:
                _require_ledger(run.writer, *stored, manifest.parent.name)

    def measured(entry: Entry) -> dict[str, float]:
        name = history.phase_names.get(entry.phase)
        if best is None or name is None:
            return {}
        found = measured_before(run.folder.public_log, name, entry.step, best)
        return {best: found[entry.step]} if entry.step in found else {}

    named = [Entry(mark.phase, mark.step, mark.digest) for mark in reversed(history.checkpoints)]
    reason = run.checkpoints.recover(named, measured)
    if reason is not None:
        run.board.say(f"{reason}; rebuilt from the checkpoints that the ledger names")


def _require_ledger(journal: Journal, length: int, head: str, checkpoint: str) -> None:
    entries = journal.ledger.entries
    if not 0 < length <= len(entries) or entries[length - 1].hash != head:
        raise LedgerError(
            f"the checkpoint {checkpoint} was written with another or a longer ledger; restore the ledger that "
            "belongs to it"
        )
