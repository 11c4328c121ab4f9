"""Decoding in separate processes: a file that crashes or hangs its decoder costs one record, not the run.

The verdict "bad" must not depend on chance, because it decides what enters a private sum. A record whose
process died is tried once more, in a fresh process that handles nothing else, with ten times the time; only a record
that fails there too is bad. Time means CPU time of that process, which a busy machine does not use up. Where the
machine itself is to blame (the process was killed from outside, or a known picture does not decode either), the run
stops.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from PIL import Image

from murmuration.data.decode.decode import BadRecord
from murmuration.data.decode.picture import PictureMaker
from murmuration.data.decode.worker import BAD, JOB, MADE, NO_MEMORY, READY
from murmuration.data.store.place import UnreadableError

# The trainer's end of one decoding process: starts it, hands it bytes, takes pixels or learns how it died.

# Not resolved: in a checkout `murmuration/data` is a link to `data`, and the package lies beside it.
_ROOT = str(Path(__file__).absolute().parents[3])
_START_SECONDS = 120.0
# How much later than the process's own timers the parent acts: by then only a stopped process is still alive.
_GRACE = 1.5


class ProcessDied(Exception):
    """`signal` is the signal that killed the process, or 0 if it exited by itself."""

    def __init__(self, code: int | None) -> None:
        self.signal = -code if code is not None and code < 0 else 0
        try:
            super().__init__(signal.Signals(self.signal).name if self.signal else f"exit code {code}")
        except ValueError:
            super().__init__(f"signal {self.signal}")


class OutOfMemory(Exception):
    """The decoder ran out of address space."""


class DecodeProcess:
    """For use by one thread at a time. Pixels come through memory that both ends map, never through the socket.

    That memory holds what is made of one record, which the parent copies to where it belongs. A process that could
    write into a whole micro-batch would save that copy, which costs a few thousandths of the decoding; but a file that
    takes its decoder over could then change the pictures of other records.
    """

    def __init__(self, pictures: PictureMaker, program: str, address_bytes: int) -> None:
        self.jobs = 0
        self._key_of = pictures.key_of
        room = math.prod(pictures.shape)
        module, _, function = program.partition(":")
        code = f"import sys; sys.path[:0] = {[_ROOT, *sys.path]!r}; from {module} import {function}; {function}()"
        ours, theirs = socket.socketpair()
        shared = _anonymous_file(room)
        try:
            self._pixels = np.frombuffer(mmap.mmap(shared, room), dtype=np.uint8)
            # Not multiprocessing: forking a process with torch's threads may deadlock, and its spawning runs the
            # main script again. Popen executes a new interpreter, which inherits only these two descriptors.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), str(shared)],
                pass_fds=(theirs.fileno(), shared),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONFAULTHANDLER": ""},
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(shared)
        self._ours, self._patience = ours, 0.0
        self._control = Connection(os.dup(ours.fileno()))
        setup = {
            "size": pictures.size, "augment": pictures.augment, "views": pictures.views, "room": room,
            "address_bytes": address_bytes,
        }  # fmt: skip
        if self._ask(json.dumps(setup).encode(), _START_SECONDS) != READY:
            raise ProcessDied(self._ended())

    @property
    def pid(self) -> int:
        return self._process.pid

    def make(
        self, data: bytes, step: int, record: int, cpu_seconds: float, wall_seconds: float, into: np.ndarray
    ) -> None:  # fmt: skip
        """Makes the picture and copies it; raises BadRecord, OutOfMemory or ProcessDied; after the last, this object is
        of no more use."""
        self.jobs += 1
        key = self._key_of(step)
        job = JOB.pack(step, record, cpu_seconds, wall_seconds, len(key)) + key + data
        answer = self._ask(job, wall_seconds * _GRACE)
        if answer == MADE:
            np.copyto(into, self._pixels.reshape(into.shape))
            return
        if answer == NO_MEMORY:
            raise OutOfMemory
        raise BadRecord(answer[len(BAD) :].decode(errors="replace"))

    def _ask(self, message: bytes, seconds: float) -> bytes:
        try:
            self._wait_at_most(seconds)
            self._control.send_bytes(message)
            return self._control.recv_bytes()
        except BlockingIOError:
            self._process.kill()
            self._process.wait()
            raise ProcessDied(-signal.SIGALRM) from None
        except (EOFError, OSError):
            raise ProcessDied(self._ended()) from None

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


def _anonymous_file(size: int) -> int:
    """A file without a name, so that nothing is left behind if either process is killed."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pixels")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


_OUTSIDE_TRIES = 3  # tries that end by a signal no decoder sends itself


@dataclass(frozen=True)
class Limits:
    """What one record may use. These are constants, not options, because they decide which records are bad."""

    cpu_seconds: float = 10.0  # for each view; the largest images that are decoded at all take about a second
    wall_seconds: float = 120.0
    patience: float = 10.0  # the factor by which both grow for the second try, alone in its process
    address_bytes: int = 4 << 30
    jobs_per_process: int = 50_000  # then the process is replaced, so that memory leaks of decoders cannot add up


LIMITS = Limits()


class DecoderError(UnreadableError):
    """Decoding cannot continue on this machine. The run stops: no record is to blame."""


class DecodePool:
    """`make(data, step, record)` from any number of threads; up to `processes` processes, started when needed."""

    def __init__(
        self,
        pictures: PictureMaker,
        processes: int,
        limits: Limits = LIMITS,
        program: str = "murmuration.data.decode.worker:serve",
    ) -> None:
        if processes < 1:
            raise ValueError(f"{processes} decoding processes: at least 1 is needed")
        self._pictures, self._program = pictures, program
        self.limits = limits
        # Last in, first out: on a quiet step a few warm processes do all the work.
        self._idle: queue.LifoQueue[DecodeProcess | None] = queue.LifoQueue()
        for _ in range(processes):
            self._idle.put(None)
        self._alone = threading.Lock()
        self._closed = False
        self._all: set[DecodeProcess] = set()

    def make(self, data: bytes, step: int, record: int, into: np.ndarray | None = None) -> np.ndarray:
        """uint8 of `PictureMaker.shape`, in the memory `into` if it is given, which is written only if all went well;
        raises BadRecord if the content is at fault, DecoderError if the machine is."""
        into = self._anywhere() if into is None else into
        process = self._idle.get()
        try:
            if process is None or process.jobs >= self.limits.jobs_per_process:
                self._drop(process)
                process = None
                process = self._start()
            cpu, wall = self._seconds
            process.make(data, step, record, cpu, wall, into)
            return into
        except (ProcessDied, OutOfMemory):
            self._drop(process)
            process = None
        finally:
            self._idle.put(process)
        self._again(data, step, record, into)
        return into

    def _again(self, data: bytes, step: int, record: int, into: np.ndarray) -> None:
        cpu, wall = (seconds * self.limits.patience for seconds in self._seconds)
        with self._alone:
            for _ in range(_OUTSIDE_TRIES):
                process = self._start()
                try:
                    process.make(data, step, record, cpu, wall, into)
                    return
                except OutOfMemory:
                    raise BadRecord(f"the decoder needs more than {self.limits.address_bytes} bytes") from None
                except ProcessDied as death:
                    if death.signal == signal.SIGPROF:
                        raise BadRecord(f"the decoder was not done after {cpu:g} s of computing") from None
                    if death.signal == signal.SIGALRM:
                        self._check_machine(step, wall)
                        raise BadRecord(f"the decoder stood still for {wall:g} s") from None
                    if death.signal != signal.SIGKILL:
                        raise BadRecord(f"the decoder crashed ({death})") from None
                finally:
                    self._drop(process)
        raise DecoderError(
            f"decoding processes were killed from outside {_OUTSIDE_TRIES} times in a row; the machine may be out of "
            "memory: use fewer data workers and resume"
        )

    def _check_machine(self, step: int, wall_seconds: float) -> None:
        """Decode a known picture; if that fails, the machine is stuck and not the record."""
        known = io.BytesIO()
        Image.new("RGB", (16, 16)).save(known, "JPEG")
        process = self._start()
        try:
            process.make(known.getvalue(), step, 0, wall_seconds, wall_seconds, self._anywhere())
        except (ProcessDied, OutOfMemory) as error:
            raise DecoderError("decoding is stuck on this machine; reduce its load and resume") from error
        finally:
            self._drop(process)

    @property
    def _seconds(self) -> tuple[float, float]:
        """CPU and wall time of one record."""
        return self.limits.cpu_seconds * self._pictures.views, self.limits.wall_seconds * self._pictures.views

    def _anywhere(self) -> np.ndarray:
        return np.empty(self._pictures.shape, np.uint8)

    def _start(self) -> DecodeProcess:
        try:
            process = DecodeProcess(self._pictures, self._program, self.limits.address_bytes)
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
