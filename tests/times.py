"""Processor seconds of the tests: the dearest, the sum of each group, and what has doubled since the table was made.

`make test-times` runs everything that is not slow and prints them; with WRITE=--write it makes the table anew. With
WRITE="--slow --write" it runs the slow tests alone, for hours, and writes what they take into the table that there is.
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
TARGETS, SLOW = ["test-core", "test-rest", "test-oldest"], ["test-slow"]

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
    slow: dict[str, float] = field(default_factory=dict)
    """By file, of the tests marked slow that CI takes: their shares are of whole files."""

    @classmethod
    def read(cls, path: Path = TABLE) -> Times:
        return cls(**json.loads(path.read_text()))

    @classmethod
    def of_lines(cls, lines: Iterable[str], unit: float) -> Times:
        """From what `support/cpu_seconds.py` has written."""
        found = cls(unit)
        groups: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        slow: dict[str, float] = defaultdict(float)
        for line in map(json.loads, lines):
            group = groups[line["group"]]
            group[0] += line["test"] is not None
            group[1] += line["seconds"]
            if line["test"] is None or line["group"] in ("oldest", "by hand"):  # the oldest have been there before
                continue
            if line["group"] == "slow":
                slow[line["test"].partition("::")[0]] += line["seconds"]
            else:
                found.tests[line["test"]] = line["seconds"]
        found.slow = {file: round(seconds, 1) for file, seconds in sorted(slow.items())}
        found.groups = {name: [count, round(seconds, 1)] for name, (count, seconds) in sorted(groups.items())}
        return found

    def with_slow_of(self, other: Times) -> Times:
        """Slow tests are measured in runs of their own, perhaps of a few files, and on another machine."""
        faster = self.unit / other.unit
        slow = self.slow | {file: round(seconds * faster, 1) for file, seconds in other.slow.items()}
        return Times(self.unit, self.groups, self.tests, dict(sorted(slow.items())))

    def write(self, path: Path = TABLE) -> None:
        dear = {name: round(seconds, 1) for name, seconds in sorted(self.tests.items()) if seconds >= DEAR}
        table: dict[str, Any] = {"unit": round(self.unit, 2), "groups": self.groups, "tests": dear, "slow": self.slow}
        path.write_text(json.dumps(table, indent=1) + "\n")

    def doubled(self, before: Times) -> list[str]:
        """Tests, or files of slow ones, that take twice as long as the table says, or as what it leaves out."""
        slower, known = self.unit / before.unit, before.tests | before.slow
        found = {name: (seconds / slower, known.get(name, DEAR)) for name, seconds in (self.tests | self.slow).items()}
        return [
            f"{name}: {now:.1f} s, {'at most ' if name not in known else ''}{then:.1f} s in the table"
            for name, (now, then) in sorted(found.items(), key=lambda each: -each[1][0]) if now > FACTOR * then
        ]  # fmt: skip

    def report(self) -> str:
        dearest = sorted((self.tests | self.slow).items(), key=lambda each: -each[1])[:SHOWN]
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
    parser.add_argument("--slow", action="store_true", help="the slow tests, and no others")
    given = parser.parse_args()
    file: Path = given.file or ROOT / "build" / "times.jsonl"
    own, lint = unit(), None
    if given.file is None:
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
        lint = processor_seconds(["make", "lint"]) if not given.slow else None
        env = {**os.environ, "TEST_TIMES": str(file)}
        subprocess.run(["make", "--keep-going", *(SLOW if given.slow else TARGETS)], cwd=ROOT, env=env)
    before, found = Times.read(), Times.of_lines(file.read_text().splitlines(), own)
    if lint is not None:
        found.groups["lint"] = [0, round(lint, 1)]
    print(found.report())
    if given.write:
        (before.with_slow_of(found) if given.slow else found.with_slow_of(before)).write()
    for line in found.doubled(before):
        print(f"doubled: {line}")


if __name__ == "__main__":
    main()
