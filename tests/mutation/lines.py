"""A pytest plugin: which test runs which lines of the files to mutate, and how much processor time each test takes.

Time on the wall would make tests look slow, and keep them from mutants, where other programs are busy. A fixture that
several tests share is charged to all that ask for it, lines and time, not to the first alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage, CoverageData

SHARED = "fixture:"


def spent() -> float:
    """By this process and its children."""
    return time.process_time() + sum(os.times()[2:4])


class Lines:
    def __init__(self, tree: Path, files: list[str], to: Path) -> None:
        self._tree, self._files, self._to = tree, files, to
        # Not by pyproject.toml, whose `source` leaves out the tests: those that name a constant would not be known.
        include = [str(tree / file) for file in files]
        self._coverage = Coverage(data_file=None, config_file=False, include=include)
        self._seconds: dict[str, float] = {}
        self._asks: dict[str, list[str]] = {}
        self._made: dict[str, tuple[str, float]] = {}
        self._now = ""
        self._coverage.start()

    def _switch(self, context: str) -> str:
        before, self._now = self._now, context
        self._coverage.switch_context(context)
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._asks[item.nodeid] = list(getattr(item, "fixturenames", ()))
        self._switch(item.nodeid)
        began = spent()
        result = yield
        self._seconds[item.nodeid] = spent() - began
        self._switch("")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._switch(SHARED + fixturedef.argname)
        began = spent()
        try:
            return (yield)
        finally:
            self._made[fixturedef.argname] = before, spent() - began
            self._switch(before)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        for test, fixtures in self._asks.items():
            made = [self._made[name] for name in fixtures if name in self._made]
            self._seconds[test] += sum(seconds for first, seconds in made if first != test)
        found = {file: self._tests_of(data, self._tree / file) for file in self._files}
        self._to.write_text(json.dumps({"seconds": self._seconds, "lines": found}))

    def _tests_of(self, data: CoverageData, path: Path) -> dict[int, list[str]]:
        sharing: dict[str, set[str]] = {}
        for test, fixtures in self._asks.items():
            for fixture in fixtures:
                sharing.setdefault(SHARED + fixture, set()).add(test)
        return {
            line: sorted(set().union(*(sharing.get(name, {name}) for name in contexts if name)))
            for line, contexts in data.contexts_by_lineno(str(path.resolve())).items()
            if any(contexts)
        }
