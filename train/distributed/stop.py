"""Reasons to stop early, agreed between ranks so that nobody is left waiting in a collective.

Meeting before every micro-batch would make each wait for the slowest rank of that moment. So where micro-batches are
not collective operations, ranks meet once, after the last one: a rank that has a reason goes there at once and notifies
the others through the rendezvous store, so that they follow within seconds instead of finishing the step.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from murmuration.train.distributed.ranks import Ranks, Store, rendezvous_store

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Seconds between two looks into the store.
HEARING = 2.0

T = TypeVar("T")
_numbers = count()


class Stopped(Exception):
    """The run was asked to stop; the open step's partial sum is dropped and the run can be resumed."""


class StopRequest:
    """Set by a signal, a `stop` file in the run directory, the launcher's death, or records that cannot be read."""

    def __init__(self, stop_file: Path, after_minutes: float | None = None) -> None:
        self.reason: str | None = None
        # Not the wall clock, which may jump.
        self._deadline = time.monotonic() + 60 * after_minutes if after_minutes is not None else math.inf
        self._stop_file = stop_file
        self._parents = _ancestors()
        # Ranks make the same requests in the same order, so they all use the same key.
        self._key = f"murmuration/stop/{next(_numbers)}"
        self._listening = False
        self._over = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._wake: _Wake | None = None
        if threading.current_thread() is threading.main_thread():  # in Python only this thread can set handlers
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
            self._wake = _Wake(self._note)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        self._note(number)

    def _note(self, number: int) -> None:
        if number in SIGNALS:
            self.reason = signal.Signals(number).name

    def restore(self) -> None:
        """Restores the signal handlers, for programs that continue after training."""
        self.end_listening()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._wake is not None:
            self._wake.close()
            self._wake = None

    def ask(self, reason: str) -> None:
        """For requests from inside the program: this rank cannot continue."""
        self.reason = self.reason or reason

    def raised(self) -> str | None:
        if self.reason is None and self._stop_file.exists():
            self.reason = f"the file {self._stop_file.name}"
        if self.reason is None and time.monotonic() >= self._deadline:
            self.reason = "run.stop_after_minutes"
        # A launcher that dies leaves its ranks behind; training on unseen, they would keep the folder locked. Without a
        # launcher there is nothing to read.
        if self.reason is None and any(self._parents) and _ancestors() != self._parents:
            self.reason = "the launcher's death"
        return self.reason

    def until_asked(self, micro_batches: Iterable[T], ranks: Ranks, each: bool) -> Iterator[T]:
        """A step's micro-batches; raises Stopped on every rank if one of them has a reason. `each`: processing one is a
        collective operation, so all ranks must leave at the same point."""
        if not each:
            self._listen(ranks)
        for micro_batch in micro_batches:
            if each:
                self.check(ranks)
            elif self.raised() is not None:
                break
            ranks.pulse.beat()
            yield micro_batch
        if not each:
            self.check(ranks)

    def _listen(self, ranks: Ranks) -> None:
        store = rendezvous_store(ranks) if not self._listening else None
        self._listening = True
        if store is not None:
            threading.Thread(target=self.listen, args=(store,), name="stop", daemon=True).start()

    def end_listening(self) -> None:
        """Call this before the ranks exit: the store ends with the first of them."""
        self._over.set()

    def listen(self, store: Store, every: float = HEARING) -> None:
        """Waits until there is a reason: reports this rank's to the others, or takes over theirs."""
        while not self._over.wait(every):
            with contextlib.suppress(RuntimeError):  # the watchdog deals with a store that is gone
                if (reason := self.raised()) is not None:
                    store.set(self._key, reason)
                    return
                if store.check([self._key]):
                    self.ask(store.get(self._key).decode())
                    return

    def check(self, ranks: Ranks) -> None:
        """Raises Stopped on every rank as soon as one of them has a reason. All ranks call it at the same point."""
        reason = self.raised()
        if ranks.any(reason is not None):
            raise Stopped(next(each for each in ranks.gather(reason) if each is not None))


def _forget_pipe() -> None:
    """A forked child has its parent's pipe: what is sent to the child would stop the parent."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_pipe)


class _Wake:
    """Python runs signal handlers in the main thread, which may be waiting for a device or for a rank that died. The
    interpreter also writes each signal's number into a pipe; this thread reads it there."""

    def __init__(self, note: Callable[[int], None]) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._note = note
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                self._note(number)
        os.close(self._read)

    def close(self) -> None:
        current = signal.set_wakeup_fd(-1)
        with contextlib.suppress(ValueError, OSError):  # its previous owner may have closed it
            signal.set_wakeup_fd(self._before if current == self._write else current)
        os.close(self._write)


def _ancestors() -> tuple[int, int]:
    """The launcher's processes: torchrun's agent is our parent; `deepspeed` has a runner above its launcher."""
    parent = os.getppid()
    try:
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
        fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # gone meanwhile, or hidden from us
        command, fields = b"", []
    if b"deepspeed.launcher.launch" in command:
        return parent, int(fields[1])
    # Without a launcher the parent is a shell, and its end is no reason to stop (nohup).
    return (parent, 0) if "TORCHELASTIC_RUN_ID" in os.environ else (0, 0)
