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

from tests import ci, times
from tests.support import cpu_seconds
from tests.support.launching import ROOT
from tests.support.share import Share
from tests.times import Times, dealt

GROUPS = {
    "lint": [0, 60.0], "core": [1900, 400.0], "units": [1000, 1200.0], "end to end": [200, 1000.0],
    "oldest": [400, 300.0], "start and imports": [0, 100.0],
}  # fmt: skip
SLOW = {
    "end_to_end/test_a.py": 400.0, "end_to_end/test_b.py": 390.0, "end_to_end/test_c.py": 200.0,
    "train/test_d.py": 100.0, "contrib/test_e.py": 50.0,
}  # fmt: skip
TABLE = Times(2.0, GROUPS, {"train/test_a.py::one": 5.0}, SLOW)


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


WANTED = {0.5: (1, 0), 1.0: (2, 0), 1.8: (3, 2), 4.0: (5, 3)}
"""By the speed of a machine: so many shares, and so many of them too dear for it."""


@pytest.mark.parametrize("own_unit", WANTED)
def test_slow_tests_take_the_time_that_is_left_and_successive_commits_take_other_shares(own_unit: float) -> None:
    plan = ci.planned(TABLE, own_unit, 2, 7, 50)
    slow = [ci.with_slow(plan, TABLE, number) for number in range(20)]
    assert slow[0].steps() == [*plan.steps(), (["test-slow"], [])]
    shares, dear = slow[0].slow_shares, slow[0].too_dear
    begun = ci.COLLECTION * own_unit / 2 / 60
    sums = [sum(SLOW[file] for file in part) * own_unit / 2 / 60 + begun for part in dealt(SLOW, shares)]
    left = min(42.0 - plan.minutes, ci.SLOW)
    assert {each.slow_share for each in slow} == {n for n in range(shares) if sums[n] <= left}
    assert len({each.slow_share for each in slow}) == shares - dear and (shares, dear) == WANTED[own_unit]
    for each in slow:
        assert each.minutes == pytest.approx(plan.minutes + sums[each.slow_share]), "the estimate counts them"
        assert each.share_of(["test-slow"]) == {"TEST_SHARE": f"{each.slow_share}/{shares}"}
        assert f"of the slow tests share {each.slow_share + 1} of {shares}" in each.text()
        assert f"{shares - dear - 1} of {shares} shares of the slow tests" in each.left_out() or shares - dear == 1
        assert (f"{dear} shares of them that need more time" in each.left_out()) == (dear > 0)
        assert "marked by_hand or that the table does not know" in each.left_out()
    assert all(len(part) == 1 or sums[n] <= left for n, part in enumerate(dealt(SLOW, shares)))


def test_where_no_time_is_left_no_slow_test_runs_and_the_last_line_says_so() -> None:
    for own_unit, cores in ((200.0, 1), (5.0, 1)):
        plan = ci.planned(TABLE, own_unit, cores, 7, 50)
        slow = ci.with_slow(plan, TABLE, 7)
        assert slow == plan and "test-slow" not in str(slow.steps())
        assert slow.left_out().endswith("the slow tests, for which no time is left (make test-slow)")
        assert "of the slow tests none" in slow.text()


def test_shares_hold_every_file_once_and_cost_about_the_same() -> None:
    costs = {f"file {number}": float(number % 17 + 1) for number in range(100)}
    shares = dealt(costs, 6)
    assert sorted(name for share in shares for name in share) == sorted(costs)
    sums = [sum(costs[name] for name in share) for share in shares]
    assert max(sums) - min(sums) <= max(costs.values())


class Item(SimpleNamespace):
    __hash__ = object.__hash__  # pyright: ignore


def shared(wanted: str, tests: list[str], **marks: Callable[[str], bool]) -> set[str]:
    """The tests of a share; which of them have which mark."""
    dropped: list[Item] = []
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items)))
    items = [
        Item(
            nodeid=name, path=ROOT / name.partition("::")[0],
            get_closest_marker=lambda mark, name=name: mark in marks and marks[mark](name),
        )
        for name in tests
    ]  # fmt: skip
    Share(wanted).pytest_collection_modifyitems(config, items)  # pyright: ignore
    assert sorted(item.nodeid for item in [*items, *dropped]) == sorted(tests), "none is lost in silence"
    return {item.nodeid for item in items}


def test_every_end_to_end_file_has_a_test_in_each_share_and_every_other_test_is_in_one() -> None:
    files = [f"tests/train/test_{letter}.py" for letter in "abcdef"] + ["tests/end_to_end/test_x.py"]
    tests = [f"{file}::{test}" for file in files for test in ("one", "two", "three")]
    shares = [shared(f"{number}/{of}", tests) for number, of in ((90, 99), (0, 3), (1, 3), (2, 3))]
    assert shares.pop(0), "more shares than files"
    assert all(any("end_to_end" in name for name in share) for share in shares)
    for file in files:
        whole = {name for name in tests if name.startswith(file)}
        assert sum(whole <= share for share in shares) == 1, "a file stays whole, in one share"
        if "end_to_end" not in file:
            assert sum(bool(whole & share) for share in shares) == 1


def test_slow_shares_are_those_of_the_plan_and_hold_no_end_to_end_test_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Times, "read", classmethod(lambda cls: TABLE))
    tests = [
        f"tests/{file}::{test}"
        for file in [*SLOW, "model/test_never_measured.py"]
        for test in ("one", "two", "by hand")
    ]

    def is_by_hand(name: str) -> bool:
        return name.endswith("by hand")

    for number, files in enumerate(dealt(SLOW, 3)):
        mine = shared(f"{number}/3", tests, slow=lambda _: True, by_hand=is_by_hand)
        assert mine == {f"tests/{file}::{test}" for file in files for test in ("one", "two")}


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


@pytest.mark.parametrize("fails", ["test-rest", "test-oldest", "test-slow"])
def test_the_oldest_packages_run_beside_the_rest_and_their_failure_counts(made: Made, fails: str) -> None:
    told, calls = made(0.5, fails)
    assert sorted(calls[:2]) == [" 1 --keep-going build/oldest/.ready", " 1 --keep-going test"]
    assert sorted(calls[2:4]) == [" 1 --keep-going test-oldest", " 1 --keep-going test-rest"]
    assert calls[4:] == ["0/1 1 --keep-going test-slow"], "at last, with nothing beside them"
    lines = ["5 passed in 1.00s", "= 1 failed, 2 passed in 2.00s ="]
    oldest_last = lines if fails == "test-oldest" else lines[::-1]
    assert told[2:4] == (oldest_last if fails != "test-slow" else lines[:1] * 2), "told one after the other"
    assert told[-1].startswith(
        f"failed in make {fails}: 17 passed, 1 failed. Ran: make test test-rest test-oldest test-slow."
    )


def test_what_ci_runs_is_all_there_is_and_a_table_is_made_by_targets_that_exist() -> None:
    def commands(target: str) -> str:
        made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        return made.stdout.replace("\\\n", " ")

    for gate in ("ruff check", "ruff format --check", "lint-imports"):
        assert gate in commands("test"), "make test has the lint gates"
    marks = {"test": "core and not slow", "test-rest": "not core and not slow", "test-slow": "slow"}
    for target, marked in marks.items():
        assert re.findall(r'-m pytest -m "?(.*?)"? -q', commands(target)) == [marked]
        assert "--ignore" not in commands(target)
    assert all("-m pytest" in commands(target) for target in times.TARGETS + times.SLOW)


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


def test_the_slow_tests_of_the_table_are_measured_apart_and_by_file() -> None:
    lines = [
        json.dumps({"test": f"{name}.py::{test}", "group": group, "seconds": 4.0})
        for group, name in (("slow", "a"), ("slow", "b"), ("by hand", "c"), ("units", "b")) for test in ("one", "two")
    ]  # fmt: skip
    found = Times.of_lines(lines, 4.0)
    assert found.slow == {"a.py": 8.0, "b.py": 8.0} and set(found.tests) == {"b.py::one", "b.py::two"}
    assert "a.py: 4.0 s, at most 2.0 s in the table" not in found.doubled(TABLE), "twice, and no more"
    assert found.doubled(Times(4.0, {}, found.tests, {"a.py": 3.0})) == [
        "a.py: 8.0 s, 3.0 s in the table", "b.py: 8.0 s, at most 2.0 s in the table",
    ]  # fmt: skip
    written = TABLE.with_slow_of(found)
    assert written.slow == SLOW | {"a.py": 4.0, "b.py": 4.0}, "the machine of this table is twice as fast"
    assert (written.unit, written.groups, written.tests) == (2.0, GROUPS, TABLE.tests)


@pytest.mark.parametrize(("marks", "group"), [({"slow"}, "slow"), ({"slow", "by_hand"}, "by hand"), (set(), "units")])
def test_a_test_is_counted_where_ci_runs_it(marks: set[str], group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)  # `make test-oldest` sets it
    item = Item(path=ROOT / "tests" / "train" / "test_a.py", get_closest_marker=lambda mark: mark in marks)
    assert cpu_seconds.group_of(item) == group  # pyright: ignore


def test_the_table_is_small_and_knows_every_group() -> None:
    table = Times.read()
    assert set(GROUPS) <= set(table.groups) and table.unit > 0 and len(table.tests) < 400
    assert all(seconds >= 2.0 for seconds in table.tests.values())
    assert table.slow and all((ROOT / "tests" / file).exists() for file in table.slow), (
        "the deal of CI has no empty share"
    )
