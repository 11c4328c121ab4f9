"""Modification times that say nothing about how long private steps took.

Files of a run outlive it, and are copied with their times: those of two checkpoints would tell the pace of the steps
between them, which one record that is slow to decode decides. So they get the time at which the run was started, and
one second more for each checkpoint since, so that backups which look at times still see that a file changed.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


class PublicTimes:
    """One time for all that is written until the next checkpoint; a count of checkpoints, and no clock."""

    def __init__(self, started: int | None = None) -> None:
        self.started = int(time.time()) if started is None else started
        self.at = self.started

    @property
    def day(self) -> str:
        """Of the start, in UTC."""
        return time.strftime("%Y-%m-%d", time.gmtime(self.started))

    def advance(self) -> None:
        self.at += 1

    def stamp(self, *paths: Path) -> None:
        """A file system that refuses has times of its own."""
        for path in paths:
            with contextlib.suppress(OSError):
                os.utime(path, (self.at, self.at), follow_symlinks=False)

    def stamp_all(self, folder: Path, but: tuple[str, ...] = ()) -> None:
        """A folder with all that is in it, except for entries of these names, which keep the times that they have."""
        for each in folder.iterdir():
            if each.name not in but:
                self.stamp(*each.rglob("*"), each)
        self.stamp(folder)
