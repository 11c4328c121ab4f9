"""Launches of training and of workers, forked or by a real launcher, and what their ledgers say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.support import forking
from tests.support.forking import free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TIMEOUT = 1500
"""Seconds, for what hangs: on a slow machine that also does other work, the demo takes half of that."""
MOST_RANKS = 4


def environment() -> dict[str, str]:
    """What a user's shell would have with the environment activated: nothing else that helps the trainer."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "DS_ACCELERATOR")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    if 0 < torch.cuda.device_count() < MOST_RANKS:  # more ranks than GPUs: they share the processor, as without any
        kept["CUDA_VISIBLE_DEVICES"] = ""
    # Two versions of ninja would take turns in compiling DeepSpeed's operation anew.
    return kept | {"PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")])}


@dataclass(frozen=True)
class Ended:
    """What became of forked ranks."""

    codes: list[int]
    output: str
    operations: list[dict[str, int]]
    """Per rank, by kind."""

    @classmethod
    def of(cls, process: forking.Forked) -> Ended:
        output, _ = printed(process)
        assert process.codes is not None and process.operations is not None, "their launch was killed"
        return cls(process.codes, output, process.operations)


@dataclass
class Launch:
    """One training command in a session of its own, so that the whole tree can be signalled.

    `launcher`: "forked" starts the ranks as a launcher would, and "python" one process, both from a process that has
    imported everything; "deepspeed" and "torchrun" are the real ones, where they are what is tested.
    """

    config: Path
    cwd: Path
    ranks: int = 2
    launcher: str = "forked"
    arguments: list[str] = field(default_factory=list)

    @classmethod
    def written(
        cls, config: dict[str, Any], folder: Path, name: str, change: Callable[[dict[str, Any]], None] | None = None,
        **options: Any,
    ) -> tuple[Launch, Path]:  # fmt: skip
        """A launch of a copy of the config, changed and written into the folder; with its run directory."""
        config = json.loads(json.dumps(config))
        run_dir = folder / f"{name}-run"
        config["run"]["dir"] = str(run_dir)
        if change is not None:
            change(config)
        (folder / f"{name}.json").write_text(json.dumps(config))
        return cls(folder / f"{name}.json", folder, **options), run_dir

    def command(self) -> list[str]:
        script = [str(ROOT / "launch" / "train.py"), "--config", str(self.config), *self.arguments]
        return by_launcher(self.launcher, self.ranks, script)

    def start(self, hold_after_opened: int | None = None, **options: Any) -> subprocess.Popen[str]:
        """`hold_after_opened`: no step more is opened until it is killed or asked to stop; what a real launcher has
        started is only so slow that a test can be in time. `options`: of `forking.start`."""
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        how: dict[str, Any] = {"cwd": self.cwd, "env": environment(), **streams}
        if self.launcher in REAL_LAUNCHERS:
            return subprocess.Popen(self.command(), start_new_session=True, **how)
        ranks = self.ranks if self.launcher == "forked" else None
        return forking.start(self.command(), ranks=ranks, hold_after_opened=hold_after_opened, **options, **how)

    def run(self) -> tuple[int, str]:
        process = self.start()
        return ended(process)

    def end(self, arguments: list[str] | None = None, ranks: int | None = None, **options: Any) -> Ended:
        """Starts forked ranks, for once as many or with more arguments, and waits."""
        job = replace(self, arguments=[*self.arguments, *(arguments or [])], ranks=ranks or self.ranks)
        process = job.start(**options)
        assert isinstance(process, forking.Forked)
        return Ended.of(process)

    def held(self, run_dir: Path, opened: int, **options: Any) -> Any:
        """Starts it, and returns once so many steps were opened, when it waits."""
        process = self.start(hold_after_opened=opened, **options)
        wait_for(lambda: len(opened_steps(run_dir)) >= opened, process)
        return process

    def killed(self, run_dir: Path, opened: int) -> None:
        """Starts it, and kills all of its processes once so many steps were opened."""
        process = self.held(run_dir, opened)
        os.killpg(process.pid, signal.SIGKILL)
        ended(process)
        assert process.returncode == -signal.SIGKILL, "it was over before it could be killed"

    def stopped(self, run_dir: Path, opened: int) -> None:
        """Starts it, and lets it stop by itself once so many steps were opened."""
        process = self.held(run_dir, opened)
        (run_dir / "stop").touch()
        code, output = ended(process)
        assert code == 75 and "stopped by the file stop" in output, output


REAL_LAUNCHERS = {"deepspeed": "--num_gpus", "torchrun": "--nproc_per_node"}
"""With the option that says how many ranks there are."""


def by_launcher(launcher: str, ranks: int, script: list[str]) -> list[str]:
    if launcher not in REAL_LAUNCHERS:
        return [sys.executable, *script]
    count = [REAL_LAUNCHERS[launcher], str(ranks)]
    return [str(BIN / launcher), "--master_port", str(free_port()), *count, *script]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit status and what it printed."""
    output, _ = printed(process)
    return process.returncode, output


def printed(process: subprocess.Popen[str], seconds: float = TIMEOUT) -> tuple[str, str]:
    """Both streams of a process that leads a session, once it has ended. One that hangs is killed with all that it
    started, which would slow down every test after it."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"it did not end within {seconds} s:\n{process.communicate()}") from None


def run_worker(
    name: str, *arguments: str, ranks: int = 2, seconds: float = TIMEOUT, launcher: str = "forked",
    preload: Path | None = None,
) -> Any:  # fmt: skip
    """Starts a worker script of tests/end_to_end and gives what it printed behind RESULTS, as JSON."""
    command = by_launcher(launcher, ranks, [str(ROOT / "tests" / "end_to_end" / name), *arguments])
    env = environment() | ({"LD_PRELOAD": str(preload)} if preload else {})
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if launcher in REAL_LAUNCHERS:
        process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
    else:
        process = forking.start(command, ranks=ranks, env=env, **streams)
    output, errors = printed(process, seconds)
    assert process.returncode == 0, output + errors
    line = next(line for line in output.splitlines() if line.startswith("RESULTS "))
    return json.loads(line.removeprefix("RESULTS "))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = TIMEOUT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"ended too early ({process.returncode}):\n{process.communicate()[0]}")
        if time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"the awaited moment never came:\n{process.communicate()[0]}")
        time.sleep(0.02)


def ledger_lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "ledger.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def opened_steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in ledger_lines(run_dir) if line["kind"] == "open"]


def committed(run_dir: Path) -> list[dict[str, Any]]:
    """What the ledger says was done at each step."""
    return [line["facts"] for line in ledger_lines(run_dir) if line["kind"] == "commit"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
