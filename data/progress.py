"""Progress of a long job: tqdm's bar on a terminal, an occasional line in a log.

The rate counts from the first call, so that work done by an earlier run does not flatter the estimate.
"""

from __future__ import annotations

import sys
import time
from shutil import get_terminal_size
from typing import TextIO

from tqdm import tqdm

_DRAWN_EVERY, _LINE_EVERY = 0.2, 30.0  # seconds


class _Bar(tqdm):
    monitor_interval = 0  # no monitor thread: a bar that is updated often needs none


class Progress:
    """Call with (done, total); the first call gives what was done before any work."""

    def __init__(self, what: str, unit: str, stream: TextIO | None = None) -> None:
        self._what, self._unit = what, f" {unit}"
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._bar: tqdm | None = None
        self._first: tuple[int, float] | None = None
        self._shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        if self._terminal:
            self._draw(done, total)
        else:
            self._tell(done, total)

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            columns, rows = get_terminal_size()  # tqdm draws nothing on a terminal that reports no size
            self._bar = _Bar(
                desc=self._what, unit=self._unit, initial=done, total=total, file=self._stream,
                mininterval=_DRAWN_EVERY, miniters=1, smoothing=0, ncols=columns, nrows=rows,
            )  # fmt: skip
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()

    def _tell(self, done: int, total: int) -> None:
        """Printed by hand: tqdm overwrites its line, and a log would keep every version of it."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._shown = (done, now), now
        if now - self._shown < _LINE_EVERY:  # a job that ends before the first line is due logs none
            return
        self._shown = now
        before, began = self._first
        line = tqdm.format_meter(
            done, total, now - began, prefix=f"{self._what}: ", unit=self._unit, initial=before,
            bar_format="{desc}{n_fmt}/{total_fmt}{unit}, {rate_noinv:.3g}{unit}/s, {remaining} left",
        )  # fmt: skip
        print(line, file=self._stream, flush=True)
