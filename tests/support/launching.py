"""Real launches, as a user would type them: commands, workers, and what their ledgers say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

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


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Launch:
    """One training command, run in its own session so that the whole tree can be signalled."""

    config: Path
    cwd: Path
    ranks: int = 2
    launcher: str = "deepspeed"
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
        if self.launcher == "deepspeed":
            return [str(BIN / "deepspeed"), "--master_port", str(free_port()), "--num_gpus", str(self.ranks), *script]
        if self.launcher == "torchrun":
            head = ["--nproc_per_node", str(self.ranks), "--master_port", str(free_port())]
            return [str(BIN / "torchrun"), *head, *script]
        return [sys.executable, *script]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(), cwd=self.cwd, env=environment(), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self) -> tuple[int, str]:
        process = self.start()
        return ended(process)

    def killed(self, run_dir: Path, opened: int) -> None:
        """Starts it, and kills all of its processes once so many steps were opened."""
        process = self.start()
        wait_for(lambda: len(opened_steps(run_dir)) >= opened, process)
        os.killpg(process.pid, signal.SIGKILL)
        ended(process)
        assert process.returncode == -signal.SIGKILL, "it was over before it could be killed"

    def stopped(self, run_dir: Path, opened: int) -> None:
        """Starts it, and lets it stop by itself once so many steps were opened."""
        process = self.start()
        wait_for(lambda: len(opened_steps(run_dir)) >= opened, process)
        (run_dir / "stop").touch()
        _, output = ended(process)
        assert "stopped by the file stop" in output, output


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
    name: str,
    *arguments: str,
    ranks: int = 2,
    seconds: float = TIMEOUT,
    launcher: str = "deepspeed",
    preload: Path | None = None,
) -> Any:
    """Starts a worker script of tests/end_to_end and gives what it printed behind RESULTS, as JSON."""
    script = [str(ROOT / "tests" / "end_to_end" / name), *arguments]
    count = {"deepspeed": "--num_gpus", "torchrun": "--nproc_per_node"}[launcher]
    command = [str(BIN / launcher), "--master_port", str(free_port()), count, str(ranks), *script]
    env = environment() | ({"LD_PRELOAD": str(preload)} if preload else {})
    process = subprocess.Popen(
        command, text=True, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
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
