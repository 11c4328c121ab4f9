"""What `.ci/run` does with the machine that it finds: everything, or what fits into an hour.

On a slow machine the lint gates, the core and one test of each end-to-end file always run. The rest and
`make test-oldest` are dealt into shares by what the files take in `times.json`; each commit runs the next share. So are
the slow tests, for a few minutes of what is left of the hour, if any.
"""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from tests.times import ROOT, Times, dealt, unit

MINUTES = 60.0
USED = 0.7
"""The part of the time that is planned: imports of workers and uneven ends are not in the table. A slow machine took 67
minutes for what would be 50 by it, a fast one 23 for 20."""
SLOW = 6.0
"""Minutes of the slow tests at most: a fast machine, too, ends soon."""
AT_MOST, OF_EACH = 4, 1.25
"""End-to-end tests run by so many processes at the most (Makefile), each of which keeps so many cores busy: two ranks
wait for each other."""
COLLECTION = 30.0
"""Seconds until a call of pytest has imported what it collects, on the machine of the table."""
WORKERS = "PYTEST_XDIST_AUTO_NUM_WORKERS"
"""The variable that says what pytest's `-n auto` is."""


@dataclass(frozen=True)
class Plan:
    cores: int
    slower: float
    """Times that this machine takes as long as that of the table."""
    minutes: float
    """Of what will run."""
    whole: float
    """Minutes of everything but the slow tests."""
    share: int = 0
    shares: int = 1
    slow_share: int = 0
    slow_shares: int = 0
    """None where no share of the slow tests fits."""
    too_dear: int = 0
    """Of these shares."""

    def steps(self) -> list[tuple[list[str], list[str]]]:
        """What `make` is called with, and what one process does meanwhile: lint has only one, and installing waits for
        disk and network."""
        last: list[tuple[list[str], list[str]]] = [(["test-slow"], [])] if self.slow_shares else []
        if self.shares == 1:
            return [(["test"], ["build/oldest/.ready"]), (["test-rest"], ["test-oldest"]), *last]
        return [(["test"], []), (["test-rest"], []), (["test-oldest"], []), *last]

    def share_of(self, targets: list[str]) -> dict[str, str]:
        """What their environment has besides."""
        if targets == ["test-slow"]:
            return {"TEST_SHARE": f"{self.slow_share}/{self.slow_shares}"}
        return {"TEST_SHARE": f"{self.share}/{self.shares}"} if self.shares > 1 and targets != ["test"] else {}

    def text(self) -> str:
        head = f"{self.cores} core{'s' * (self.cores > 1)}, {self.slower:.2f} times the seconds of the table's machine"
        slow = f"share {self.slow_share + 1} of {self.slow_shares}" if self.slow_shares else "none"
        if self.shares == 1:
            return f"{head}: everything runs, and of the slow tests {slow}, in about {self.minutes:.0f} minutes"
        return (
            f"{head}: everything would take {self.whole:.0f} minutes, so this commit runs lint, the core, each "
            f"end-to-end file once, share {self.share + 1} of {self.shares} of the rest and of test-oldest, and of the "
            f"slow tests {slow}, in about {self.minutes:.0f}"
        )

    def left_out(self) -> str:
        later: list[str] = []
        if self.shares > 1:
            later.append(f"the other {self.shares - 1} of {self.shares} shares of the rest and of test-oldest")
        if (coming := self.slow_shares - self.too_dear - 1) > 0:
            later.append(f"{coming} of {self.slow_shares} shares of the slow tests")
        never = "the slow tests, for which no time is left"
        if self.slow_shares:
            never = "the slow tests that are marked by_hand or that the table does not know"
        if self.too_dear:
            never = f"{self.too_dear} shares of them that need more time than is left, and {never}"
        found = [f"{' and '.join(later)}, which the next commits run"] if later else []
        return "; ".join([*found, f"{never} (make test-slow)"])


def planned(table: Times, own_unit: float, cores: int, number: int, files: int) -> Plan:
    """`number`: of the commit. `files`: end-to-end files, of each of which one test runs always."""
    slower = own_unit / table.unit

    def minutes(group: str) -> float:
        at_once = {"end to end": min(cores, AT_MOST * OF_EACH), "lint": 1}.get(group, cores)
        return table.groups.get(group, [0, 0.0])[1] * slower / at_once / 60

    count = max(1.0, table.groups.get("end to end", [1, 0.0])[0])
    once = minutes("end to end") * min(1.0, files / count)
    begun = COLLECTION * slower / 60
    fixed = minutes("lint") + minutes("core") + 2 * begun
    rest = minutes("units") + minutes("end to end") + minutes("oldest")
    whole = fixed + rest + 3 * begun
    if whole <= MINUTES * USED:
        return Plan(cores, slower, whole, whole)
    fixed += once + 3 * begun
    left = max(MINUTES * USED - fixed, 1.0)
    shares = max(2, math.ceil((rest - once) / left))
    return Plan(cores, slower, fixed + (rest - once) / shares, whole, number % shares, shares)


def with_slow(plan: Plan, table: Times, number: int) -> Plan:
    """And what fits of the slow tests, which run one after the other, in the fewest shares that fit. A file that alone
    takes longer than the time that is left is a share that no commit runs."""
    a_minute = 60 / plan.slower  # in seconds of the table; where ranks work at once, others wait for kills and timeouts
    begun = COLLECTION * plan.slower / 60
    left = (min(MINUTES * USED - plan.minutes, SLOW) - begun) * a_minute
    for shares in range(1, len(table.slow) + 1):
        parts = dealt(table.slow, shares)
        sums = [sum(table.slow[file] for file in part) for part in parts]
        fitting = [share for share, seconds in enumerate(sums) if seconds <= left]
        if fitting and all(len(part) == 1 or seconds <= left for part, seconds in zip(parts, sums, strict=True)):
            share = fitting[number % len(fitting)]
            minutes = plan.minutes + begun + sums[share] / a_minute
            return replace(plan, minutes=minutes, slow_share=share, slow_shares=shares, too_dear=shares - len(fitting))
    return plan


def commit_number() -> int:
    """One more for each commit; of a shallow clone, which cannot count, a number by chance."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    if git("rev-parse", "--is-shallow-repository") == "false":
        return int(git("rev-list", "--count", "HEAD"))
    return int(git("rev-parse", "HEAD")[:8] or "0", 16)


def run(targets: list[str], env: dict[str, str], out: BinaryIO) -> tuple[int, list[str]]:
    """The exit code of make, whose output is passed on, and the closing lines of pytest."""
    closing: list[str] = []
    command = ["make", "--keep-going", *targets]  # what failed hides no other failure
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for raw in process.stdout:
            out.write(raw)
            out.flush()
            line = raw.decode(errors="replace").strip().strip("= ")
            if re.search(r"\d+ (passed|failed|errors?)\b.* in \d", line):
                closing.append(line)
    return process.returncode, closing


def counted(closing: list[str]) -> str:
    """The counts of all closing lines together."""
    total: dict[str, int] = {}
    for line in closing:
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|deselected|errors?)\b", line):
            total[word] = total.get(word, 0) + int(number)
    return ", ".join(f"{number} {word}" for word, number in total.items()) or "no test"


def main() -> int:
    cores = len(os.sched_getaffinity(0))
    files = len(list((ROOT / "tests" / "end_to_end").glob("test_*.py")))
    own, table = unit(), Times.read()
    number = commit_number()
    plan = with_slow(planned(table, own, cores, number, files), table, number)
    print(f"speed: {own:.2f} s for a fixed piece of work; {plan.text()}", flush=True)
    times = Path(os.environ.get("TEST_TIMES", ROOT / "build" / "times.jsonl"))
    times.parent.mkdir(exist_ok=True)
    times.write_text("")
    # For the cores that may be used, since pytest-xdist counts those of the machine.
    env = {**os.environ, "TEST_TIMES": str(times), WORKERS: str(min(cores, 8))}
    ran: list[str] = []
    failed: list[str] = []
    closing: list[str] = []
    for targets, beside in plan.steps():
        with ThreadPoolExecutor() as pool:
            told = io.BytesIO()  # after the other's output, not between its lines
            calls = [pool.submit(run, targets, env | plan.share_of(targets), sys.stdout.buffer)]
            calls += [pool.submit(run, beside, {**env, WORKERS: "1"}, told)] if beside else []
            for made, call in zip((targets, beside), calls, strict=False):
                code, lines = call.result()
                ran += [target for target in made if "/" not in target]
                failed += made if code else []
                closing += lines
        sys.stdout.buffer.write(told.getvalue())
    for line in Times.of_lines(times.read_text().splitlines(), own).doubled(table):
        print(f"doubled: {line}")
    ended = f"failed in make {' '.join(failed)}" if failed else "all passed"
    print(f"{ended}: {counted(closing)}. Ran: make {' '.join(ran)}. Not run: {plan.left_out()}.", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
