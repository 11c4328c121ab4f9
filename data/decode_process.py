"""The trainer's end of one decoding process: starts it, hands it bytes, takes pixels or learns how it died."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from data.decode import BadRecord
from data.decode_worker import BAD, JOB, MADE, NO_MEMORY, READY
from data.picture import PictureMaker

_ROOT = str(Path(__file__).resolve().parents[1])
_START_SECONDS = 120.0
# How much later than the process's own timers the parent acts: only a stopped process is still there then.
_GRACE = 1.5


class ProcessDied(Exception):
    """`signal` is what killed it, 0 where it ended by itself."""

    def __init__(self, code: int | None) -> None:
        self.signal = -code if code is not None and code < 0 else 0
        try:
            super().__init__(signal.Signals(self.signal).name if self.signal else f"exit code {code}")
        except ValueError:
            super().__init__(f"signal {self.signal}")


class OutOfMemory(Exception):
    """The decoder came to the end of its address space."""


class DecodeProcess:
    """Used by one thread at a time. Pixels come through memory that both ends map, never through the socket."""

    def __init__(self, pictures: PictureMaker, program: str, address_bytes: int) -> None:
        self.jobs = 0
        self._shape = (pictures.size, pictures.size, 3)
        room = pictures.size * pictures.size * 3
        module, _, function = program.partition(":")
        code = f"import sys; sys.path[:0] = {[_ROOT, *sys.path]!r}; from {module} import {function}; {function}()"
        ours, theirs = socket.socketpair()
        shared = _anonymous_file(room)
        try:
            self._pixels = np.frombuffer(mmap.mmap(shared, room), dtype=np.uint8)
            # Not multiprocessing: forking a process with torch's threads may deadlock, and its spawning runs the
            # main script again. Popen executes a new interpreter, which sees nothing but these two descriptors.
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
            "size": pictures.size, "augment": pictures.augment, "key": pictures.key.hex(), "room": room,
            "address_bytes": address_bytes,
        }  # fmt: skip
        if self._ask(json.dumps(setup).encode(), _START_SECONDS) != READY:
            raise ProcessDied(self._ended())

    @property
    def pid(self) -> int:
        return self._process.pid

    def make(self, data: bytes, step: int, record: int, cpu_seconds: float, wall_seconds: float) -> np.ndarray:
        """The picture; raises BadRecord, OutOfMemory or ProcessDied, and is of no more use after the last."""
        self.jobs += 1
        answer = self._ask(JOB.pack(step, record, cpu_seconds, wall_seconds) + data, wall_seconds * _GRACE)
        if answer == MADE:
            return self._pixels.reshape(self._shape).copy()
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
        """A time-out of the socket itself: polling before each answer would cost a tenth of a decode."""
        if seconds != self._patience:
            limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._ours.setsockopt(socket.SOL_SOCKET, direction, limit)
            self._patience = seconds

    def _ended(self) -> int | None:
        """How a process ended whose socket is closed already."""
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
    """Without a name, so that nothing is left behind whoever is killed."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pixels")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
