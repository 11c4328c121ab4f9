"""The epsilon of a log line: of every step opened so far, without letting the ranks wait for it.

Composing tens of thousands of steps takes a second or two, in which no rank trains. So the epsilon of the next log line
is computed in a thread while the steps up to it run, on the assumption that each is charged like the last one. Where
that turns out wrong, it is computed when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from murmuration.accounting.epsilon.accountant import epsilon, merge
from murmuration.accounting.ledger.history import History
from murmuration.accounting.plan import Event


class Spent:
    """Called on the main rank, which holds the ledger."""

    def __init__(self, history: Callable[[], History], every: int) -> None:
        """`every`: how many steps lie between two log lines."""
        self._history, self._every = history, every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="epsilon")
        self._ahead: tuple[list[Event], Future[float]] | None = None

    def __call__(self) -> float:
        history = self._history()
        charged = history.charged()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == charged and ahead[1].exception() is None:
            found = ahead[1].result()
        else:
            found = history.epsilon()
        if (last := history.last_charge()) is not None:
            expected = merge([*charged, replace(last, count=history.charges_of_next(self._every))])
            self._ahead = (expected, self._thread.submit(epsilon, expected, history.delta()))
        return found
