"""How often, and after which pauses, something that may go better next time is tried again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """Exponential back-off with jitter; the default gives up after about half a minute of pauses."""

    tries: int = 8
    first_pause: float = 0.2
    longest_pause: float = 20.0

    def pauses(self) -> Iterator[float]:
        """One fewer than tries. Jitter keeps a thousand ranks from knocking at one server at the same moment."""
        for attempt in range(self.tries - 1):
            whole = min(self.longest_pause, self.first_pause * 2**attempt)
            yield whole * random.uniform(0.5, 1.0)


def patiently(act: Callable[[], T], patience: Patience, cancelled: threading.Event | None = None) -> T:
    """What `act` returns, tried again after OSError; the last OSError when patience ends or `cancelled` is set."""
    cancelled = cancelled or threading.Event()
    for pause in patience.pauses():
        try:
            return act()
        except OSError:
            if cancelled.wait(pause):
                raise
    return act()
