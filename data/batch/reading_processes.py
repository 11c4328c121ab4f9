"""Processes in which a program's own function reads records, as the workers of a DataLoader do.

They are forked: a dataset need not be picklable, and what it has loaded is shared. What they read comes back through
memory that they have in common with the trainer. Each ends with the trainer, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from murmuration.data.store.place import UnreadableError

MOST = 16
"""Records per message: of a message's fixed cost, a record bears a part."""
Take = Callable[[int, Mapping[str, Tensor]], None]
Told = list[int | str]
"""Of each record, how many rows were read, or why it cannot be used."""
ReadEach = Callable[[Sequence[int], bytes, int, Take], Told]
"""Reads records under the key of a step, and hands over the rows of each that can be used, with its place among the
records."""
_WHEN_PARENT_DIES = 1  # PR_SET_PDEATHSIG of prctl


class ReadingProcesses:
    """`read` may be called by several threads. `like`: a row of each input; `rows`: how many a record has at most."""

    def __init__(self, each: ReadEach, like: Mapping[str, Tensor], rows: int, count: int) -> None:
        self._rows = rows
        self._all = [_Process(each, like, rows) for _ in range(count)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._all:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="records")

    def read(self, records: Sequence[int], key: bytes, step: int, take: Take) -> Told:
        parts = [slice(first, first + MOST) for first in range(0, len(records), MOST)]
        return list(chain.from_iterable(self._threads.map(partial(self._part, records, key, step, take), parts)))

    def _part(self, records: Sequence[int], key: bytes, step: int, take: Take, part: slice) -> Told:
        process = self._idle.get()
        try:
            told = process.ask(records[part], key, step)
            for place, found in enumerate(told):
                if not isinstance(found, str):
                    first = place * self._rows
                    take(part.start + place, {name: x[first : first + found] for name, x in process.rows.items()})
            return told
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """At once: threads that wait for records get an error."""
        for process in self._all:
            process.end()
        self._threads.shutdown(cancel_futures=True)


class _Process:
    """For use by one thread at a time, but for its end."""

    def __init__(self, each: ReadEach, like: Mapping[str, Tensor], of_record: int) -> None:
        self.rows = {name: _shared(MOST * of_record, row) for name, row in like.items()}
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        # Not multiprocessing, which asks its processes to end by SIGTERM and waits for them: a scheduler sends that to
        # the whole job, and then the trainer needs its records.
        self._number = os.fork()
        if self._number == 0:
            with contextlib.suppress(BaseException):  # a traceback would show a record on the console
                ours.close()
                _serve(each, self.rows, of_record, Connection(theirs.detach()), parent)
            os._exit(1)
        theirs.close()
        self._control = Connection(ours.detach())
        self._exit: int | None = None
        self._ending = threading.Lock()

    def ask(self, records: Sequence[int], key: bytes, step: int) -> Told:
        try:
            self._control.send((records, key, step))
            return json.loads(self._control.recv_bytes())  # a record may have taken the process over
        except (EOFError, OSError):
            # By which all ranks leave the step and save. Which record it was at is not said: it was drawn.
            raise UnreadableError(
                f"a process that reads records ended (exit code {self._ended()}): the machine may be out of memory, or "
                "what reads a record crashed; resume with fewer workers, or with workers=0 to see it"
            ) from None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._exit is None:
                os.kill(self._number, signal.SIGKILL)
        self._ended()

    def _ended(self) -> int:
        with self._ending:
            if self._exit is None:
                try:
                    self._exit = os.waitstatus_to_exitcode(os.waitpid(self._number, 0)[1])
                except ChildProcessError:  # the program waits for all of its processes
                    self._exit = 255
            return self._exit


def _shared(count: int, row: Tensor) -> Tensor:
    """[count, *shape of the row]: of this process and those forked from it, and not of /dev/shm, which is small in
    containers."""
    shape = (count, *row.shape[1:])
    if not math.prod(shape):
        return torch.empty(shape, dtype=row.dtype)
    memory = mmap.mmap(-1, math.prod(shape) * row.element_size())
    return torch.frombuffer(memory, dtype=row.dtype).view(shape)


def _serve(
    each: ReadEach, rows: Mapping[str, Tensor], of_record: int, control: Connection, parent: int
) -> None:  # fmt: skip
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_WHEN_PARENT_DIES, signal.SIGKILL)
    torch.set_num_threads(1)

    def take(place: int, found: Mapping[str, Tensor]) -> None:
        for name, tensor in found.items():
            rows[name].narrow(0, place * of_record, len(tensor)).copy_(tensor)

    while os.getppid() == parent:
        records, key, step = control.recv()
        control.send_bytes(json.dumps(each(records, key, step, take)).encode())
