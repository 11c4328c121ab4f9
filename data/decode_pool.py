"""Decoding in processes of their own: a file that crashes or hangs its decoder costs one record, not the run.

The verdict "bad" must not depend on chance, because it decides what enters a private sum. A record whose
process died is tried once more, in a fresh process that handles nothing else, with ten times the time, and only
what fails there too is bad. Time means CPU time of that process, which a busy machine does not use up. Where
the machine itself is to blame (killed from outside, or a known picture does not decode either), the run stops.
"""

from __future__ import annotations

import io
import queue
import signal
import threading
from dataclasses import dataclass

import numpy as np
from PIL import Image

from data.decode import BadRecord
from data.decode_process import DecodeProcess, OutOfMemory, ProcessDied
from data.picture import PictureMaker
from data.tar import UnreadableError

_OUTSIDE_TRIES = 3  # deaths by a signal that no decoder sends itself


@dataclass(frozen=True)
class Limits:
    """What one record may use. Constants of the data plane, not options: they decide which records are bad."""

    cpu_seconds: float = 10.0  # the largest images that are decoded at all take about a second
    wall_seconds: float = 120.0
    patience: float = 10.0  # by which both grow for the second, lonely try
    address_bytes: int = 4 << 30
    jobs_per_process: int = 50_000  # then replaced, so that what decoders leak cannot add up


LIMITS = Limits()


class DecoderError(UnreadableError):
    """Decoding cannot go on on this machine. The run stops: no record is to blame."""


class DecodePool:
    """`make(data, step, record)` from any number of threads; as many processes as asked for, started when needed."""

    def __init__(
        self,
        pictures: PictureMaker,
        processes: int,
        limits: Limits = LIMITS,
        program: str = "data.decode_worker:serve",
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

    def make(self, data: bytes, step: int, record: int) -> np.ndarray:
        """uint8 [size, size, 3]; raises BadRecord for content, DecoderError for trouble of the machine."""
        process = self._idle.get()
        try:
            if process is None or process.jobs >= self.limits.jobs_per_process:
                self._drop(process)
                process = None
                process = self._start()
            return process.make(data, step, record, self.limits.cpu_seconds, self.limits.wall_seconds)
        except (ProcessDied, OutOfMemory):
            self._drop(process)
            process = None
        finally:
            self._idle.put(process)
        return self._again(data, step, record)

    def _again(self, data: bytes, step: int, record: int) -> np.ndarray:
        cpu, wall = self.limits.cpu_seconds * self.limits.patience, self.limits.wall_seconds * self.limits.patience
        with self._alone:
            for _ in range(_OUTSIDE_TRIES):
                process = self._start()
                try:
                    return process.make(data, step, record, cpu, wall)
                except OutOfMemory:
                    raise BadRecord(f"the decoder needs more than {self.limits.address_bytes} bytes") from None
                except ProcessDied as death:
                    if death.signal == signal.SIGPROF:
                        raise BadRecord(f"the decoder was not done after {cpu:g} s of computing") from None
                    if death.signal == signal.SIGALRM:
                        self._check_machine(wall)
                        raise BadRecord(f"the decoder stood still for {wall:g} s") from None
                    if death.signal != signal.SIGKILL:
                        raise BadRecord(f"the decoder crashed ({death})") from None
                finally:
                    self._drop(process)
        raise DecoderError(
            f"decoding processes were killed from outside {_OUTSIDE_TRIES} times running; the machine may be out of "
            "memory: use fewer data workers and resume"
        )

    def _check_machine(self, wall_seconds: float) -> None:
        """A known picture decodes here and now, else it is not the record that stands still."""
        known = io.BytesIO()
        Image.new("RGB", (16, 16)).save(known, "JPEG")
        process = self._start()
        try:
            process.make(known.getvalue(), 0, 0, wall_seconds, wall_seconds)
        except (ProcessDied, OutOfMemory) as error:
            raise DecoderError("decoding stands still on this machine; see to its load and resume") from error
        finally:
            self._drop(process)

    def _start(self) -> DecodeProcess:
        try:
            process = DecodeProcess(self._pictures, self._program, self.limits.address_bytes)
        except (ProcessDied, OSError) as error:
            raise DecoderError(f"a decoding process cannot start ({error}); see to memory and limits") from error
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
        """At once: whoever still waits for a picture gets a DecoderError."""
        self._closed = True
        for process in list(self._all):
            self._drop(process)
