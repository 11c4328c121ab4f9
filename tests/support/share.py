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
    """The plugin. Files stay whole, for their fixtures; of every end-to-end file the cheapest test stays, unless only
    slow ones were asked for."""

    def __init__(self, wanted: str) -> None:
        self.number, self.shares = map(int, wanted.split("/"))

    @pytest.hookimpl(trylast=True)  # of what the markers have left
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        all_slow = all(item.get_closest_marker("slow") for item in items)
        mine = self.of_slow(items) if all_slow else self.of_others(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = [item for item in items if item in mine]

    def of_slow(self, items: list[pytest.Item]) -> set[pytest.Item]:
        """Of a file that was never measured, nobody knows whether CI has time for it."""
        files = dealt(Times.read().slow, self.shares)[self.number]
        return {
            item
            for item in items
            if item.nodeid.partition("::")[0].removeprefix("tests/") in files and not item.get_closest_marker("by_hand")
        }

    def of_others(self, items: list[pytest.Item]) -> set[pytest.Item]:
        table = Times.read().tests
        costs = {item: table.get(item.nodeid.removeprefix("tests/"), CHEAP) for item in items}
        files: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            files[item.nodeid.partition("::")[0]].append(item)
        sums = {name: sum(costs[item] for item in held) for name, held in files.items()}
        parts = dealt(sums, max(1, min(self.shares, len(files))))  # none is empty: pytest fails without a test
        mine = {item for name in parts[self.number % len(parts)] for item in files[name]}
        return mine | {
            min(held, key=lambda item: costs[item]) for held in files.values() if held[0].path.match("end_to_end/*")
        }
