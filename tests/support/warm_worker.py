"""Imports once what training needs, then forks ranks on demand: real runs without the 13 s that their imports take.

One job per line of stdin. Answers with the ranks' process ids at once, and with their exit codes and the number of
operations of each kind when all have ended. A job's `kill` names a rank and the so-manieth operation of a kind, before
or after which this rank is killed by SIGKILL; the others are killed then, as a launcher would.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from murmuration.train.distributed.process import quiet_libraries

quiet_libraries()

from murmuration.train.commands.train import main  # noqa: E402

# What a run imports once its input was found good.
for module in ("murmuration.train.engines.deepspeed_zero", "murmuration.train.run.run"):
    importlib.import_module(module)

KINDS = ("write", "fsync", "pread", "replace", "rename", "mkdir")
CELL = 8


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
    """Every operation is counted; one of them is this process's last."""

    def wrap(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            here = counts.add(rank, kind)
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


def rank_of(job: dict[str, Any], rank: int, counts: Counts) -> None:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    world = str(job["ranks"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    os.chdir(job["cwd"])
    if job["file_size"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_size"], job["file_size"]))
    watched(counts, rank, job["kill"])
    sys.exit(main(job["arguments"]))


def serve(job: dict[str, Any]) -> None:
    counts = Counts(job["ranks"])
    pids: dict[int, int] = {}
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            try:
                rank_of(job, rank, counts)
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else 1)
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(1)
        pids[pid] = rank
    print(json.dumps({"pids": list(pids)}), flush=True)
    codes = [0] * job["ranks"]
    left = set(pids)
    while left:
        pid, status = os.waitpid(-1, 0)
        if pid not in pids:
            continue
        left.discard(pid)
        codes[pids[pid]] = os.waitstatus_to_exitcode(status)
        if codes[pids[pid]] == -signal.SIGKILL and job["together"]:
            for other in left:
                os.kill(other, signal.SIGKILL)
    print(json.dumps({"codes": codes, "operations": [counts.of(rank) for rank in range(job["ranks"])]}), flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        serve(json.loads(line))
