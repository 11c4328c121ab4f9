"""One share of the tests that were asked for, where the machine has no time for all: `tests/ci.py` says which."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.times import Times, dealt

WANTED = "TEST_SHARE"
"""The variable: share/shares, where the first one is 0."""
CHEAP = 0.2
"""Seconds of a test that is too cheap to stand in the table."""


class Share:
    """The plugin. Files stay whole, for their fixtures; of every end-to-end file the cheapest test stays."""

    def __init__(self, wanted: str) -> None:
        self.number, self.shares = map(int, wanted.split("/"))

    @pytest.hookimpl(trylast=True)  # of what the markers have left
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        table = Times.read().tests
        costs = {item: table.get(item.nodeid.removeprefix("tests/"), CHEAP) for item in items}
        files: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            files[item.nodeid.partition("::")[0]].append(item)
        sums = {name: sum(costs[item] for item in held) for name, held in files.items()}
        parts = dealt(sums, max(1, min(self.shares, len(files))))  # none is empty: pytest fails without a test
        mine = {item for name in parts[self.number % len(parts)] for item in files[name]}
        mine |= {
            min(held, key=lambda item: costs[item]) for held in files.values() if held[0].path.match("end_to_end/*")
        }
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = [item for item in items if item in mine]
