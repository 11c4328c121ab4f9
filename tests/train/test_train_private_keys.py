"""The library's keys die with their step: what is restored from a backup makes no step again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.accounting.keys import load
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.heads import LAST_STEPS
from murmuration.accounting.ledger.history import History
from murmuration.train.library.own_run import NUMBERS, RESTORED
from tests.support import forking
from tests.support.own_module import RATE, RECORDS, read, run, training

ROOT = Path(__file__).parents[2]
# With room for an epoch or a block that is broken off and charged as well.
ROOMY: dict[str, Any] = {"epsilon": 60, "noise_multiplier": 6.0}
EPOCHS: dict[str, Any] = ROOMY | {"sampling": "allocation", "expected_batch": 6, "steps": 20}
BLOCKS: dict[str, Any] = ROOMY | {"bands": 2, "steps": 8}


@contextmanager
def opened(folder: Path, count: int = 0, **changes: Any) -> Iterator[Any]:
    with training(folder, debug_seed=None, **changes) as found:
        found.prove()
        for number in list(found.steps())[:count]:
            found.step(number, RATE)
        yield found
        found.close()  # without what is saved where the block ends


def segments(folder: Path) -> int:
    return len(History.read(folder / "ledger.jsonl")[0].segments_of(0))


def put_back(backup: Path, place: Path) -> None:
    """In place, as `cp -a` restores: files keep their inodes."""
    for path in sorted(backup.rglob("*")):
        if path.is_file():
            target = place / path.relative_to(backup)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def seen_behind_a_backup(folder: Path, saved: bool = False, **changes: Any) -> Path:
    """Three steps that are saved and kept, and three more whose weights were looked at."""
    with opened(folder / "run", 3, **changes) as found:
        found.save()
        shutil.copytree(folder / "run", folder / "backup")
        for number in (4, 5, 6):
            found.step(number, RATE)
        if saved:
            found.save()
    return folder / "run"


def test_a_restored_ledger_is_refused_and_declared_it_stays_charged(tmp_path: Path) -> None:
    place = seen_behind_a_backup(tmp_path)
    shutil.copyfile(tmp_path / "backup" / "ledger.jsonl", place / "ledger.jsonl")
    with pytest.raises(LedgerError, match="restored") as told, opened(place):
        pass
    assert told.value.exit_code == 5 and "\n" not in str(told.value)
    with opened(place, new_segment="the ledger was lost") as found:
        assert found.done == 3 and segments(place) == 2
        spent = found.epsilon()
        history = found._run.writer.history
        assert sum(each.count for each in history.lost) == 3
    with opened(tmp_path / "whole", 6) as other:
        assert spent == pytest.approx(other.epsilon(), rel=1e-9)


def test_a_ledger_restored_between_two_saves_is_refused_too(tmp_path: Path) -> None:
    """Nothing but the secret file knows of the steps since the last checkpoint."""
    with opened(tmp_path / "run", 1) as found:
        found.save()
        found.step(2, RATE)
        shutil.copyfile(tmp_path / "run" / "ledger.jsonl", tmp_path / "backup")
        found.step(3, RATE)
    shutil.copyfile(tmp_path / "backup", tmp_path / "run" / "ledger.jsonl")
    with pytest.raises(LedgerError, match="restored"), opened(tmp_path / "run"):
        pass


@pytest.mark.parametrize("saved", [False, True])
def test_a_restored_secret_folder_is_refused(tmp_path: Path, saved: bool) -> None:
    place = seen_behind_a_backup(tmp_path, saved)
    put_back(tmp_path / "backup" / "secret", place / "secret")
    with pytest.raises(LedgerError, match="older than the ledger") as told, opened(place):
        pass
    assert told.value.exit_code == 5 and "\n" not in str(told.value)
    with opened(place, new_segment="the secret folder was lost") as found:
        assert found.done == (6 if saved else 3)
        assert segments(place) == (1 if saved else 2), "steps behind a checkpoint are never made again under their keys"


def test_ledger_and_secret_restored_together_are_refused_by_the_checkpoints_beside_them(tmp_path: Path) -> None:
    place = seen_behind_a_backup(tmp_path, saved=True)
    for part in ("secret", "."):
        names = ["ledger.jsonl"] if part == "." else os.listdir(tmp_path / "backup" / part)
        for name in names:
            shutil.copyfile(tmp_path / "backup" / part / name, place / part / name)
    with pytest.raises(LedgerError, match="another or a longer ledger"), opened(place):
        pass


def test_a_whole_directory_that_is_restored_is_the_deviation_that_the_certificate_states(tmp_path: Path) -> None:
    place = seen_behind_a_backup(tmp_path)
    put_back(tmp_path / "backup", place)
    with opened(place) as found:  # cannot be known
        for number in found.steps():
            found.step(number, RATE)
        found.finish()
    assert segments(place) == 1
    assert RESTORED in json.loads((place / "certificate.json").read_text())["known_deviations"]


def test_the_log_of_runs_knows_a_whole_directory_that_is_restored(tmp_path: Path) -> None:
    """Each step, not only those that were saved: its noise would be drawn again over another sum."""
    logged: dict[str, Any] = {"registry": tmp_path / "log", "steps": 12, "epsilon": 30}
    place = seen_behind_a_backup(tmp_path, **logged)
    put_back(tmp_path / "backup", place)
    with pytest.raises(LedgerError, match="restored from a backup"), opened(place, **logged):
        pass
    with opened(place, 1, new_segment="restored", **logged) as found:
        assert found.done == 4 and segments(place) == 2
    history = History.read(place / "ledger.jsonl")[0]
    assert sum(event.count for event in history.charged()) == 7
    with (
        pytest.raises(LedgerError, match=f"logged in {tmp_path / 'log'}, which must know each"),
        opened(place, steps=12),
    ):
        pass  # steps that the log is not told could be made again later
    with opened(place, **logged):
        pass


def test_a_step_that_the_log_of_runs_cannot_note_is_not_gone_on_from(tmp_path: Path) -> None:
    with opened(tmp_path / "run", 1, registry=tmp_path / "log") as found:
        shutil.rmtree(tmp_path / "log" / LAST_STEPS)
        (tmp_path / "log" / LAST_STEPS).touch()
        with pytest.raises(OSError, match=LAST_STEPS):
            found.step(2, RATE)
        with pytest.raises(LedgerError, match="step 2 failed"):
            found.weights()


def test_a_copy_beside_the_original_gets_keys_of_its_own(tmp_path: Path) -> None:
    seen_behind_a_backup(tmp_path)
    with opened(tmp_path / "backup") as found:
        assert found.done == 3 and segments(tmp_path / "backup") == 2


def test_the_link_of_a_step_is_gone_when_it_returns(tmp_path: Path) -> None:
    with opened(tmp_path) as found:
        for number in (1, 2, 3):
            before = load(tmp_path / "secret" / "run.key").chain
            found.step(number, RATE)
            after = load(tmp_path / "secret" / "run.key")
            assert before is not None and after.chain == before.at(number + 1) and before.step == number
            assert after.head is not None and after.head["length"] == len(History.read(tmp_path / "ledger.jsonl")[1])
            assert before.state not in found._run.chain.held()


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from tests.support.own_module import RATE, training
fsync = os.fsync

def killed_behind(writes):
    left = writes
    def dying(descriptor):
        nonlocal left
        fsync(descriptor)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    with training(Path(sys.argv[1]), debug_seed=None, steps=200, epsilon=60, noise_multiplier=6.0) as found:
        found.prove()
        os.fsync = dying
        for number in list(found.steps())[:12]:
            found.step(number, RATE)
            if number % 4 == 0:
                found.save()

for writes in (1, 2, 3, 4, 5, 6, 7, 23):  # all of one step, the next, and those of a save
    child = os.fork()  # of a process that has imported and computed nothing
    if child == 0:
        torch.set_num_threads(1)  # in a fork PyTorch makes its pool anew, and two threads at once may both find none
        killed_behind(writes)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    opens = Path(sys.argv[1], "ledger.jsonl").read_text().count('"kind":"open"')
    print(writes, os.waitstatus_to_exitcode(status), opens, flush=True)
"""


def test_killed_at_any_write_it_continues_and_no_step_is_charged_less(tmp_path: Path) -> None:
    """Behind each durable write in turn, in one run directory that is opened again each time."""
    place = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(place)]
    done = forking.run(command, cwd=ROOT, capture_output=True, text=True)
    told = [[int(word) for word in line.split()] for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [code for _, code, _ in told] == [-signal.SIGKILL] * 8, done.stderr
    opens = [count for _, _, count in told]
    assert opens == sorted(opens) and opens[-1] > 11
    with opened(place, 1, steps=200, **ROOMY) as found:
        history = found._run.writer.history
        assert sum(event.count for event in history.charged()) == history.steps()[0] == opens[-1] + 1


def taken_part(
    folder: Path, orders: list[np.ndarray], names: list[str | None], steps: list[int]
) -> Counter[tuple[int, int]]:
    """How often each record took part in each segment's epoch, by its name, over openings with these orders."""
    found: Counter[tuple[int, int]] = Counter()
    for order, name, count in zip(orders, names, steps, strict=True):

        def of_order(numbers: np.ndarray, order: np.ndarray = order) -> Any:
            return read(order[numbers])

        settings = {"reader": of_order} | EPOCHS
        with opened(folder, order=name, **settings) as training_:
            for number in list(training_.steps())[:count]:
                epoch = (number - 1) // training_.plan.sampling.period
                for record in training_.phase.made.records.draw(number).ids:
                    found[segments(folder) * 100 + epoch, int(order[record])] += 1
                training_.step(number, RATE)
            training_.save()
    return found


@pytest.mark.parametrize("names", [(None, None), ("a", "b"), ("a", None)])
def test_another_order_never_goes_on_with_an_epoch(tmp_path: Path, names: tuple[str | None, str | None]) -> None:
    orders = [np.arange(RECORDS), np.arange(RECORDS)[::-1].copy()]
    counts = taken_part(tmp_path, orders, list(names), [5, 15])
    assert segments(tmp_path) == 2 and max(counts.values()) == 1
    with opened(tmp_path, order=names[1], **EPOCHS) as found:
        history = found._run.writer.history
        # Two epochs were planned; the one that was broken off is charged as well.
        assert sum(event.count for event in history.charged()) == 3
        assert not found._own._continued_within()


def test_the_same_order_goes_on_with_the_epoch_and_says_whose_word_that_is(tmp_path: Path) -> None:
    orders = [np.arange(RECORDS), np.arange(RECORDS)]
    counts = taken_part(tmp_path, orders, ["a", "a"], [5, 15])
    assert segments(tmp_path) == 1 and set(counts.values()) == {1} and len(counts) == 2 * RECORDS
    with opened(tmp_path, order="a", **EPOCHS) as found:
        assert NUMBERS in certified(found, tmp_path)


def certified(found: Any, folder: Path) -> list[str]:
    found.finish()
    return json.loads((folder / "certificate.json").read_text())["known_deviations"]


@pytest.mark.parametrize(("done", "order", "expected"), [(3, "a", 2), (4, "a", 1), (4, None, 2), (3, None, 2)])
def test_a_block_that_was_begun_is_never_gone_on_with(
    tmp_path: Path, done: int, order: str | None, expected: int
) -> None:
    settings = BLOCKS | {"order": order}
    with opened(tmp_path, done, **settings) as found:
        found.save()
    with opened(tmp_path, **settings) as found:
        assert found.done == done and segments(tmp_path) == expected
        for number in found.steps():
            found.step(number, RATE)
        assert not found._own._continued_within()


def test_an_opening_without_a_step_begins_no_further_segment(tmp_path: Path) -> None:
    for _ in range(3):
        with opened(tmp_path, **BLOCKS):
            pass
    assert segments(tmp_path) == 1


def test_runs_that_an_earlier_version_began_go_on(tmp_path: Path) -> None:
    """Their secret file tells nothing of the ledger, and its link lies at the last checkpoint."""
    run(tmp_path, 2)
    path = tmp_path / "secret" / "run.key"
    content = json.loads(path.read_text())
    del content["head"], content["check"]
    content["check"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content))
    run(tmp_path, 2)
    assert segments(tmp_path) == 1 and load(path).head is not None


def test_a_step_takes_a_few_durable_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = os.fsync
    with opened(tmp_path, 1) as found:
        monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append(descriptor), real(descriptor))[1])
        for number in (2, 3, 4):
            found.step(number, RATE)
    assert len(calls) <= 6 * 3
