"""Records that are read by forked processes: the same as by a thread, and no process outlives its trainer."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from murmuration.data.batch.function_reader import FunctionReader, ReadFailsError
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.draw.micro_batch import EMPTY
from murmuration.data.index.unit_table import UnitTable
from murmuration.data.store.place import UnreadableError

LIKE = {"x": torch.zeros(1, 2, 3), "y": torch.zeros(1, dtype=torch.int64), "none": torch.zeros(1, 0)}
KEY = b"k" * 32


def read(number: np.ndarray) -> dict[str, Tensor]:
    (one,) = number.tolist()
    if one % 7 == 3:
        raise ValueError(f"record {one} is torn")
    if one % 11 == 5:
        return {"x": torch.zeros(1, 9), "y": torch.tensor([one]), "none": torch.zeros(1, 0)}
    rows = 1 + one % 2
    drawn = torch.full((rows, 2, 3), random.random() + float(np.random.rand())) + torch.rand(rows, 2, 3)
    return {"x": drawn + one, "y": torch.full((rows,), one), "none": torch.zeros(rows, 0)}


def one_row(number: np.ndarray) -> dict[str, Tensor]:
    return {name: tensor[:1] for name, tensor in read(number).items()}


TABLE = UnitTable.of_names("person", [number % 17 for number in range(60)])
CASES: dict[str, tuple[Callable[[np.ndarray], dict[str, Tensor]], SlotRows, list[int]]] = {
    "records": (one_row, SlotRows(), [*range(50), EMPTY, EMPTY]),
    "views": (read, SlotRows(views=2), [*range(40, 0, -1), EMPTY]),
    "units": (one_row, SlotRows(TABLE, 3, "mean", key=bytes(32)), [4, EMPTY, 9, 16, 2]),
    "nobody": (one_row, SlotRows(), [EMPTY, EMPTY]),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_read_what_a_thread_reads(case: str) -> None:
    function, slots, ids = CASES[case]
    reader = FunctionReader(lambda number: function(number), LIKE, slots, KEY, workers=3)  # no lambda can be pickled
    try:
        for step in (1, 2):
            here = FunctionReader(function, LIKE, slots, KEY).fetch(np.array(ids), step)
            there = reader.fetch(np.array(ids), step)
            assert there.bad == here.bad and torch.equal(there.batch.present, here.batch.present)
            assert there.batch.inputs.keys() == here.batch.inputs.keys()
            for name, tensor in here.batch.inputs.items():
                assert torch.equal(there.batch.inputs[name], tensor), name
    finally:
        reader.close()


def ended(reader: FunctionReader) -> bool:
    assert reader._processes is not None
    return all(each._exit is not None and not alive(each._number) for each in reader._processes._all)


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_work_is_shared_and_processes_end_with_the_reader() -> None:
    def pid(number: np.ndarray) -> dict[str, Tensor]:
        time.sleep(0.01)
        return {"y": torch.tensor([os.getpid()])}

    reader = FunctionReader(pid, {"y": torch.zeros(1, dtype=torch.int64)}, key=KEY, workers=2)
    seen = set(reader.fetch(np.arange(64), 1).batch.inputs["y"].tolist())
    assert len(seen) == 2 and os.getpid() not in seen
    reader.close()
    reader.close()
    assert ended(reader) and not any(map(alive, seen))


@pytest.mark.parametrize("how", ["crash", "exit", "killed", "custom"])
def test_the_death_of_a_process_stops_the_run_in_a_sentence_that_names_no_record(how: str, capfd: Any) -> None:
    class Custom(BaseException):
        pass

    def deadly(number: np.ndarray) -> dict[str, Tensor]:
        if number[0] == 37:
            if how == "custom":
                raise Custom("record 37")
            if how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGSEGV if how == "crash" else signal.SIGKILL)
        return {"y": torch.zeros(1, dtype=torch.int64)}

    reader = FunctionReader(deadly, {"y": torch.zeros(1, dtype=torch.int64)}, key=KEY, workers=2)
    code = {"crash": "-11", "exit": "3", "killed": "-9", "custom": "1"}[how]
    with pytest.raises(UnreadableError, match=rf"ended \(exit code {code}\)") as caught:
        reader.fetch(np.arange(64), 1)
    reader.close()
    assert "37" not in str(caught.value) + "".join(capfd.readouterr()) and ended(reader)


def test_what_fails_in_all_processes_alone_is_found_before_a_run() -> None:
    here = os.getpid()

    def as_cuda(number: np.ndarray) -> dict[str, Tensor]:
        if os.getpid() != here:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return {"y": torch.zeros(1, dtype=torch.int64)}

    reader = FunctionReader(as_cuda, {"y": torch.zeros(1, dtype=torch.int64)}, key=KEY, workers=1)
    with pytest.raises(ReadFailsError, match=r"all of 8 records .* try workers=0"):
        reader.try_first(100)
    reader.close()


def test_what_a_scheduler_sends_to_the_whole_job_ends_no_process() -> None:
    reader = FunctionReader(one_row, LIKE, key=KEY, workers=1)
    assert reader._processes is not None
    reader.fetch(np.array([1]), 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        os.kill(reader._processes._all[0]._number, number)
    assert reader.fetch(np.array([1]), 2).batch.present.all()
    reader.close()


ORPHANS = """
import os, sys, time
import numpy as np, torch
from murmuration.data.batch.function_reader import FunctionReader, ReadFailsError
reader = FunctionReader(lambda number: {"y": torch.zeros(1)}, {"y": torch.zeros(1)}, workers=2)
print(*[each._number for each in reader._processes._all], flush=True)
time.sleep(600)
"""


def test_no_process_outlives_a_trainer_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        numbers = [int(word) for word in trainer.stdout.readline().split()]
        assert len(numbers) == 2 and all(map(alive, numbers))
        trainer.kill()
    last = time.monotonic() + 30
    while any(map(alive, numbers)) and time.monotonic() < last:
        time.sleep(0.05)
    assert not any(map(alive, numbers))
