"""The file lock that keeps a second process away from a ledger, an index or a folder.

The kernel releases it when its holder closes the file or ends, however it ends; there is no lock file to remove.
"""

from __future__ import annotations


def try_lock(descriptor: int) -> bool:
    """Locks this open file or folder until it is closed, and returns True; False if another process has the lock."""
    from filelock import lock_descriptor  # not above: a ledger is verified without a lock, and the import takes a while

    return lock_descriptor(descriptor, blocking=False)
