"""What each test takes of the processor: seconds, user and system, of its process, what it ended, and what it forked.

Unlike the clock, they hardly depend on what else the machine does. `make test-times` and `.ci/run` ask for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import forking

WANTED = "TEST_TIMES"
"""The variable that names the file to which each process of pytest appends its lines."""


def spent() -> float:
    return sum(os.times()[:4]) + forking.seconds()


def group_of(item: pytest.Item) -> str:
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        return "oldest"
    if item.get_closest_marker("by_hand"):
        return "by hand"
    if item.get_closest_marker("slow"):
        return "slow"
    if item.get_closest_marker("core"):
        return "core"
    return "end to end" if "end_to_end" in item.path.parts else "units"


class CPUSeconds:
    """The plugin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.in_tests = 0.0

    def write(self, **line: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begun = spent()
        result = yield
        seconds = spent() - begun
        self.in_tests += seconds
        self.write(test=item.nodeid.removeprefix("tests/"), group=group_of(item), seconds=round(seconds, 2))
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.pluginmanager.hasplugin("dsession"):
            return  # its children are workers, which have written their own lines
        around = spent() + forking.own_seconds() - self.in_tests
        self.write(test=None, group="start and imports", seconds=round(around, 2))
