"""How tests start Python processes: like `subprocess`, but forked from one that has imported everything.

    forking.run([sys.executable, "launch/account.py", "verify", run_dir], capture_output=True, text=True)
    forking.start([sys.executable, "launch/train.py", ...], ranks=2, stdout=subprocess.PIPE, text=True)

Each worker of pytest has one server (`fork_server.py`), started when it is first asked for. Use `subprocess` where a
launcher or a fresh interpreter is what the test is about: imports, options of Python, variables that libraries read at
import, memory, processor time, the seed of hashes.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


READ_AT_IMPORT = (
    "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "DNNL_MAX_CPU_ISA", "LD_PRELOAD", "MKL_CBWR",
    "NPY_DISABLE_CPU_FEATURES", "OPENBLAS_CORETYPE", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONSAFEPATH",
    "PYTHONWARNINGS", "TRITON_INTERPRET",
)  # fmt: skip

# With one thread no library starts others at import; a forked process takes as many as it would have, and they do not
# wait for each other by turning round. PyTorch's compiler would start processes that import everything again.
AT_IMPORT = {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "OPENBLAS_THREAD_TIMEOUT": "4",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}  # fmt: skip


class Server:
    """Also counts the processor time of what it has forked."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("fork_server.py"))
        self.env = dict(os.environ)
        with theirs:
            # Of pipes Python remembers that nothing can be sought in them, which would fail where a fork has one.
            self.process = subprocess.Popen(
                [sys.executable, script, str(theirs.fileno())], env=self.env | AT_IMPORT,
                pass_fds=[theirs.fileno()], start_new_session=True, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        atexit.register(self.close)

    def seconds(self) -> list[float]:
        """Processor time: its own, user and system, and then that of all forked processes that have ended."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15]]

    def close(self) -> None:
        self.control.close()
        self.process.wait(timeout=60)


@functools.cache
def server() -> Server:
    return Server()


def seconds() -> float:
    """Processor time of what was forked so far; without a server, none."""
    return sum(server().seconds()[2:]) if server.cache_info().currsize else 0.0


def own_seconds() -> float:
    """Processor time of the server itself, which is that of its imports."""
    return sum(server().seconds()[:2]) if server.cache_info().currsize else 0.0


class Forked(subprocess.Popen[Any]):
    """A forked process, which leads a session. With ranks it is their launcher: `pids` are theirs, and once all have
    ended, `codes` their exit codes and `operations` the number of their operations by kind."""

    pids: list[int]
    codes: list[int] | None = None
    operations: list[dict[str, int]] | None = None

    def __init__(self, command: list[Any], job: dict[str, Any], **options: Any) -> None:
        self._job = job
        super().__init__([os.fspath(word) for word in command], **options)

    def _execute_child(self, args: list[str], executable: Any, *options: Any) -> None:  # pyright: ignore
        # As in every supported Python: preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        # then the pipes.
        cwd, env = options[3:5]
        pipes: tuple[int, ...] = options[8:14]
        stdin, stdout, stderr = pipes[0], pipes[3], pipes[5]
        env = dict(os.environ if env is None else env)
        if args[0] != sys.executable or args[1] in ("-I", "-W", "-E", "-O") or options[7]:
            raise ValueError(f"only a plain {sys.executable} can be forked, not {args[:2]}")
        different = [name for name in READ_AT_IMPORT if env.get(name) != server().env.get(name)]
        if different:
            raise ValueError(f"{', '.join(different)} are read at import: start a fresh interpreter with subprocess")
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        job = self._job | {"command": args[1:], "cwd": os.fspath(cwd or os.getcwd()), "env": env}
        job["interruptible"] = signal.getsignal(signal.SIGINT) != signal.SIG_IGN  # which a child inherits
        streams = [own if own != -1 else inherited for own, inherited in ((stdin, 0), (stdout, 1), (stderr, 2))]
        with theirs:
            socket.send_fds(server().control, [json.dumps(job).encode()], [theirs.fileno(), *streams])
        self._close_pipe_fds(*pipes)  # pyright: ignore
        self._child_created = True
        self._receive()

    def _receive(self) -> None:
        message = self._answers.recv(1 << 20)
        if not message:
            self.returncode = -signal.SIGKILL
            assert server().process.stdout is not None
            raise RuntimeError(f"the fork server has ended: {server().process.stdout.read()}")
        answer = json.loads(message)
        self.__dict__.update({name: value for name, value in answer.items() if name != "code"})
        if "code" in answer:
            self.returncode = answer["code"]
            self._answers.close()

    def _ready(self, timeout: float | None) -> bool:
        return bool(select.select([self._answers], [], [], timeout)[0])

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:  # pyright: ignore
        while self.returncode is None and self._ready(0):
            self._receive()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:  # pyright: ignore
        while self.returncode is None:
            if not self._ready(timeout):
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._receive()
        return self.returncode


def start(
    command: list[Any], *, ranks: int | None = None, limits: Mapping[int, int] | None = None,
    hold_after_opened: int | None = None, kill: dict[str, Any] | None = None, together: bool = True, **options: Any,
) -> Forked:  # fmt: skip
    """`options`: those of `subprocess.Popen`. `limits`: of `setrlimit`, by their number. `hold_after_opened`: the rank
    that keeps the ledger waits once so many steps were opened, until it is killed, asked to stop or sent SIGCONT.
    `kill` names a rank and the so-manieth operation of a kind, before or after which it is killed. `together`: when a
    rank fails, all end."""
    job = {
        "ranks": ranks, "port": free_port() if ranks else None, "limits": dict(limits or {}), "kill": kill,
        "together": together, "hold_after_opened": hold_after_opened,
    }  # fmt: skip
    return Forked(command, job, **options)


def run(
    command: list[Any], *, check: bool = False, capture_output: bool = False, input: Any = None,
    timeout: float | None = None, **options: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """`subprocess.run`, forked."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with start(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
