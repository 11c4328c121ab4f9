"""The process that reads records and parses untrusted bytes, so that no file can take the trainer down with it.

It is started by data/decode/pool.py, has only its own socket and one block of shared memory, and is
confined: bounded address space, no core dumps (they would contain private pixels), no output. Time is limited by
kernel timers with their default action, death, because a decoder that loops in C never returns to Python. They run
while a record's bytes are parsed and never while they are read: a slow disk is no fault of a record.
"""

from __future__ import annotations

import json
import mmap
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from PIL import Image

from murmuration.data.decode.decode import BadRecord
from murmuration.data.decode.record import RecordMaker
from murmuration.data.store.stored import LocalFiles, Stored

READY = b"ready"
MADE, LEFT_OUT, UNREAD, BAD, NO_MEMORY = "made", "left out", "unread", "bad", "memory"
HEAD = 64  # bytes of the shared memory before the rows
Make = Callable[[Mapping[str, bytes], int, int, bytes, np.void], bool]
"""As `RecordMaker.make`."""


@dataclass(frozen=True)
class Setup:
    maker: RecordMaker
    rows: int
    address_bytes: int


@dataclass(frozen=True)
class Job:
    """Records to make, in the rows of the shared memory. The members of one without a place come in a message of their
    own when its turn comes, so that one record's bytes at a time are here."""

    records: list[tuple[int, Stored | None]]
    step: int
    key: bytes
    cpu_seconds: float
    wall_seconds: float


def serve(adapt: Callable[[RecordMaker], Make] | None = None) -> None:
    """Answer until the parent closes the socket or dies; `adapt` puts something else in the maker's place."""
    # Schedulers signal the whole job to ask for an orderly stop; the trainer arranges that.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    # Whether a signal is ignored or blocked is inherited, and these two must kill.
    for timer in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(timer, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
    control = Connection(int(sys.argv[1]))
    # Pickled by the trainer, which alone writes here. Answers are JSON: a picture may have taken this process over.
    setup: Setup = control.recv()
    row = setup.maker.row
    shared = mmap.mmap(int(sys.argv[2]), HEAD + setup.rows * row.itemsize)
    rows = np.frombuffer(shared, row, offset=HEAD)
    at = np.frombuffer(shared, np.uint32, 1)
    make = setup.maker.make if adapt is None else adapt(setup.maker)
    files = LocalFiles()
    Image.preinit()  # loads parsers, which must not count towards the first record's time
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (setup.address_bytes, setup.address_bytes))
    control.send_bytes(READY)
    while True:
        try:
            job: Job = control.recv()
            told: list[tuple[str, str]] = []
            for place, (record, stored) in enumerate(job.records):
                at[0] = place  # the record that is to blame if this process dies
                members = control.recv() if stored is None else stored.read(files)
                told.append((UNREAD, "") if members is None else _made(members, record, job, make, rows[place]))
        except EOFError:
            return
        control.send_bytes(json.dumps(told).encode())


def _made(members: Mapping[str, bytes], record: int, job: Job, make: Make, row: np.void) -> tuple[str, str]:
    try:
        # Both kill this process: PROF counts its CPU time, REAL the time that passes.
        signal.setitimer(signal.ITIMER_PROF, job.cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, job.wall_seconds)
        return (MADE if make(members, record, job.step, job.key, row) else LEFT_OUT), ""
    except BadRecord as error:
        # Decoders report a lack of memory in their own words; memory left over from earlier images must not decide.
        return (NO_MEMORY, "") if _cramped() else (BAD, str(error)[:500])
    except MemoryError:
        return NO_MEMORY, ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _cramped() -> bool:
    """Whether less than half of the address space is left; no image that is decoded at all can need more than half."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return True
    return limit != resource.RLIM_INFINITY and used > limit // 2
