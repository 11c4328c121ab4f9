"""The signs of progress that a watchdog looks for; who trains by a program of his own has none."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol

# Seconds of the processor between two looks: a start on a machine that is shared by many gets few, a wait gets none.
LEAST_COMPUTED = 0.005


class Pulse:
    """The progress of the main thread. All ranks have equally many micro-batches and exchanges, so one with fewer beats
    than the others holds them up."""

    def __init__(self) -> None:
        self.beats = 0
        self.since = time.monotonic()
        self.exchanging = False
        self.preparing = False
        """Set while a phase's model, engine and self-test are made, with few exchanges: there, computing is progress.
        Later it is none, since a thread that waits for a device that hangs may compute without end."""
        self.computed = 0
        """How often the main thread was found to have computed while it prepared."""
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._spent = 0.0

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        self.beat()
        self.exchanging = True
        try:
            yield
        finally:
            self.exchanging = False
        self.beat()

    def beat(self) -> None:
        self.beats += 1
        self.since = time.monotonic()

    def look(self) -> None:
        """Notes whether the main thread has computed since the last look. An exchange is left out: it may spin."""
        spent, before = time.clock_gettime(self._clock), self._spent
        self._spent = spent
        if self.preparing and not self.exchanging and spent - before >= LEAST_COMPUTED:
            self.computed += 1
            self.since = time.monotonic()


class Store(Protocol):
    """The part of torch's rendezvous store that the watchdog needs."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...
