"""Runs the commands of `launch/` in processes that are forked from one which has imported everything already.

Commands are started by their files and nothing else, so this stands whatever moves behind them.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
# Width and colour of help texts; one thread, so that sums are added up in one order.
SETTINGS = {"COLUMNS": "120", "NO_COLOR": "1", "PYTHON_COLORS": "0", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
FROM_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Done:
    code: int
    output: str


def warm_up() -> None:
    """Imports what commands import, once. CUDA is hidden: golden values are those of CPUs."""
    os.environ.update(SETTINGS | {"CUDA_VISIBLE_DEVICES": ""})
    for name in FROM_A_LAUNCHER:
        os.environ.pop(name, None)
    # ninja, which torch looks for there, lies beside the interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name in ("train.py", "export.py"):
        here(name, "--help")


def here(script: str, *arguments: str) -> Done:
    """Runs a command in this process; for commands that leave nothing behind."""
    output, kept = io.StringIO(), sys.argv
    sys.argv = [str(LAUNCH / script), *arguments]
    code: int | str | None = 0
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = kept
    return Done(code if isinstance(code, int) else int(code is not None), output.getvalue())


def run(script: str, *arguments: str, folder: Path, ranks: int = 1) -> Done:
    """Runs a command in `folder` by as many processes as there are ranks, and waits for them."""
    done = begin(script, *arguments, folder=folder, ranks=ranks).wait()
    if done.code:
        raise RuntimeError(f"{script} {' '.join(arguments)} ended with exit code {done.code}:\n{done.output}")
    return done


@dataclass(frozen=True)
class Begun:
    ranks: list[int]
    log: Path

    def wait(self) -> Done:
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in self.ranks]
        return Done(next((code for code in codes if code), 0), self.log.read_text())


def begin(script: str, *arguments: str, folder: Path, ranks: int = 1) -> Begun:
    log = folder / "console.log"
    log.write_text("")
    port = _free_port()
    sys.stdout.flush()
    return Begun([_forked(script, arguments, folder, log, (rank, ranks, port)) for rank in range(ranks)], log)


def _forked(script: str, arguments: tuple[str, ...], folder: Path, log: Path, place: tuple[int, int, int]) -> int:
    rank, ranks, port = place
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        if ranks > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({name: str(value) for name, value in numbers.items()})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        os.chdir(folder)
        sys.argv = [str(LAUNCH / script), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
