"""Imports once what commands need, then forks them on demand: real processes without the seconds that imports take.

`forking.py` is the tests' side. A job is what `python SCRIPT`, `python -m MODULE` or `python -c CODE` would run, with
an environment, arguments, a folder and streams of its own, alone or as the ranks of one launch. It leads a session.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import mmap
import os
import random
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

LIGHT = ("account.py", "murmuration.accounting.cli.main")
"""What needs no PyTorch: its first job does not wait for it."""
NEEDED = (
    "murmuration.train.engines.deepspeed_zero", "murmuration.train.engines.fsdp2", "murmuration.train.engines.local",
    "murmuration.train.run.run", "murmuration.train.commands.train", "murmuration.train.commands.dry_run",
    "murmuration.train.config.load", "murmuration.train.recipe.first_look", "murmuration.train.planner.micro_batch",
    "murmuration.train.self_test.self_test", "murmuration.launch.prepare",
    # What these, and what they import, import once they have begun: a second of a run by two ranks.
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder.all_ops", "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer", "torch.utils.cpp_extension", "torch.profiler._cupti_monitor",
    "torch.utils.tensorboard", "tensorboard.plugins.hparams.metadata", "matplotlib.pyplot",
    "matplotlib.backends.backend_svg", "PIL.JpegImagePlugin", "PIL.BmpImagePlugin", "PIL.GifImagePlugin",
    "PIL.PpmImagePlugin", "pydantic.dataclasses", "pydantic.type_adapter", "setuptools.dist", "distutils.ccompiler",
    "dp_accounting.pld.common", "scipy.stats", "threadpoolctl",
)  # fmt: skip
KINDS = ("write", "fsync", "pread", "replace", "rename", "mkdir")
CELL = 8
TO_END_ALONE, TO_STOP = 10.0, 30.0
"""Seconds that others have when one rank failed: until they are told to stop, and then until they are killed."""

Job = dict[str, Any]


class Counts:
    """Counts of operations by rank and kind, in memory that outlives the ranks."""

    def __init__(self, ranks: int) -> None:
        self.memory = mmap.mmap(-1, ranks * len(KINDS) * CELL)

    def add(self, rank: int, kind: str) -> int:
        at = (rank * len(KINDS) + KINDS.index(kind)) * CELL
        count = int.from_bytes(self.memory[at : at + CELL], "little") + 1
        self.memory[at : at + CELL] = count.to_bytes(CELL, "little")
        return count

    def of(self, rank: int) -> dict[str, int]:
        starts = {kind: (rank * len(KINDS) + number) * CELL for number, kind in enumerate(KINDS)}
        return {kind: int.from_bytes(self.memory[at : at + CELL], "little") for kind, at in starts.items()}


def watched(counts: Counts, rank: int, kill: dict[str, Any] | None) -> None:
    """Every operation is counted; one of them is this process's last, or it fails with `errno` from there on."""

    def wrap(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            here = counts.add(rank, kind)
            if kill is not None and "errno" in kill:
                if (kill["rank"], kill["kind"]) == (rank, kind) and here >= kill["at"]:
                    raise OSError(kill["errno"], os.strerror(kill["errno"]))
                return real(*arguments, **options)
            last = kill is not None and kill["rank"] == rank and (kill["kind"], kill["at"]) == (kind, here)
            if last and kill is not None and kill["before"]:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return act

    for kind in KINDS:
        setattr(os, kind, wrap(kind, getattr(os, kind)))


def held(opened: int) -> None:
    """The rank that keeps the ledger waits once so many steps are open: until it is killed, asked to stop, or
    sent SIGCONT."""
    from murmuration.accounting.ledger.journal import Journal
    from murmuration.train.distributed.stop import StopRequest

    requests: list[StopRequest] = []
    released: list[int] = []
    signal.signal(signal.SIGCONT, lambda number, frame: released.append(number))
    begin, open_step = StopRequest.__init__, Journal.open_step

    def begun(self: StopRequest, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        requests.append(self)

    def waiting(self: Journal, *arguments: Any, **options: Any) -> None:
        open_step(self, *arguments, **options)
        if self.history.steps()[0] >= opened:
            self.settle()  # the test reads the file
            while not released and not any(request.raised() for request in requests):
                time.sleep(0.02)

    StopRequest.__init__, Journal.open_step = begun, waiting


def load(job: Job) -> None:
    """Imports what such jobs need. Nothing here may start a thread: a fork would lose it, and keep its locks."""
    if any(str(word).endswith(LIGHT) for word in job["command"][:2]) or "torch" in sys.modules:
        return
    from murmuration.train.distributed.process import quiet_libraries

    quiet_libraries()
    for module in NEEDED:
        if importlib.util.find_spec(module) is not None:  # the oldest PyTorch that is allowed lacks one of its parts
            importlib.import_module(module)
    alive = os.listdir("/proc/self/task")
    if len(alive) > 1:
        raise RuntimeError(f"an import has started threads ({len(alive)} run): this process cannot be forked safely")
    for each in list(weakref.finalize._registry):  # pyright: ignore[reportAttributeAccessIssue]
        each.atexit = False  # PyTorch takes thousands of operators down one by one: a third of a short command
    gc.collect()
    gc.freeze()  # a child that collects would copy every page


def serve(control: socket.socket) -> tuple[Job, socket.socket] | None:
    """Forks a process for each job until the tests' side closes. In such a process it returns the job and the socket
    for answers; in the server None, at the end."""
    libc = importlib.import_module("ctypes").CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: ranks whose launch was killed are reaped here
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, socket.socket] = {}
    while True:
        ready = select.select([control, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            for pid, status in reaped():
                if pid in running:
                    with running.pop(pid) as reply:
                        tell(reply, code=os.waitstatus_to_exitcode(status))
        if control not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not message:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return None
        job, reply = json.loads(message), socket.socket(fileno=descriptors[0])
        load(job)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler if job["interruptible"] else signal.SIG_IGN)
            for other in (control, *running.values()):
                other.close()
            os.close(woken), os.close(wake)
            os.setsid()
            for stream, descriptor in enumerate(descriptors[1:]):
                os.dup2(descriptor, stream)
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            return job, reply
        running[pid] = reply
        for descriptor in descriptors[1:]:
            os.close(descriptor)


def reaped() -> list[tuple[int, int]]:
    """Process ids and states of children that have ended."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(one)
    return found


def tell(reply: socket.socket, **answer: Any) -> None:
    with contextlib.suppress(OSError):  # the test waits no longer
        reply.send(json.dumps(answer).encode())


def lead(job: Job, reply: socket.socket) -> int:
    """Starts the ranks as a launcher would, and ends all when one fails. Returns in the ranks alone, their number."""
    ranks: int = job["ranks"]
    counts = Counts(ranks)
    pids: dict[int, int] = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            world = str(ranks)
            job["env"] |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            job["env"] |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
            reply.close()
            watched(counts, rank, job["kill"])
            return rank
        pids[pid] = rank
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    tell(reply, pid=os.getpid(), pids=list(pids))
    codes: list[int | None] = [None] * ranks
    left, first, patience = set(pids), 0, [TO_END_ALONE, TO_STOP]
    deadline: float | None = None
    while left:
        for pid, status in reaped():
            left.discard(pid)
            code = codes[pids[pid]] = os.waitstatus_to_exitcode(status)
            first = first or code
            if code and job["together"]:
                if code < 0:
                    end(left, signal.SIGKILL)
                deadline = deadline or time.monotonic() + patience.pop(0)
        while told:
            end(left, told.pop())
        if deadline is not None and time.monotonic() > deadline:
            end(left, signal.SIGTERM if patience else signal.SIGKILL)
            deadline = time.monotonic() + patience.pop(0) if patience else None
        if left:
            time.sleep(0.01)
    tell(reply, codes=codes, operations=[counts.of(rank) for rank in range(ranks)])
    os._exit(max(first, 0) or int(first != 0))


def end(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def become(job: Job, reply: socket.socket) -> None:
    """This process gets what tells the job's from the server's."""
    if job["ranks"] is None:
        tell(reply, pid=os.getpid())
        reply.close()
    else:
        lead(job, reply)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    for limit, most in job["limits"].items():
        resource.setrlimit(int(limit), (most, most))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
        threads = int(job["env"].get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        if threads > 1:  # one it has from the imports; by those of OpenBLAS sums are rounded
            importlib.import_module("threadpoolctl").threadpool_limits(threads)
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(threads)
        if "torch" in sys.modules:
            sys.modules["torch"].seed()
    random.seed()
    if job["hold_after_opened"] is not None:
        held(job["hold_after_opened"])


def act(command: list[str]) -> None:
    """What `python` does with these words."""
    del sys.path[:2]  # this program's folder, and the checkout's
    if command[0] == "-c":
        sys.argv[:] = ["-c", *command[2:]]
        sys.path.insert(0, "")
        exec(compile(command[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif command[0] == "-m":
        sys.argv[:] = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")


def exit_code(command: list[str]) -> int:
    """Runs a command, and ends as `python` would, with the same words on stderr and the same code; but objects that
    still live are not taken down one by one: with all that was imported, that takes longer than most commands."""
    code: Any = 0
    try:
        act(command)
    except SystemExit as exit:
        code = exit.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return (code or 0) & 0xFF


if __name__ == "__main__":
    found = serve(socket.socket(fileno=int(sys.argv[1])))
    if found is not None:
        become(*found)
        os._exit(exit_code(found[0]["command"]))
