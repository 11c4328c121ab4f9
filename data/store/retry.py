"""Retries: how often, and after which pauses."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from murmuration.data.store.place import ShardError, UnreadableError

T = TypeVar("T")
_HOPELESS = 4


@dataclass(frozen=True)
class Patience:
    """Exponential back-off with jitter; the default gives up after about half a minute of pauses."""

    tries: int = 8
    first_pause: float = 0.2
    longest_pause: float = 20.0

    def pauses(self) -> Iterator[float]:
        """One pause fewer than tries. Jitter keeps a thousand ranks from asking one server at the same moment."""
        for attempt in range(self.tries - 1):
            whole = min(self.longest_pause, self.first_pause * 2**attempt)
            yield whole * random.uniform(0.5, 1.0)


def patiently(act: Callable[[], T], patience: Patience, cancelled: threading.Event | None = None) -> T:
    """The result of `act`, retried after OSError; raises the last OSError when patience ends or `cancelled` is set."""
    cancelled = cancelled or threading.Event()
    for pause in patience.pauses():
        try:
            return act()
        except OSError:
            if cancelled.wait(pause):
                raise
    return act()


def until_hopeless(results: Generator[T]) -> Iterator[T]:
    """The results; ShardError once several in a row are UnreadableErrors, each after its own retries.

    Otherwise, with a wrong base URL, thousands of shards would take half a minute each.
    """
    in_a_row: list[UnreadableError] = []
    with closing(results):
        for result in results:
            in_a_row = [*in_a_row, result] if isinstance(result, UnreadableError) else []
            if len(in_a_row) == _HOPELESS:
                raise ShardError(
                    f"{min(in_a_row, key=str)}; {_HOPELESS - 1} more shards could not be read either, so no others "
                    "were tried"
                )
            yield result
