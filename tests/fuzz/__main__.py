"""python -m tests.fuzz [TARGET ...]: mutates what the commands read, so many times; one process for each target.

A finding is written to tests/fuzz/corpus/TARGET and ends the command with 1. `--seed` and `--cases` make a run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.fuzz.run import TARGETS, fuzz, kept, opened

FEW = 500


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at a time")
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument("--cases", type=int, default=2000, help="of each target (default: 2000)")
    parser.add_argument("--replay", action="store_true", help="run honest files and kept cases; a JSON line for each")
    arguments = parser.parse_args()
    names = arguments.targets or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no target {unknown[0]!r}; choose of {', '.join(TARGETS)}")
    if arguments.replay:
        return replay(names)
    seed = arguments.seed if arguments.seed is not None else time.time_ns() % 10**9
    if len(names) == 1:
        summary = fuzz(names[0], seed, arguments.cases)
        print(summary, flush=True)
        if summary.cases < FEW:
            print(f"warning: {summary.cases} cases show little; give {FEW} at least with --cases", file=sys.stderr)
        return 1 if summary.findings else 0
    return each(names, seed, arguments)


def each(names: list[str], seed: int, arguments: argparse.Namespace) -> int:
    """A process of its own for every target: they share neither imports nor memory."""

    def one(name: str) -> int:
        options = ["--cases", str(arguments.cases), "--seed", str(seed)]
        return subprocess.run([sys.executable, "-m", "tests.fuzz", name, *options]).returncode

    with ThreadPoolExecutor(arguments.jobs) as pool:
        return int(any(list(pool.map(one, names))))


def replay(names: list[str]) -> int:
    failed = False
    for name in names:
        with opened(name) as (target, worker):
            honest = {f"honest {number}": data for number, data in enumerate(target.seeds())}
            for case, data in (honest | {path.name: data for path, data in kept(name).items()}).items():
                result = worker.run(data)
                failed = failed or bool(result.fault)
                print(json.dumps({"case": f"{name}/{case}", "fault": result.fault, "place": result.place,
                                  "code": result.code, "said": result.said}), flush=True)  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
