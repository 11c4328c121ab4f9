"""Modification times that say nothing about how long private steps took.

Files of a run outlive it, and are copied with their times: those of two checkpoints would reveal the pace of the steps
between them, which may depend on a single record that is slow to decode. So files get the time at which the run was
started, plus one second for each checkpoint since, so that backups that compare times still see that a file changed.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from murmuration.accounting.days import day_of


class PublicTimes:
    """One time for everything written until the next checkpoint; it counts checkpoints and reads no clock."""

    def __init__(self, started: int | None = None) -> None:
        self.started = int(time.time()) if started is None else started
        self.at = self.started

    @property
    def day(self) -> str:
        """The day of the start, in UTC."""
        return day_of(self.started)

    def advance(self) -> None:
        self.at += 1

    def stamp(self, *paths: Path) -> None:
        """Sets the time of these paths. A file system that refuses keeps its own times."""
        for path in paths:
            with contextlib.suppress(OSError):
                os.utime(path, (self.at, self.at), follow_symlinks=False)

    def stamp_all(self, folder: Path, but: tuple[str, ...] = ()) -> None:
        """Sets the time of a folder and everything in it, except for its entries named in `but`, which keep theirs."""
        for each in folder.iterdir():
            if each.name not in but:
                self.stamp(*each.rglob("*"), each)
        self.stamp(folder)
