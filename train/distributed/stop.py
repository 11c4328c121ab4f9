"""Reasons to stop early, agreed between ranks so that nobody is left waiting in a collective."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import types
from pathlib import Path
from typing import Any

from murmuration.train.distributed.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(Exception):
    """The run was asked to stop; the open step's partial sum is dropped and the run can be resumed."""


class StopRequest:
    """Set by a signal, a `stop` file in the run directory, the launcher's death, or records that cannot be read."""

    def __init__(self, stop_file: Path, after_minutes: float | None = None) -> None:
        self.reason: str | None = None
        # Never by the clock on the wall, which may jump.
        self._deadline = time.monotonic() + 60 * after_minutes if after_minutes is not None else math.inf
        self._stop_file = stop_file
        self._parents = _ancestors()
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread handle signals
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        self.reason = signal.Signals(number).name

    def restore(self) -> None:
        """Signals do again what they did before: for programs that live on after a training."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def ask(self, reason: str) -> None:
        """From within: this rank cannot go on."""
        self.reason = self.reason or reason

    def raised(self) -> str | None:
        if self.reason is None and self._stop_file.exists():
            self.reason = f"the file {self._stop_file.name}"
        if self.reason is None and time.monotonic() >= self._deadline:
            self.reason = "run.stop_after_minutes"
        if self.reason is None and _ancestors() != self._parents:
            # A launcher that dies leaves its ranks behind; training on unseen would keep the run directory locked.
            self.reason = "the launcher's death"
        return self.reason

    def check(self, ranks: Ranks) -> None:
        """Raises Stopped on every rank as soon as one of them has a reason. Call at micro-batch boundaries."""
        reason = self.raised()
        if ranks.any(reason is not None):
            raise Stopped(next(each for each in ranks.gather(reason) if each is not None))


def _ancestors() -> tuple[int, int]:
    """The launcher's processes: torchrun's agent is our parent; `deepspeed` has a runner above its launcher."""
    parent = os.getppid()
    try:
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
        fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # gone while we looked, or hidden from us
        command, fields = b"", []
    if b"deepspeed.launcher.launch" in command:
        return parent, int(fields[1])
    # Without a launcher the parent is a shell, whose end is no reason to stop (nohup).
    return (parent, 0) if "TORCHELASTIC_RUN_ID" in os.environ else (0, 0)
