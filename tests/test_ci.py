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
    assert fast.shares == 1 and fast.steps() == [(["test"], ["build/oldest/.ready"]), (["test-rest"], ["test-oldest"])]
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


Made = Callable[[float, str], tuple[list[str], list[str]]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Made:
    """Runs it on a machine of that speed with one core, where make is a script that fails for one target: what was
    told, and what make was called with. On a fast machine, test-rest waits for test-oldest."""
    make = tmp_path / "make"
    make.write_text(
        '#!/bin/sh\necho "$TEST_SHARE $PYTEST_XDIST_AUTO_NUM_WORKERS $*" >> "$0.called"\n'
        'case "$2$TEST_SHARE" in\n'
        'test-rest) until grep -q oldest$ "$0.called"; do :; done ;;\n'
        "*ready*) exit ;;\n"
        "esac\n"
        '[ "$2" = "$FAILS" ] && { echo "= 1 failed, 2 passed in 2.00s ="; exit 2; }\n'
        'echo "5 passed in 1.00s"\n'
    )
    make.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TEST_TIMES", str(tmp_path / "times.jsonl"))
    monkeypatch.delenv("TEST_SHARE", raising=False)  # on a slow machine this test itself runs in a share
    monkeypatch.setattr(Times, "read", classmethod(lambda cls: TABLE))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})

    def run(own_unit: float, fails: str) -> tuple[list[str], list[str]]:
        monkeypatch.setattr(ci, "unit", lambda: own_unit)
        monkeypatch.setenv("FAILS", fails)
        assert ci.main() == 1
        told = capfdbinary.readouterr().out.decode().splitlines()
        return told, (tmp_path / "make.called").read_text().splitlines()

    return run


def test_a_failure_is_the_exit_code_and_all_the_rest_runs_as_well(made: Made) -> None:
    (first, *_, last), calls = made(10.0, "test-rest")
    assert first.startswith("speed: 10.00 s") and "1 core, 5.00 times" in first
    assert last.startswith(
        "failed in make test-rest: 12 passed, 1 failed. Ran: make test test-rest test-oldest. Not run:"
    )
    assert "shares" in last
    assert calls[0] == " 1 --keep-going test" and calls[1].endswith(" 1 --keep-going test-rest") and "/" in calls[1]
    assert len(calls) == 3, "a failure hides none of what comes after it"


@pytest.mark.parametrize("fails", ["test-rest", "test-oldest"])
def test_the_oldest_packages_run_beside_the_rest_and_their_failure_counts(made: Made, fails: str) -> None:
    told, calls = made(1.0, fails)
    assert sorted(calls[:2]) == [" 1 --keep-going build/oldest/.ready", " 1 --keep-going test"]
    assert sorted(calls[2:]) == [" 1 --keep-going test-oldest", " 1 --keep-going test-rest"]
    lines = ["5 passed in 1.00s", "= 1 failed, 2 passed in 2.00s ="]
    assert told[2:4] == (lines if fails == "test-oldest" else lines[::-1]), "told one after the other"
    assert told[-1].startswith(f"failed in make {fails}: 12 passed, 1 failed. Ran: make test test-rest test-oldest.")


def test_what_ci_runs_is_all_that_is_not_slow() -> None:
    def commands(target: str) -> str:
        made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        return made.stdout.replace("\\\n", " ")

    for gate in ("ruff check", "ruff format --check", "lint-imports"):
        assert gate in commands("test"), "make test has the lint gates"
    for target, marked in (("test", "core and not slow"), ("test-rest", "not core and not slow")):
        assert re.findall(r'-m "(.*?)"', commands(target)) == [marked]
        assert "--ignore" not in commands(target)


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
