"""Records made in separate processes: a file that crashes or hangs its decoder costs one record, not the run.

A process reads, decodes and crops up to MOST records per message, into memory that it shares with the trainer: of a
message's fixed cost, a record bears a part.

The verdict "bad" must not depend on chance, because it decides what enters a private sum. If a process dies, the
record that it was at is tried once more, in a fresh process that handles nothing else, with ten times the time; only a
record that fails there too is bad. What the dead process had made of the other records is dropped, and they are made
again without it. Time means CPU time of that process, which a busy machine does not use up. Where the machine itself
is to blame (the process was killed from outside, or a known picture does not decode either), the run stops.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from PIL import Image

from murmuration.data.decode.decode import BadRecord
from murmuration.data.decode.record import DataSpec, RecordMaker
from murmuration.data.decode.worker import BAD, HEAD, MADE, NO_MEMORY, READY, UNREAD, Job, Setup
from murmuration.data.store.place import UnreadableError
from murmuration.data.store.stored import Stored

# The trainer's end of one decoding process: starts it, hands it jobs, takes rows or learns how it died.

MOST = 16
"""Records per message, unless they are large."""
# Not resolved: in a checkout `murmuration/data` is a link to `data`, and the package lies beside it.
_ROOT = str(Path(__file__).absolute().parents[3])
_START_SECONDS = 120.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "",
    # Freed memory is kept for the next picture: the kernel would clear each page again, a tenth of the decoding.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
# How much later than the process's own timers the parent acts: by then only a stopped process is still alive.
_GRACE = 1.5


@dataclass(frozen=True)
class Wanted:
    """A record, and where it lies on this machine; `read` has its members where a process cannot read it itself."""

    record: int
    stored: Stored | None
    read: Callable[[], dict[str, bytes]]


class ProcessDied(Exception):
    """`signal` is the signal that killed the process, or 0 if it exited by itself; `place` is that of the record in
    its job that it was at."""

    def __init__(self, code: int | None, place: int = 0) -> None:
        self.signal = -code if code is not None and code < 0 else 0
        self.place = place
        try:
            super().__init__(signal.Signals(self.signal).name if self.signal else f"exit code {code}")
        except ValueError:
            super().__init__(f"signal {self.signal}")


class DecodeProcess:
    """For use by one thread at a time. Rows come through memory that both ends map, never through the socket.

    That memory holds what is made of one job, which the parent copies to where it belongs. A process that could write
    into a whole micro-batch would save that copy, which costs a few thousandths of the decoding; but a file that
    takes its decoder over could then change records that were made elsewhere or are done.
    """

    def __init__(self, setup: Setup, told: bytes, program: str) -> None:
        self.made = 0
        module, _, function = program.partition(":")
        code = f"import sys; sys.path[:0] = {[_ROOT, *sys.path]!r}; from {module} import {function}; {function}()"
        ours, theirs = socket.socketpair()
        row = setup.maker.row
        size = HEAD + setup.rows * row.itemsize
        # A file without a name, so that nothing is left behind if either process is killed.
        if hasattr(os, "memfd_create"):
            shared = os.memfd_create("pixels")
        else:
            with tempfile.TemporaryFile() as file:
                shared = os.dup(file.fileno())
        os.ftruncate(shared, size)
        try:
            mapped = mmap.mmap(shared, size)
            self.rows = np.frombuffer(mapped, row, offset=HEAD)
            self._at = np.frombuffer(mapped, np.uint32, 1)
            # Not multiprocessing: forking a process with torch's threads may deadlock, and its spawning runs the
            # main script again. Popen executes a new interpreter, which inherits only these two descriptors.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), str(shared)],
                pass_fds=(theirs.fileno(), shared),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(shared)
        self._ours, self._patience = ours, 0.0
        self._control = Connection(os.dup(ours.fileno()))
        if self._ask([told], _START_SECONDS) != READY:
            raise ProcessDied(self._ended())

    @property
    def pid(self) -> int:
        return self._process.pid

    def make(self, wanted: Sequence[Wanted], job: Job) -> list[tuple[str, str]]:
        """What became of each record, with the reason; `rows` holds those that are MADE. Raises ProcessDied, after
        which this object is of no more use."""
        self.made += len(wanted)
        self._at[0] = 0
        members = (pickle.dumps(each.read()) for each in wanted if each.stored is None)
        told = self._ask(chain([pickle.dumps(job)], members), job.wall_seconds * _GRACE)
        return [(verdict, reason) for verdict, reason in json.loads(told)]

    def _ask(self, messages: Iterable[bytes], seconds: float) -> bytes:
        try:
            self._wait_at_most(seconds)
            for message in messages:
                self._control.send_bytes(message)
            return self._answer()
        except BlockingIOError:
            self._process.kill()
            self._process.wait()
            raise ProcessDied(-signal.SIGALRM, self._place) from None
        except (EOFError, OSError):
            raise ProcessDied(self._ended(), self._place) from None

    def _answer(self) -> bytes:
        """Waits as long as the process gets on with its records."""
        while True:
            before = self._place
            try:
                return self._control.recv_bytes()
            except BlockingIOError:
                if self._place == before:
                    raise

    @property
    def _place(self) -> int:
        return int(self._at[0]) % len(self.rows)

    def _wait_at_most(self, seconds: float) -> None:
        """Set a time-out on the socket itself: polling before each answer would cost a tenth of a decode."""
        if seconds != self._patience:
            limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._ours.setsockopt(socket.SOL_SOCKET, direction, limit)
            self._patience = seconds

    def _ended(self) -> int | None:
        """The exit code of a process whose socket is already closed."""
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()
        self._ours.close()


_OUTSIDE_TRIES = 3  # tries that end by a signal no decoder sends itself


@dataclass(frozen=True)
class Limits:
    """What one record may use. These are constants, not options, because they decide which records are bad."""

    cpu_seconds: float = 10.0  # for each view; the largest images that are decoded at all take about a second
    wall_seconds: float = 120.0
    patience: float = 10.0  # the factor by which both grow for the second try, alone in its process
    address_bytes: int = 4 << 30
    records_per_process: int = 50_000  # then the process is replaced, so that memory leaks of decoders cannot add up


LIMITS = Limits()


class DecoderError(UnreadableError):
    """Decoding cannot continue on this machine. The run stops: no record is to blame."""


Verdict = BadRecord | bool
"""Of one record: whether it was made, or is of a class that is left out; or why it is bad."""


class DecodePool:
    """`make` from any number of threads; up to `processes` processes, started when needed. `key_of` is that of a
    step. `most`: records per message, for which each process has memory."""

    def __init__(
        self,
        maker: RecordMaker,
        processes: int,
        key_of: Callable[[int], bytes] = lambda _step: b"",
        limits: Limits = LIMITS,
        program: str = "murmuration.data.decode.worker:serve",
        most: int = MOST,
    ) -> None:
        if processes < 1:
            raise ValueError(f"{processes} decoding processes: at least 1 is needed")
        self._maker, self._program, self._key_of = maker, program, key_of
        self.limits = limits
        self._setup = Setup(maker, most, limits.address_bytes)
        self._told = pickle.dumps(self._setup)
        # Last in, first out: on a quiet step a few warm processes do all the work.
        self._idle: queue.LifoQueue[DecodeProcess | None] = queue.LifoQueue()
        for _ in range(processes):
            self._idle.put(None)
        self._alone = threading.Lock()
        self._closed = False
        self._all: set[DecodeProcess] = set()

    def picture(self, data: bytes, step: int = 0, record: int = 0) -> np.ndarray:
        """The pixels of one image, in its first view; raises BadRecord if the content is at fault."""
        found: list[np.ndarray] = []
        members = {self._maker.spec.image_suffixes[0]: data}
        wanted = Wanted(record, None, lambda: members)
        (made,) = self.make([wanted], step, lambda _, row: found.append(row["pixels"][0].copy()))
        if isinstance(made, BadRecord):
            raise made
        return found[0]

    def make(self, wanted: Sequence[Wanted], step: int, take: Callable[[int, np.void], object]) -> list[Verdict]:
        """At most `most` records. `take(place, row)` gets each that could be made, to copy what it needs; raises
        DecoderError if the machine is at fault, and what reading raises."""
        verdicts: dict[int, Verdict] = {}
        left = dict(enumerate(wanted))
        while left:
            alone, unread = self._together(left, step, take, verdicts)
            for place in alone:
                verdicts[place] = self._again(place, left[place], step, take)
            left = {
                place: Wanted(each.record, None, each.read) if place in unread else each
                for place, each in left.items()
                if place not in verdicts
            }
        return [verdicts[place] for place in range(len(wanted))]

    def _together(
        self, left: dict[int, Wanted], step: int, take: Callable[[int, np.void], object], verdicts: dict[int, Verdict]
    ) -> tuple[list[int], set[int]]:
        """Adds what could be said of records made by a common process; returns those that have to be tried alone, and
        those that the process could not read."""
        places = list(left)
        process = self._idle.get()
        try:
            if process is None or process.made >= self.limits.records_per_process:
                self._drop(process)
                process = None
                process = self._start()
            told = process.make(list(left.values()), self._job(list(left.values()), step, 1.0))
            for row, (place, (verdict, reason)) in enumerate(zip(places, told, strict=True)):
                if verdict == MADE:
                    take(place, process.rows[row])
                if verdict not in (NO_MEMORY, UNREAD):
                    verdicts[place] = BadRecord(reason) if verdict == BAD else verdict == MADE
            alone = [place for place, (verdict, _) in zip(places, told, strict=True) if verdict == NO_MEMORY]
            if alone:
                self._drop(process)
                process = None
            return alone, {place for place, (verdict, _) in zip(places, told, strict=True) if verdict == UNREAD}
        except ProcessDied as death:
            self._drop(process)
            process = None
            return [places[min(death.place, len(places) - 1)]], set()
        except BaseException:  # of what reads in the middle of a job, whose rest the process still waits for
            self._drop(process)
            process = None
            raise
        finally:
            self._idle.put(process)

    def _job(self, wanted: Sequence[Wanted], step: int, patience: float) -> Job:
        records = [(each.record, each.stored) for each in wanted]
        return Job(records, step, self._key_of(step), *self._seconds(patience))

    def _seconds(self, patience: float) -> tuple[float, float]:
        """CPU and wall time of one record."""
        seconds = patience * self._maker.views
        return self.limits.cpu_seconds * seconds, self.limits.wall_seconds * seconds

    def _again(self, place: int, wanted: Wanted, step: int, take: Callable[[int, np.void], object]) -> Verdict:
        members = wanted.read()
        wanted = Wanted(wanted.record, None, lambda: members)
        job = self._job([wanted], step, self.limits.patience)
        with self._alone:
            for _ in range(_OUTSIDE_TRIES):
                process = self._start()
                try:
                    ((verdict, reason),) = process.make([wanted], job)
                    if verdict == NO_MEMORY:
                        return BadRecord(f"the decoder needs more than {self.limits.address_bytes} bytes")
                    if verdict == MADE:
                        take(place, process.rows[0])
                    return BadRecord(reason) if verdict == BAD else verdict == MADE
                except ProcessDied as death:
                    if death.signal == signal.SIGPROF:
                        return BadRecord(f"the decoder was not done after {job.cpu_seconds:g} s of computing")
                    if death.signal == signal.SIGALRM:
                        self._check_machine()
                        return BadRecord(f"the decoder stood still for {job.wall_seconds:g} s")
                    if death.signal != signal.SIGKILL:
                        return BadRecord(f"the decoder crashed ({death})")
                finally:
                    self._drop(process)
        raise DecoderError(
            f"decoding processes were killed from outside {_OUTSIDE_TRIES} times in a row; the machine may be out of "
            "memory: use fewer data workers and resume"
        )

    def _check_machine(self) -> None:
        """Make a known picture; if that fails, the machine is stuck and not the record. It belongs to no step, so there
        is no key for it, and has nothing that records need beside their pictures."""
        known = io.BytesIO()
        Image.new("RGB", (16, 16)).save(known, "JPEG")
        spec = DataSpec(self._maker.spec.image_size)
        members = {spec.image_suffixes[0]: known.getvalue()}
        process = self._start(Setup(RecordMaker(spec), 1, self.limits.address_bytes))
        try:
            job = Job([(0, None)], 0, b"", *self._seconds(self.limits.patience))
            ((verdict, _),) = process.make([Wanted(0, None, lambda: members)], job)
            if verdict != MADE:
                raise ProcessDied(None)
        except ProcessDied as error:
            raise DecoderError("decoding is stuck on this machine; reduce its load and resume") from error
        finally:
            self._drop(process)

    def _start(self, setup: Setup | None = None) -> DecodeProcess:
        """`setup`: another than that of records."""
        told = self._told if setup is None else pickle.dumps(setup)
        try:
            process = DecodeProcess(setup or self._setup, told, self._program)
        except (ProcessDied, OSError) as error:
            raise DecoderError(f"a decoding process cannot start ({error}); check memory and limits") from error
        self._all.add(process)
        if self._closed:
            self._drop(process)
            raise DecoderError("the decoding processes were closed")
        return process

    def _drop(self, process: DecodeProcess | None) -> None:
        if process is not None:
            self._all.discard(process)
            process.close()

    def close(self) -> None:
        """Close at once: threads that still wait for a picture get a DecoderError."""
        self._closed = True
        for process in list(self._all):
            self._drop(process)
