"""The one lock on files, which keeps a second process away from a ledger, an index or a folder.

The kernel releases it when its holder closes the file or ends, however it ends; no file has to be removed for that.
"""

from __future__ import annotations


def try_lock(descriptor: int) -> bool:
    """Whether this open file or folder is ours alone from now on, until it is closed; False if somebody has it."""
    from filelock import lock_descriptor  # not above: a ledger is verified without a lock, and the import takes a while

    return lock_descriptor(descriptor, blocking=False)
