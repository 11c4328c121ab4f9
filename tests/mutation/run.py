"""python -m tests.mutation.run GROUP [FILE ...] [--again [TESTS ...]], in the copy: runs mutants without a result.

Third-party packages are imported once and the tests collected once. Each mutant then runs in a fork of that process,
on the tests that run its lines, the fastest first, until one fails. A mutant of what modules evaluate as they are
imported takes a fork from before they were. `--again` takes survivors without a reason once more,
after tests were written for them; with files of tests named, on these alone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
import psutil
import pytest
from _pytest.main import pytest_runtestloop as run_items
from cosmic_ray.mutating import _make_diff, mutate_code
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

from tests.mutation.operators import register
from tests.mutation.places import evaluated_at_import, lines_of, lines_that_name
from tests.mutation.report import Known
from tests.mutation.session import path_of
from tests.mutation.settings import groups, raw
from tests.mutation.swap import changed, functions_of, put_in, told_apart
from tests.mutation.tree import TREE, WORK, Mutated, restore_what_was_interrupted

HEAVY = ("torch", "numpy", "scipy.stats", "scipy.signal", "dp_accounting", "pydantic", "cryptography", "filelock",
         "jinja2", "hypothesis", "opacus", "PIL.Image", "matplotlib", "mpmath", "timm", "transformers")  # fmt: skip
QUIET = ["-q", "-x", "-m", "not slow", "--no-header", "--no-summary", "--durations=0"]
ALIVE, DEAD = 0, 1
WAITS, IDLE = 60.0, 0.2
"""A mutant that does less than so many seconds of work in so many on the wall sleeps, or waits for ever."""

# In memory, where that can be: tests of ledgers wait for the disk most of their time.
SCRATCH = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()) / f"mutants-{os.getpid()}"


@dataclass
class Answer:
    killed: bool
    how: str


def in_a_fork(work: Callable[[], int], seconds: float) -> Answer:
    """The fork's end decides. One that hangs is killed with everything that it started."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        code = DEAD
        with contextlib.suppress(BaseException):
            code = work()
        os._exit(code)
    in_time = ends_within(pid, seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    shutil.rmtree(SCRATCH, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if not in_time or code == -signal.SIGPROF:
        return Answer(True, "timeout")
    return Answer(code != ALIVE, "tests")


def ends_within(pid: int, seconds: float) -> bool:
    """In seconds of processor time: on a busy machine, a clock on the wall would call every mutant one that hangs.

    One that waits for ever uses none, and is told by that.
    """
    ended, used, moved = os.pidfd_open(pid), 0.0, time.monotonic()
    try:
        while used < seconds and time.monotonic() - moved < WAITS:
            if select.select([ended], [], [], 1.0)[0]:
                return True
            now = processor_seconds(pid)
            if now > used + IDLE:
                used, moved = now, time.monotonic()
        return False
    finally:
        os.close(ended)


def processor_seconds(pid: int) -> float:
    """Those of a process, of all processes that it has started, and of theirs that have ended."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])
    return total


class Leave:
    """Ends the process where pytest would begin to clean up, which takes longer than a test."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        os._exit(DEAD if exitstatus else ALIVE)


def from_the_start(tests: list[str]) -> int:
    return int(pytest.main([*QUIET, f"--basetemp={SCRATCH}", *tests], plugins=[Leave()]))


class Bare:
    """A process that has imported third-party packages alone. It forks for each mutant that it is asked about."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._read)
            os.close(self._write)
            gc.freeze()
            self._serve(os.fdopen(read), write)
            os._exit(0)
        os.close(read)
        os.close(write)

    @staticmethod
    def _serve(asked: object, write: int) -> None:
        for line in asked:  # type: ignore[attr-defined]
            tests, seconds = json.loads(line)
            answer = in_a_fork(lambda tests=tests: from_the_start(tests), seconds)
            os.write(write, json.dumps([answer.killed, answer.how]).encode() + b"\n")

    def __call__(self, tests: list[str], seconds: float) -> Answer:
        os.write(self._write, json.dumps([tests, seconds]).encode() + b"\n")
        return Answer(*json.loads(os.read(self._read, 1000)))


@dataclass
class Covering:
    """Which tests run a line, and how long they take."""

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[str]]]
    budget: float

    def at(self, file: str, lines: range | list[int]) -> set[str]:
        known = self.lines.get(file, {})
        return {test for line in lines for test in known.get(str(line), ())}

    def anywhere(self, file: str) -> set[str]:
        return {test for tests in self.lines.get(file, {}).values() for test in tests}

    def of_import(self, file: str, line: int) -> list[str]:
        """Tests that run lines which name what was evaluated there, or are part of it; and others of the file."""
        names, lines = evaluated_at_import(file, line)
        near = self.at(file, lines)
        if names:
            near |= {test for other in self.lines for test in self.at(other, lines_that_name(other, names))}
        first = self.affordable(near)
        return first if sum(self.seconds.get(test, 9.0) for test in first) > self.budget / 2 else [
            *first, *(test for test in self.affordable(self.anywhere(file)) if test not in first)
        ]  # fmt: skip

    def affordable(self, tests: set[str]) -> list[str]:
        chosen, spent = [], 0.0
        for test in sorted(tests, key=lambda test: (self.seconds.get(test, 9.0), test)):
            spent += self.seconds.get(test, 9.0)
            if self.seconds.get(test, 9.0) > self.budget / 2 or spent > self.budget:
                break
            chosen.append(test)
        return chosen

    def limit(self, tests: list[str]) -> float:
        usual = sum(self.seconds.get(test, 1.0) for test in tests)
        return min(10.0 + float(raw()["cosmic-ray"]["timeout"]) * usual, 10.0 + 5 * self.budget)


def open_ones(database: WorkDB) -> list[WorkItem]:
    known = Known()
    found = []
    for item, result in database.completed_work_items:
        file = item.mutations[0].module_path.as_posix()
        if result.test_outcome == TestOutcome.SURVIVED and not known.why(file, result.output or "", result.diff or ""):
            found.append(item)
    return found


class Runner:
    """A pytest plugin whose test loop is a loop over mutants."""

    def __init__(self, name: str, files: list[str], again: list[str] | None, bare: Bare) -> None:
        self._name, self._files, self._bare, self._session_file = name, files, bare, str(path_of(name))
        measured = json.loads((WORK / f"lines-{name}.json").read_text())
        self._covering = Covering(measured["seconds"], measured["lines"], groups()[name].seconds)
        self._again = again

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._functions = functions_of(str(TREE / "murmuration"))
        gc.freeze()  # a collection in a fork would copy all that the forks share
        with use_db(self._session_file) as database:
            found = open_ones(database) if self._again is not None else list(database.pending_work_items)
            wanted = self._files
            pending = [item for item in found if not wanted or item.mutations[0].module_path.as_posix() in wanted]
            random.Random(1).shuffle(pending)
            pending.sort(key=lambda item: self._order(item.mutations[0]))
            self._check_that_all_pass_without(session, items)
            for number, item in enumerate(pending, 1):
                began = time.monotonic()
                result = self._one(session, items, item)
                database.set_result(item.job_id, result)
                mutation = item.mutations[0]
                print(
                    f"{number}/{len(pending)} {mutation.module_path}:{mutation.start_pos[0]} "
                    f"{mutation.operator_name.split('/')[1]} {result.test_outcome.value} {result.output} "
                    f"{time.monotonic() - began:.1f}s", file=sys.__stderr__, flush=True,
                )  # fmt: skip
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        """A test in a fork has its own processor time, so that an endless one does not use up that of all others. The
        signal ends the fork."""
        signal.setitimer(signal.ITIMER_PROF, self._covering.limit([item.nodeid]))
        return (yield)

    def _order(self, mutation: MutationSpec) -> int:
        file = mutation.module_path.as_posix()
        return self._files.index(file) if self._files else 0

    def _check_that_all_pass_without(self, session: pytest.Session, items: dict[str, pytest.Item]) -> None:
        """Tests that fail in a fork, or only together with others, would kill every mutant."""
        checked = WORK / f"passed-{self._name}"
        if checked.exists():
            return
        known = [test for test in self._covering.affordable(set(items)) if test in items]
        answer = in_a_fork(
            lambda: self._run(session, [items[test] for test in known]), 10 * self._covering.limit(known)
        )
        if answer.killed:
            raise pytest.UsageError("the tests fail without a mutant")
        checked.touch()

    @staticmethod
    def _run(session: pytest.Session, items: list[pytest.Item]) -> int:
        session.config._tmp_path_factory._given_basetemp = SCRATCH
        session.items = items
        session.testsfailed = 0
        with contextlib.suppress(session.Failed):
            run_items(session)
        return DEAD if session.testsfailed else ALIVE

    def _one(self, session: pytest.Session, items: dict[str, pytest.Item], item: WorkItem) -> WorkResult:
        mutation = item.mutations[0]
        file = mutation.module_path.as_posix()
        before = (TREE / file).read_text()
        after = mutate_code(before, cosmic_ray.plugins.get_operator(mutation.operator_name)(), mutation.occurrence)
        assert after is not None, mutation
        diff = "\n".join(_make_diff(before, after, file))
        try:
            old, new = (compile(text, file, "exec", dont_inherit=True) for text in (before, after))
        except SyntaxError:
            return WorkResult(WorkerOutcome.NORMAL, "syntax", TestOutcome.INCOMPETENT, diff)
        with Mutated(file, after):
            answer = self._answer(session, items, mutation, changed(old, new), old)
        outcome = TestOutcome.KILLED if answer.killed else TestOutcome.SURVIVED
        return WorkResult(WorkerOutcome.NORMAL, answer.how, outcome, diff)

    def _answer(self, session, items, mutation, swaps, old) -> Answer:
        file, line = mutation.module_path.as_posix(), mutation.start_pos[0]
        only = [test for test in items if test.startswith(tuple(self._again or ()))] if self._again else []
        if swaps == []:
            return Answer(False, "the same code")
        if swaps is not None and told_apart(old, swaps):
            tests = only or self._covering.affordable(self._covering.at(file, lines_of(file, line)))
            if not tests:
                return Answer(False, "no test runs the line")

            def swapped() -> int:
                put_in(self._functions, file, swaps)
                return self._run(session, [items[test] for test in tests if test in items])

            return in_a_fork(swapped, self._covering.limit(tests))
        tests = only or self._covering.of_import(file, line)
        if not tests:
            return Answer(False, "no test runs the file")
        return self._bare(tests, self._covering.limit(tests) + 20)


def main(name: str, files: list[str], again: list[str] | None) -> int:
    register()
    restore_what_was_interrupted()
    for package in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    bare = Bare()
    return pytest.main(
        ["-q", "-x", "-s", "-m", "not slow", "--no-header", "--no-summary", *(again or groups()[name].tests)],
        plugins=[Runner(name, files, again, bare)],
    )


if __name__ == "__main__":
    at = sys.argv.index("--again") if "--again" in sys.argv else len(sys.argv)
    sys.exit(main(sys.argv[1], sys.argv[2:at], sys.argv[at + 1 :] if at < len(sys.argv) else None))
