"""The test's side of `warm_worker.py`: real training processes, forked from one that has imported everything."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.launching import environment, free_port


@dataclass(frozen=True)
class Ended:
    codes: list[int]
    output: str
    operations: list[dict[str, int]]
    """Per rank, by kind."""


@dataclass
class WarmRun:
    """Ranks that are running; `wait` gives what became of them."""

    process: subprocess.Popen[str]
    pids: list[int]
    log: Path
    returncode: int | None = None

    @property
    def pid(self) -> int:
        return self.pids[0]

    def wait(self) -> Ended:
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        return Ended(answer["codes"], self.log.read_text(), answer["operations"])

    def poll(self) -> int | None:
        """None while a rank lives."""
        return None if any(alive(pid) for pid in self.pids) else 1

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        del timeout
        return self.wait().output, None


class WarmLauncher:
    """Starts one run at a time."""

    def __init__(self) -> None:
        worker = Path(__file__).with_name("warm_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, str(worker)], env=environment() | {"OMP_NUM_THREADS": "1"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def start(
        self, config: Path, cwd: Path, ranks: int = 2, arguments: list[str] | None = None,
        kill: dict[str, Any] | None = None, file_size: int | None = None, together: bool = True,
    ) -> WarmRun:  # fmt: skip
        """`together`: when one rank is killed, all are. `file_size`: no file may grow beyond it."""
        log = cwd / f"{config.stem}.log"
        log.write_text("")
        job = {
            "arguments": ["--config", str(config), *(arguments or [])], "cwd": str(cwd), "log": str(log),
            "ranks": ranks, "port": free_port(), "kill": kill, "file_size": file_size, "together": together,
        }  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return WarmRun(self.process, json.loads(self.process.stdout.readline())["pids"], log)

    def run(self, config: Path, cwd: Path, **options: Any) -> Ended:
        return self.start(config, cwd, **options).wait()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
