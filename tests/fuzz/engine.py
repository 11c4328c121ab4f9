"""Runs one case at a time in a forked worker, within limits of time and memory, and judges what it answered.

The worker is a fork of a process that has imported everything, so that a case costs milliseconds. It may be killed
by its limits or by a crash at any case: the next one gets a new worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import re
import resource
import select
import signal
import struct
import sys
import tempfile
import traceback
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
CODES = (0, 2, 3, 4, 5, 7, 75)
ACCEPTED = (0, 7)
"""7: valid as far as it was checked, which the last line says."""
LONGEST_LINE, MOST_LINES = 2_000, 60
# Line ends are judged by their number; what else moves a cursor or turns the order of letters can forge an answer.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
CASES_PER_WORKER = 2_000  # what a case leaves behind in memory is no finding of a later one


class Broken(Exception):
    """The command gave an answer that must not be given; the message is the rule."""


class Target(ABC):
    """A kind of file, and the commands that read it. Built once, in a folder of its own; forked afterwards."""

    cpu_seconds = 10
    idle_seconds = 30.0
    """A worker that has not computed for so long waits for something that does not come."""
    memory_bytes = 1 << 30

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def seeds(self) -> list[bytes]:
        """Files as they should be."""

    @abstractmethod
    def mutate(self, chance: Random, data: bytes, other: bytes) -> bytes: ...

    @abstractmethod
    def act(self, data: bytes) -> int:
        """Puts the file in its place, restores all else, and runs the commands; the exit code. Broken for a lie."""


@dataclass(frozen=True)
class Result:
    code: int | None
    said: str
    fault: str = ""
    """What was wrong; empty if nothing was."""
    place: str = ""
    """The innermost function of the product that was at work."""

    @property
    def signature(self) -> tuple[str, str]:
        return self.fault, self.place

    @property
    def message(self) -> str:
        """What was said without what differs from case to case."""
        return f"{self.code} " + re.sub(r"'[^']*'|\"[^\"]*\"|[0-9a-f]{8,}|[-+.0-9e]+", "*", self.said)[:160]


class Worker:
    def __init__(self, target: Target) -> None:
        self.target = target
        self._child: int | None = None
        self._cases = 0

    def run(self, data: bytes) -> Result:
        if self._child is None or self._cases >= CASES_PER_WORKER:
            self.close()
            self._start()
        self._cases += 1
        os.write(self._orders, struct.pack("<Q", self._put(data)))
        answered = self._wait()
        answer = os.read(self._answers, 1 << 20) if answered else b""
        if answer:
            return Result(**json.loads(answer))
        return self._died(hung=not answered)

    def _wait(self) -> bool:
        """False once the worker stands still. How long it computes is for its own limit to end."""
        before = -1
        while not select.select([self._answers], [], [], self.target.idle_seconds)[0]:
            stat = Path(f"/proc/{self._child}/stat").read_text().rpartition(")")[2].split()
            computed = int(stat[11]) + int(stat[12])  # user and system time
            if computed == before:
                return False
            before = computed
        return True

    def close(self) -> None:
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            self._reap()

    def _put(self, data: bytes) -> int:
        self._case.seek(0)
        self._case.truncate()
        self._case.write(data)
        self._case.flush()
        return len(data)

    def _start(self) -> None:
        self._case, self._traces = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (while it lives)
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._cases = 0
        sys.stdout.flush()
        self._child = os.fork()
        if self._child == 0:
            try:
                os.close(self._orders)
                os.close(self._answers)
                _serve(self.target, orders, answers, self._case.fileno(), self._traces.fileno())
            except BaseException:  # the fuzzer's own fault: cases are answered for in `attempt`
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(orders)
        os.close(answers)

    def _reap(self) -> int:
        assert self._child is not None
        _, status = os.waitpid(self._child, 0)
        self._child = None
        os.close(self._orders)
        os.close(self._answers)
        return status

    def _died(self, hung: bool) -> Result:
        assert self._child is not None
        if hung:
            os.kill(self._child, signal.SIGXCPU)  # whose handler tells where it was
            select.select([self._answers], [], [], 5.0)  # readable when it has ended
            os.kill(self._child, signal.SIGKILL)
        status = self._reap()
        self._traces.seek(0)
        trace = self._traces.read().decode(errors="replace")
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if hung or killed in (signal.SIGXCPU, signal.SIGKILL):
            fault = "no answer within the limit of time"
        else:
            fault = f"the process died of {signal.Signals(killed).name if killed else os.WEXITSTATUS(status)}"
        frames = re.findall(r'File "([^"]+)", line \d+ in (\S+)', trace)
        return Result(None, trace[:2000], fault, _place(frames))


def _place(frames: list[tuple[str, str]]) -> str:
    """The first frame of the product; `frames` begin with the innermost."""
    for file, function in frames:
        if file.startswith(f"{ROOT}/") and not file.startswith((f"{ROOT}/tests/", f"{ROOT}/.venv/")):
            return f"{file.removeprefix(f'{ROOT}/')}:{function}"
    return ""


def _serve(target: Target, orders: int, answers: int, case: int, traces: int) -> NoReturn:
    # Without limits, and here: what a first case imports is no part of a case, and torch's threads outlive no fork.
    attempt(target, target.seeds()[0])
    faulthandler.enable(traces)
    faulthandler.register(signal.SIGXCPU, traces, all_threads=False, chain=True)
    limit = _address_space() + target.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
    while order := os.read(orders, 8):
        data = os.pread(case, struct.unpack("<Q", order)[0], 0)
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + 1 + target.cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        os.write(answers, json.dumps(asdict(attempt(target, data))).encode())
    os._exit(0)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def attempt(target: Target, data: bytes) -> Result:
    """One case in this process. The streams refuse and escape what a terminal's streams refuse and escape."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    code, fault, place = None, "", ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = target.act(data)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        except Broken as broken:
            fault = str(broken)
        except BaseException as error:
            fault = f"traceback of {type(error).__name__}"
            frames = traceback.extract_tb(error.__traceback__)
            place = _place([(frame.filename, frame.name) for frame in reversed(frames)])
            err.write(f"{type(error).__name__}: {error}"[:500])
    said, complaint = (_text(stream) for stream in (out, err))
    return Result(code, (complaint or said)[:1500], fault or judge(code, said, complaint), place)


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]


def judge(code: int | None, said: str, complaint: str) -> str:
    """Why this is no answer of a command; empty where it is one."""
    if code not in CODES:
        return f"exit code {code}"
    lines = complaint.splitlines()
    if code not in ACCEPTED and not complaint.strip():
        return "a refusal without a word"
    if "Traceback (most recent call last)" in complaint:
        return "a printed traceback"
    if UNPRINTABLE.search(said) or UNPRINTABLE.search(complaint):
        return "letters that a terminal obeys"
    if len(lines) > MOST_LINES or max(map(len, lines), default=0) > LONGEST_LINE:
        return "a message that is too long to be read"
    return ""
