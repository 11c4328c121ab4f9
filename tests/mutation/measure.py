"""python -m tests.mutation.measure GROUP [TEST ...], in the copy: runs the tests of a group and notes what each runs.

With tests named, these alone are run, and what is known of the others stays: for tests that were just written.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.mutation.lines import Lines
from tests.mutation.settings import groups
from tests.mutation.tree import TREE, WORK


def measure(name: str, tests: list[str]) -> int:
    group = groups()[name]
    path = WORK / f"lines-{name}.json"
    known = json.loads(path.read_text()) if tests and path.exists() else None
    # Of the tests, too: a constant that runs nowhere is known by the tests that name it.
    plugin = Lines(TREE, [*group.files, *group.tests], path)
    code = pytest.main(["-q", "-m", "not slow", *(tests or group.tests)], plugins=[plugin])
    if known is not None:
        found = json.loads(path.read_text())
        known["seconds"] |= found["seconds"]
        for file, lines in found["lines"].items():
            for line, of in lines.items():
                own = known["lines"].setdefault(file, {})
                own[line] = sorted({*own.get(line, ()), *of})
        path.write_text(json.dumps(known))
    return code


if __name__ == "__main__":
    sys.exit(measure(sys.argv[1], sys.argv[2:]))
