"""The checkpoint that a run kept as its best, by the public metric that run.keep_best named."""

from __future__ import annotations

from murmuration.accounting.errors import RunError
from murmuration.accounting.ledger.history import History
from murmuration.train.storage.checkpoint import CheckpointError, Checkpoints, Keep, Loaded
from murmuration.train.storage.run_dir import RunDir


class NoBestError(RunError, ValueError):
    """No checkpoint of this run is its best one."""


def best_checkpoint(run_dir: RunDir) -> Loaded:
    history = History.read(run_dir.ledger)[0]
    if not history.choices:
        raise NoBestError("the run kept no best checkpoint, since run.keep_best was not set; take the last one")
    found = Keep(best=history.choices[-1]).best_of(Checkpoints.listed(run_dir.checkpoints))
    if not found:
        raise NoBestError(f"no checkpoint has a public metric {history.choices[-1]!r}; take the last one")
    entry = found[max(found)]
    if entry.manifest_sha256 not in {mark.digest for mark in history.checkpoints}:
        raise CheckpointError(f"the ledger does not know {entry.folder}; take the last one")
    return Loaded.open(run_dir.checkpoints / entry.folder, entry.manifest_sha256)
