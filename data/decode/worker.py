"""The process that parses untrusted image bytes, so that no file can take the trainer down with it.

It is started by data/decode/pool.py, has only its own socket and one block of shared memory, and is
confined: bounded address space, no core dumps (they would contain private pixels), no output. Time is limited by
kernel timers with their default action, death, because a decoder that loops in C never returns to Python.
"""

from __future__ import annotations

import json
import mmap
import resource
import signal
import struct
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from PIL import Image

from murmuration.data.decode.augment import ResizeCrop
from murmuration.data.decode.decode import BadRecord
from murmuration.data.decode.picture import PictureMaker

JOB = struct.Struct("<QQddB")  # step, record, CPU seconds, wall seconds, length of the key; key and image follow
READY, MADE, BAD, NO_MEMORY = b"ready", b"made", b"bad:", b"memory"
_STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
Make = Callable[[bytes, int, int, bytes], np.ndarray]
"""Image, step, record and the key of the step, which comes with each image: a process keeps no key for later."""


def serve(maker: Callable[[dict[str, Any]], Make] | None = None) -> None:
    """Answer until the parent closes the socket or dies; `maker` builds the decoder from the setup message."""
    # Schedulers signal the whole job to ask for an orderly stop; the trainer arranges that.
    for name in _STOPS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    # Whether a signal is ignored or blocked is inherited, and these two must kill.
    for timer in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(timer, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
    control = Connection(int(sys.argv[1]))
    setup = json.loads(control.recv_bytes())
    make = (maker or _picture_maker)(setup)
    pixels = np.frombuffer(mmap.mmap(int(sys.argv[2]), setup["room"]), dtype=np.uint8)
    Image.preinit()  # loads parsers, which must not count towards the first record's time
    _confine(setup["address_bytes"])
    control.send_bytes(READY)
    while True:
        try:
            message = control.recv_bytes()
        except EOFError:
            return
        control.send_bytes(_answer(message, make, pixels))


def _answer(message: bytes, make: Make, pixels: np.ndarray) -> bytes:
    step, record, cpu_seconds, wall_seconds, key_length = JOB.unpack_from(message)
    image = JOB.size + key_length
    try:
        # Both kill this process: PROF counts its CPU time, REAL the time that passes.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, wall_seconds)
        made = make(message[image:], step, record, message[JOB.size : image])
        pixels[:] = made.reshape(-1)
        return MADE
    except BadRecord as error:
        # Decoders report a lack of memory in their own words; memory left over from earlier images must not decide.
        return NO_MEMORY if _cramped() else BAD + str(error)[:500].encode(errors="backslashreplace")
    except MemoryError:
        return NO_MEMORY
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _picture_maker(setup: dict[str, Any]) -> Make:
    given = setup["augment"]
    augment: Any = given if isinstance(given, str) else ResizeCrop(*given)

    def make(data: bytes, step: int, record: int, key: bytes) -> np.ndarray:
        return PictureMaker(setup["size"], augment, key, setup["views"]).make(data, step, record)

    return make


def _cramped() -> bool:
    """Whether less than half of the address space is left; no image that is decoded at all can need more than half."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return True
    return limit != resource.RLIM_INFINITY and used > limit // 2


def _confine(address_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
