"""How far a long job is: a bar on a terminal, a line every now and then in a log.

The rate counts from the first call, so that what an earlier run had already done does not flatter the estimate.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 24
_EVERY_SECONDS = {True: 0.2, False: 30.0}  # on a terminal, in a log


class Progress:
    """Call with (done, total), first with what is done before any work."""

    def __init__(self, what: str, unit: str, stream: TextIO | None = None) -> None:
        self._what, self._unit = what, unit
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._first: tuple[int, float] | None = None
        self._shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (done, now)
        ended = done >= total
        # A log gets no line of a job that is over before the first one is due.
        if now - self._shown < _EVERY_SECONDS[self._terminal] and not (ended and self._terminal):
            return
        self._shown = now
        if self._terminal:
            line, end = f"\r{self._bar(done, total)} {self._text(done, total, now)}\x1b[K", "\n" if ended else ""
        else:
            line, end = self._text(done, total, now), "\n"
        print(line, end=end, file=self._stream, flush=True)

    def _bar(self, done: int, total: int) -> str:
        full = _WIDTH * done // max(total, 1)
        return "[" + "#" * full + "." * (_WIDTH - full) + "]"

    def _text(self, done: int, total: int, now: float) -> str:
        assert self._first is not None
        rate = (done - self._first[0]) / max(now - self._first[1], 1e-9)
        text = f"{self._what}: {done}/{total} {self._unit}"
        if not rate:
            return text
        text += f", {rate:.3g} {self._unit}/s"
        return text if done >= total else f"{text}, {clock((total - done) / rate)} left"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
