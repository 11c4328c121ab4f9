"""What CI runs on which machine, and what it says of it; what is said of tests that take longer than they did."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import ci
from tests.support.launching import ROOT
from tests.support.share import Share
from tests.times import Times, dealt

GROUPS = {
    "lint": [0, 60.0], "core": [1900, 400.0], "units": [1000, 1200.0], "end to end": [200, 1000.0],
    "oldest": [400, 300.0], "start and imports": [0, 100.0],
}  # fmt: skip
TABLE = Times(2.0, GROUPS, {"train/test_a.py::one": 5.0})


def test_a_fast_machine_runs_everything_and_a_slow_one_what_fits() -> None:
    fast = ci.planned(TABLE, 2.0, 2, 7, 50)
    assert fast.shares == 1 and fast.steps() == [(["test-at-once"], ["lint", "test-oldest"])]
    assert "everything runs" in fast.text() and "slow tests" in fast.left_out()
    for own_unit, cores in ((8.0, 2), (3.0, 1), (5.0, 1)):
        slow = ci.planned(TABLE, own_unit, cores, 7, 50)
        assert slow.shares > 1 and slow.minutes <= ci.MINUTES < slow.whole, slow
        assert slow.steps()[0][0] == ["test"], "lint and core always run"
        assert f"share {slow.share + 1} of {slow.shares}" in slow.text() and "shares" in slow.left_out()
        assert {ci.planned(TABLE, own_unit, cores, number, 50).share for number in range(slow.shares)} == set(
            range(slow.shares)
        ), "successive commits run all shares"
    assert ci.planned(TABLE, 3.0, 1, 0, 50).whole > 1.3 * ci.planned(TABLE, 3.0, 2, 0, 50).whole
    hopeless = ci.planned(TABLE, 200.0, 1, 3, 50)
    assert hopeless.shares > 1, "what cannot fit is still planned, and said"


def test_shares_hold_every_file_once_and_cost_about_the_same() -> None:
    costs = {f"file {number}": float(number % 17 + 1) for number in range(100)}
    shares = dealt(costs, 6)
    assert sorted(name for share in shares for name in share) == sorted(costs)
    sums = [sum(costs[name] for name in share) for share in shares]
    assert max(sums) - min(sums) <= max(costs.values())


def test_every_end_to_end_file_has_a_test_in_each_share_and_every_other_test_is_in_one() -> None:
    class Item(SimpleNamespace):
        __hash__ = object.__hash__  # pyright: ignore

    files = [f"tests/train/test_{letter}.py" for letter in "abcdef"] + ["tests/end_to_end/test_x.py"]
    tests = [f"{file}::{test}" for file in files for test in ("one", "two", "three")]
    dropped: list[Item] = []
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items)))
    shares: list[set[str]] = []
    for number, of in ((90, 99), (0, 3), (1, 3), (2, 3)):
        items = [Item(nodeid=name, path=ROOT / name.partition("::")[0]) for name in tests]
        dropped.clear()
        Share(f"{number}/{of}").pytest_collection_modifyitems(config, items)  # pyright: ignore
        assert sorted(item.nodeid for item in [*items, *dropped]) == sorted(tests), "none is lost in silence"
        shares.append({item.nodeid for item in items})
    assert shares.pop(0), "more shares than files"
    assert all(any("end_to_end" in name for name in share) for share in shares)
    for file in files:
        whole = {name for name in tests if name.startswith(file)}
        assert sum(whole <= share for share in shares) == 1, "a file stays whole, in one share"
        if "end_to_end" not in file:
            assert sum(bool(whole & share) for share in shares) == 1


def test_closing_lines_are_added_up() -> None:
    closing = ["1889 passed, 3 skipped in 508.12s (0:08:28)", "2 failed, 10 passed, 8 deselected in 67.48s (0:01:07)"]
    assert ci.counted(closing) == "1899 passed, 3 skipped, 2 failed, 8 deselected"
    assert ci.counted([]) == "no test"


@pytest.fixture
def made(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> Callable[[float], tuple[list[str], list[str]]]:
    """Runs it on a machine of that speed with one core, where make is a script that fails for lint and test-rest: what
    was told, and what make was called with."""
    make = tmp_path / "make"
    make.write_text(
        '#!/bin/sh\necho "$TEST_SHARE $PYTEST_XDIST_AUTO_NUM_WORKERS $*" >> "$0.called"\ncase "$2" in\n'
        'test-rest) echo "= 1 failed, 2 passed in 2.00s ="; exit 2 ;;\n'
        'lint) echo "1 passed in 1.00s"; exit 2 ;;\n'
        'test-at-once) until grep -q lint "$0.called"; do :; done ;;\n'
        "esac\n"
        'echo "5 passed in 1.00s"\n'
    )
    make.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TEST_TIMES", str(tmp_path / "times.jsonl"))
    monkeypatch.setattr(Times, "read", classmethod(lambda cls: TABLE))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})

    def run(own_unit: float) -> tuple[list[str], list[str]]:
        monkeypatch.setattr(ci, "unit", lambda: own_unit)
        assert ci.main() == 1
        told = capfdbinary.readouterr().out.decode().splitlines()
        return told, (tmp_path / "make.called").read_text().splitlines()

    return run


def test_a_failure_is_the_exit_code_and_all_the_rest_runs_as_well(
    made: Callable[[float], tuple[list[str], list[str]]],
) -> None:
    (first, *_, last), calls = made(10.0)
    assert first.startswith("speed: 10.00 s") and "1 core, 5.00 times" in first
    assert last.startswith(
        "failed in make test-rest: 12 passed, 1 failed. Ran: make test test-rest test-oldest. Not run:"
    )
    assert "shares" in last
    assert calls[0] == " 1 --keep-going test" and calls[1].endswith(" 1 --keep-going test-rest") and "/" in calls[1]
    assert len(calls) == 3, "a failure hides none of what comes after it"


def test_lint_and_the_oldest_packages_run_beside_everything_else_and_their_failure_counts(
    made: Callable[[float], tuple[list[str], list[str]]],
) -> None:
    """Make of the one waits for make of the other."""
    told, calls = made(1.0)
    assert sorted(calls) == [" 1 --keep-going lint test-oldest", " 2 --keep-going test-at-once"]
    assert told[1:3] == ["5 passed in 1.00s", "1 passed in 1.00s"], "told one after the other"
    assert told[-1].startswith(
        "failed in make lint test-oldest: 6 passed. Ran: make test-at-once lint test-oldest. Not"
    )


def test_what_ci_runs_at_once_is_what_make_test_full_runs() -> None:
    def commands(target: str) -> str:
        made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        return made.stdout.replace("\\\n", " ")

    of_core, of_rest, at_once = map(commands, ("test", "test-rest", "test-at-once"))
    for gate in ("ruff check", "ruff format --check", "lint-imports"):
        assert gate in of_core, "make test has the lint gates"
    for told, marked in ((of_core, "core and not slow"), (of_rest, "not core and not slow"), (at_once, "not slow")):
        assert set(re.findall(r'-m "(.*?)"', told)) == {marked}, told
        assert ("--ignore tests/end_to_end" in told) == bool(re.search(r" tests/end_to_end \|\|", told)), (
            "both, or whole"
        )


def test_tests_that_take_twice_as_long_are_named_whatever_the_machine() -> None:
    lines = [
        json.dumps({"test": name, "group": "units", "seconds": seconds})
        for name, seconds in (("train/test_a.py::one", 19.0), ("train/test_b.py::new", 9.0), ("c.py::cheap", 3.0))
    ]
    found = Times.of_lines(lines, 4.0)
    assert found.groups == {"units": [3, 31.0]}
    assert found.doubled(TABLE) == ["train/test_b.py::new: 4.5 s, at most 2.0 s in the table"], "9.5 s are not twice 5"
    assert len(Times.of_lines(lines, 2.0).doubled(TABLE)) == 2
    assert "    19.0 s  train/test_a.py::one" in found.report() and "31 s  units: 3 tests" in found.report()


def test_the_table_is_small_and_knows_every_group() -> None:
    table = Times.read()
    assert set(GROUPS) <= set(table.groups) and table.unit > 0 and len(table.tests) < 400
    assert all(seconds >= 2.0 for seconds in table.tests.values())
