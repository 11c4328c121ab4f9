"""Distinguishes a run directory from a copy of itself, because the two must not continue with the same keys.

The secret folder records which files on which device it belongs to. A copy has other inodes; a folder that was only
renamed keeps them. If a network file system gets a new number on another machine, that looks like a copy: it costs a
new segment and no privacy, but the run gets another id, so that a budget of its data set counts it twice. A snapshot
keeps everything, so it cannot be distinguished (a known deviation).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from murmuration.accounting.durable import flush, naming
from murmuration.accounting.strict_json import parse

if TYPE_CHECKING:
    from murmuration.accounting.ledger.journal import Journal

NAME = "identity.json"


def recognise(journal: Journal, secret: Path) -> str | None:
    """Notes in the ledger that this is a copy, and why. Call under the ledger's lock, before anything is derived.

    The ledger's line is durable before the identity file changes: after a kill between the two, the copy is noticed
    again.
    """
    changed = _why_copied(secret / NAME, _identity(journal.ledger.path, secret))
    if changed is None:
        return None  # and nothing is written: a kill in the middle would look like a copy
    # A ledger of one line without an identity file is a run that has just begun.
    begins = journal.ledger.length <= 1 and not (secret / NAME).exists()
    reason = None if begins else changed
    if reason is not None:
        journal.note_copied(reason)
    # In place, because the inode of the file that keeps the identity is a part of it.
    descriptor = os.open(secret / NAME, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        text = json.dumps(_identity(journal.ledger.path, secret)).encode()
        os.ftruncate(descriptor, 0)
        with naming(descriptor):
            os.write(descriptor, text)
        flush(descriptor)
    finally:
        os.close(descriptor)
    return reason


def _why_copied(memory: Path, found: dict[str, list[int]]) -> str | None:
    try:
        known = parse(memory.read_bytes())
    except FileNotFoundError:
        return f"{NAME} is missing from the secret folder, so it may be a copy"
    except (OSError, ValueError):
        return f"{NAME} in the secret folder cannot be read, so it may be a copy"
    if known == found:
        return None
    return "the ledger or its folders are not where they were when the run last ran, so this is a copy or was restored"


def _identity(ledger: Path, secret: Path) -> dict[str, list[int]]:
    places = {"ledger": ledger, "folder": ledger.parent, "secret": secret, "memory": secret / NAME}
    found = {}
    for name, path in places.items():
        if path.exists():
            # The file system's own identifier outlives a restart; where there is none (NFS), the device number is used.
            found[name] = [os.statvfs(path).f_fsid or path.stat().st_dev, path.stat().st_ino]
    return found
