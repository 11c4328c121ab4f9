"""Every fault that the fuzzer ever found stays mended; and the fuzzer notices what it is there for.

`make fuzz` looks for new ones. Here nothing is left to chance, and everything is over in seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from murmuration.accounting.ledger.chain import LedgerError
from murmuration.data.store.place import ShardError
from murmuration.data.store.tar import walk
from tests.fuzz.engine import ACCEPTED
from tests.fuzz.mutate_json import dumps, loads, mutate_json
from tests.fuzz.mutate_tar import mutate_tar
from tests.fuzz.run import CORPUS, TARGETS
from tests.fuzz.targets_accounting import chained, mutate_ledger
from tests.fuzz.targets_index import shard
from tests.support.acc_world import parsed

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted(f"{path.parent.name}/{path.name}" for path in CORPUS.glob("*/*"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which forks: this one may have threads."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@cache
def replayed() -> dict[str, dict[str, Any]]:
    done = run("tests.fuzz", "--replay")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found, done.stderr
    return {entry["case"]: entry for entry in found}


@pytest.mark.parametrize("case", CASES)
def test_what_was_found_once_is_answered_now(case: str) -> None:
    answer = replayed()[case]
    assert not answer["fault"], f"{answer['fault']} {answer['place']}: {answer['said']}"


@pytest.mark.parametrize("name", TARGETS)
def test_files_as_they_should_be_are_accepted(name: str) -> None:
    """What is mutated: a target that refuses it tries nothing."""
    honest = [answer for case, answer in replayed().items() if case.startswith(f"{name}/honest ")]
    assert honest
    for answer in honest:
        assert answer["code"] in ACCEPTED and not answer["fault"], f"{answer['fault']}: {answer['said']}"


def test_every_kept_case_belongs_to_a_target() -> None:
    assert {case.partition("/")[0] for case in CASES} <= set(TARGETS)


def test_the_command_runs_a_target_and_says_how_many_cases_it_ran() -> None:
    done = run("tests.fuzz", "stats", "--cases", "25", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("stats: 25 cases"), done.stdout
    assert "warning: 25 cases show little; give 500 at least" in done.stderr


def test_each_planted_fault_is_noticed_and_what_is_no_fault_is_not() -> None:
    done = run("tests.fuzz.planted")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "nothing": "",
        "refuse": "",
        "raise": "traceback of KeyError",
        "loop": "no answer within the limit of time",
        "sleep": "no answer within the limit of time",
        "hog": "traceback of MemoryError",
        "crash": "the process died of SIGSEGV",
        "other code": "exit code 1",
        "no word": "a refusal without a word",
        "printed traceback": "a printed traceback",
        "escape sequence": "letters that a terminal obeys",
        "endless message": "a message that is too long to be read",
        "lie": "a lie",
        "recursion": "traceback of RecursionError",
        "lone surrogate": "traceback of UnicodeEncodeError",
        "nothing again": "",
    }


def a_ledger() -> bytes:
    lines = [
        {"kind": kind, "phase": 0, "facts": {"noise": {"std": 20.0}}} for kind in ("run", "open", "commit", "open")
    ]
    return chained("".join(json.dumps(line) + "\n" for line in lines).encode())


def test_mutated_ledgers_get_past_their_hashes() -> None:
    """Or nothing behind the hashes would be tried."""
    seed, chance, reached = a_ledger(), Random(1), 0
    assert len(parsed(seed)) == 4
    for _ in range(300):
        try:
            reached += parsed(mutate_ledger(chance, seed, seed)) != parsed(seed)
        except LedgerError:
            continue
    assert reached > 60


def test_mutated_shards_get_past_their_checksums() -> None:
    seed, chance, outcomes = shard(range(2)), Random(1), Counter[str]()
    for _ in range(300):
        data = mutate_tar(chance, seed, seed)[: 1 << 16]
        try:
            list(walk(lambda at, count, data=data: data[at : at + count], len(data), "shard", whole=True))
            outcomes["walked"] += 1
        except ShardError as error:
            outcomes["checksum" if "(checksum)" in str(error) else "other"] += 1
    assert outcomes["walked"] > 30 and outcomes["other"] > 100, outcomes


def test_mutated_json_is_mostly_json_and_sometimes_what_no_library_writes() -> None:
    seed, chance, outcomes = {"a": [1, 2.5, "x"], "b": {"c": None}}, Random(1), Counter[str]()
    assert json.loads(dumps(loads(json.dumps(seed)))) == seed
    for _ in range(3000):
        text = dumps(mutate_json(chance, loads(json.dumps(seed))))
        outcomes["twice"] += text.count('"a":') > 1
        outcomes["NaN"] += "NaN" in text
        outcomes["deep"] += "[" * 200 in text or '{"a":' * 200 in text
        outcomes["digits"] += "9" * 5000 in text
        outcomes["surrogate"] += "\\ud800" in text
        try:
            json.loads(text)
            outcomes["json"] += 1
        except (ValueError, RecursionError):
            outcomes["no json"] += 1
    assert outcomes["json"] > 1500 and all(outcomes[what] for what in ("twice", "NaN", "deep", "digits", "surrogate"))
