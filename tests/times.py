"""Processor seconds of the tests: the dearest, the sum of each group, and what has doubled since the table was made.

`make test-times` runs everything that is not slow and prints them; with WRITE=--write it makes the table anew.
`python -m tests.times FILE` reads what an earlier run with TEST_TIMES=FILE has left.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "times.json"
DEAR, FACTOR, SHOWN = 2.0, 2.0, 30
"""Cheaper tests are not in the table; a test is named from this factor on; so many of the dearest are shown."""

WORK = """
import numpy, torch
torch.manual_seed(0)
torch.set_num_threads(1)
words = {}
for number in range(600_000):
    words[number % 1000] = words.get(number % 1000, 0) + number
values = numpy.arange(1 << 20, dtype=numpy.float64)
for _ in range(20):
    values = numpy.sqrt(values * values + 1.0)
matrix = torch.rand(256, 256)
for _ in range(60):
    matrix = torch.tanh(matrix @ matrix.T / 256)
"""


def unit() -> float:
    """Processor seconds that this machine takes for a fixed piece of work: imports, Python, NumPy and PyTorch."""
    command = [sys.executable, "-c", WORK]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env)  # the first one compiles what a fresh environment has not
    return processor_seconds(command, env)


def processor_seconds(command: list[str], env: dict[str, str] | None = None) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=env, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@dataclass
class Times:
    """Seconds of tests and groups, on a machine that takes `unit` seconds for the fixed piece of work."""

    unit: float
    groups: dict[str, list[float]] = field(default_factory=dict)
    """The number of tests and their seconds."""
    tests: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = TABLE) -> Times:
        return cls(**json.loads(path.read_text()))

    @classmethod
    def of_lines(cls, lines: Iterable[str], unit: float) -> Times:
        """From what `support/cpu_seconds.py` has written."""
        found = cls(unit)
        groups: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for line in map(json.loads, lines):
            group = groups[line["group"]]
            group[0] += line["test"] is not None
            group[1] += line["seconds"]
            if line["test"] is not None and line["group"] != "oldest":  # which has been there before
                found.tests[line["test"]] = line["seconds"]
        found.groups = {name: [count, round(seconds, 1)] for name, (count, seconds) in sorted(groups.items())}
        return found

    def write(self, path: Path = TABLE) -> None:
        dear = {name: round(seconds, 1) for name, seconds in sorted(self.tests.items()) if seconds >= DEAR}
        table: dict[str, Any] = {"unit": round(self.unit, 2), "groups": self.groups, "tests": dear}
        path.write_text(json.dumps(table, indent=1) + "\n")

    def doubled(self, before: Times) -> list[str]:
        """Tests that take twice as long as the table says, or twice as long as what it leaves out."""
        slower = self.unit / before.unit
        found = {name: (seconds / slower, before.tests.get(name, DEAR)) for name, seconds in self.tests.items()}
        return [
            f"{name}: {now:.1f} s, {'at most ' if name not in before.tests else ''}{then:.1f} s in the table"
            for name, (now, then) in sorted(found.items(), key=lambda each: -each[1][0]) if now > FACTOR * then
        ]  # fmt: skip

    def report(self) -> str:
        dearest = sorted(self.tests.items(), key=lambda each: -each[1])[:SHOWN]
        lines = [f"{seconds:8.1f} s  {name}" for name, seconds in dearest]
        lines += [f"{seconds:8.0f} s  {name}: {count:.0f} tests" for name, (count, seconds) in self.groups.items()]
        lines.append(f"{sum(seconds for _, seconds in self.groups.values()):8.0f} s  together; unit: {self.unit:.2f} s")
        return "\n".join(lines)


def dealt(costs: dict[str, float], shares: int) -> list[list[str]]:
    """The names in so many shares of about the same cost; the same at each call."""
    found: list[list[str]] = [[] for _ in range(shares)]
    sums = [0.0] * shares
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        least = sums.index(min(sums))
        found[least].append(name)
        sums[least] += costs[name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="what an earlier run has left; without it, one is made")
    parser.add_argument("--write", action="store_true", help="make the table anew")
    given = parser.parse_args()
    file: Path = given.file or ROOT / "build" / "times.jsonl"
    own, lint = unit(), None
    if given.file is None:
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
        lint = processor_seconds(["make", "lint"])
        env = {**os.environ, "TEST_TIMES": str(file)}
        subprocess.run(["make", "--keep-going", "test-core", "test-rest", "test-oldest"], cwd=ROOT, env=env)
    found = Times.of_lines(file.read_text().splitlines(), own)
    if lint is not None:
        found.groups["lint"] = [0, round(lint, 1)]
    print(found.report())
    if given.write:
        found.write()
    for line in found.doubled(Times.read()):
        print(f"doubled: {line}")


if __name__ == "__main__":
    main()
