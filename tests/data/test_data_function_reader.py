"""Micro-batches of records that a function returns: one record at a time, and unusable ones left out."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from murmuration.data.batch.function_reader import FunctionReader, ReadFailsError, Table, as_inputs, as_read
from murmuration.data.batch.slot_rows import SlotRows
from murmuration.data.decode.decode import BadRecord
from murmuration.data.draw.micro_batch import EMPTY, ROW_SHARE
from murmuration.data.index.unit_table import UnitTable

ROOT = Path(__file__).resolve().parents[2]
LIKE = {"x": torch.ones(4, 2), "y": torch.ones(4)}
BAD = {3: "torn", 6: "empty"}


def read(number: np.ndarray) -> dict[str, Tensor]:
    (one,) = number.tolist()
    if one in BAD:
        raise BadRecord(BAD[one])
    return {"x": torch.tensor([[one, -one]]), "y": torch.tensor([one + 0.5], dtype=torch.float64)}


def test_unusable_records_and_free_places_are_absent_and_zero() -> None:
    reader = FunctionReader(read, LIKE)
    found = reader.fetch(np.array([7, 3, EMPTY, 2, 6, EMPTY]), 1)
    assert found.batch.present.tolist() == [True, False, False, True, False, False]
    assert found.batch.inputs["x"].tolist() == [[7, -7], [0, 0], [0, 0], [2, -2], [0, 0], [0, 0]]
    assert found.batch.inputs["y"].tolist() == [7.5, 0, 0, 2.5, 0, 0]
    assert {tensor.dtype for tensor in found.batch.inputs.values()} == {torch.float32}, "as the synthetic ones are"
    assert found.bad == BAD
    assert reader.bad_reasons == {}, "known only once the batch is used"
    reader.report(found)
    assert reader.bad_reasons == BAD


def test_a_row_of_free_places_is_a_micro_batch_of_nobody() -> None:
    found = FunctionReader(read, LIKE).fetch(np.array([EMPTY, EMPTY]), 1)
    assert not found.batch.present.any() and found.batch.inputs["x"].shape == (2, 2) and not found.bad


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_records_of_a_unit_share_its_slot_and_unusable_ones_their_part(reduce: Any) -> None:
    table = UnitTable.of_names("person", ["a", "b", "a", "b", "a", "c", "c"])
    reader = FunctionReader(read, LIKE, SlotRows(table, 3, reduce, key=bytes(32)))
    found = reader.fetch(np.array([0, EMPTY, 1, 2]), 1)
    assert found.batch.inputs["x"][:, 0].tolist() == [0, 2, 4, 0, 0, 0, 1, 0, 0, 5, 0, 0]
    whole = {"mean": (1 / 3, 1.0), "sum": (1.0, 1.0)}[reduce]  # each part of three records, and of the only one
    assert found.batch.inputs[ROW_SHARE].tolist() == pytest.approx([whole[0]] * 3 + [0] * 3 + [whole[1], 0, 0] * 2)
    assert found.batch.present.tolist() == [True, False, True, True] and found.bad == BAD


def test_a_micro_batch_is_not_changed_by_the_next() -> None:
    reader = FunctionReader(read, LIKE)
    first = reader.fetch(np.array([1, 2]), 1).batch
    reader.fetch(np.array([8, 9]), 2)
    assert first.inputs["x"].tolist() == [[1, -1], [2, -2]]


@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (2,), (1, 2, 1)])
def test_another_shape_is_left_out(shape: tuple[int, ...]) -> None:
    reader = FunctionReader(lambda _: {"x": torch.ones(shape), "y": torch.ones(1)}, LIKE)
    found = reader.fetch(np.array([0]), 1)
    assert not found.batch.present.any() and "x has shape" in found.bad[0] and not found.batch.inputs["x"].any()


def raises(error: BaseException) -> Any:
    raise error


GOOD = {"x": torch.ones(1, 2), "y": torch.ones(1)}
FAULTS: dict[str, Any] = {
    "OSError": lambda: raises(OSError("cannot identify image file '/patients/anna.png'")),
    "KeyError": lambda: {}["/patients/anna.png"],
    "ValueError": lambda: raises(ValueError("bad")),
    "TypeError": lambda: None,  # no inputs at all
    "StopIteration": lambda: raises(StopIteration()),
    "MemoryError": lambda: raises(MemoryError()),
    "SystemExit": lambda: raises(SystemExit(3)),
    "RuntimeError": lambda: torch.zeros(2) + torch.zeros(3),
    "AttributeError": lambda: {"x": torch.ones(1, 2), "y": None},
    "cannot hold": lambda: GOOD | {"y": torch.ones(1, dtype=torch.complex64)},
    "x has shape": lambda: GOOD | {"x": torch.ones(1, 3)},
    "synthetic records have": lambda: GOOD | {"z": torch.ones(1)},
    "['x']": lambda: {"x": torch.ones(1, 2)},
}


@pytest.mark.parametrize("reason", FAULTS)
def test_whatever_fails_for_one_record_is_that_records(reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    reader = FunctionReader(lambda number: FAULTS[reason]() if number[0] == 5 else read(number), LIKE)
    found = reader.fetch(np.array([5, 7]), 1)
    assert found.batch.present.tolist() == [False, True] and not found.batch.inputs["x"][0].any()
    assert found.batch.inputs["x"][1].tolist() == [7, -7] and reason in found.bad[5]
    reader.try_first(6)
    assert capfd.readouterr() == ("", ""), "which record it is, and where it lies, is private"


@pytest.mark.parametrize("error", [KeyboardInterrupt])
def test_what_ends_the_program_still_does(error: type[BaseException]) -> None:
    with pytest.raises(error):
        FunctionReader(lambda _: raises(error()), LIKE).fetch(np.array([0]), 1)


@pytest.mark.parametrize("reason", FAULTS)
def test_a_function_that_fails_for_all_is_refused_in_one_sentence_without_a_record(reason: str) -> None:
    reader = FunctionReader(lambda _: FAULTS[reason](), LIKE)
    with pytest.raises(ReadFailsError, match="all of 8 records") as told:
        reader.try_first(1000)
    assert "anna" not in str(told.value) and "\n" not in str(told.value) and told.value.exit_code == 2
    assert told.value.__cause__ is None and told.value.__context__ is None, "a traceback would show them"
    reader.try_first(1)  # a single record is never the reason


def test_a_function_that_changes_its_number_changes_no_other_record() -> None:
    def rude(number: np.ndarray) -> dict[str, Tensor]:
        found = read(number)
        number[:] = EMPTY
        return found

    asked = np.array([1, 2])
    found = FunctionReader(rude, LIKE).fetch(asked, 1)
    assert asked.tolist() == [1, 2] and found.batch.inputs["x"].tolist() == [[1, -1], [2, -2]]


DRAWN = {
    "torch": lambda: torch.rand(1, 2),
    "numpy": lambda: torch.from_numpy(np.random.rand(1, 2)).float(),
    "python": lambda: torch.tensor([[random.random(), random.random()]]),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_what_a_transform_draws_for_a_record_depends_on_no_other_record(kind: str) -> None:
    def transformed(number: np.ndarray) -> dict[str, Tensor]:
        return read(number) | {"x": DRAWN[kind]()}

    def drawn(ids: list[int], step: int = 1, key: bytes = b"k" * 32) -> list[list[float]]:
        return FunctionReader(transformed, LIKE, key=key).fetch(np.array(ids), step).batch.inputs["x"].tolist()

    DRAWN[kind]()
    whole = drawn([1, 2, 4])
    assert drawn([EMPTY, 2, 4])[1:] == drawn([3, 2, 4])[1:] == whole[1:], "an absent record, or one that fails"
    every = [*whole, *drawn([1, 2], step=2), *drawn([1, 2], key=b"l" * 32)]
    assert len({tuple(each) for each in every}) == len(every), "each record, step and key has its own"


@pytest.mark.parametrize("kind", DRAWN)
def test_a_program_draws_what_it_would_have_drawn_without_reading(kind: str) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = DRAWN[kind]().tolist()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    FunctionReader(lambda number: read(number) | {"x": DRAWN[kind]()}, LIKE).fetch(np.array([1, 3, 2]), 1)
    assert DRAWN[kind]().tolist() == expected


def test_threads_take_turns() -> None:
    """The first waits in the function for a second one, which must not come as long as it is there."""
    inside, entered, met, overlaps = threading.Lock(), threading.Event(), threading.Event(), []

    def alone(number: np.ndarray) -> dict[str, Tensor]:
        if not inside.acquire(blocking=False):
            overlaps.append(number)
            met.set()
            return read(number)
        entered.set()
        met.wait(0.2)
        inside.release()
        return read(number)

    reader = FunctionReader(alone, LIKE)
    threads = [threading.Thread(target=reader.fetch, args=(np.array([number]), 1)) for number in (1, 2)]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert not overlaps


def _in_memory() -> TensorDataset:
    return TensorDataset(torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), torch.arange(9.0))


class Shifted(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + 1, y


TABLE = UnitTable.of_names("person", ["a", "b", "a", "b", "a", "c", "c", "d", "c"])
PLACED = {
    "records": (SlotRows(), [7, 3, EMPTY, 0, EMPTY]),
    "none": (SlotRows(), [EMPTY, EMPTY]),
    "units": (SlotRows(TABLE, 2, "mean", key=bytes(32)), [0, EMPTY, 3, 2]),
    "sums": (SlotRows(TABLE, 3, "sum", key=bytes(32)), [2, 3]),
}


@pytest.mark.parametrize("rows", PLACED)
@pytest.mark.parametrize("kind", ["whole", "part", "part of a part", "subclass"])
def test_a_dataset_in_memory_gives_what_it_gives_item_by_item(kind: str, rows: str) -> None:
    whole = _in_memory()
    data = {
        "whole": whole,
        "part": Subset(whole, [8, 1, 2, 0, 4, 3, 7, 6, 5]),
        "part of a part": Subset(Subset(whole, range(8, -1, -1)), [4, 3, 2, 1, 0, 5, 6, 7, 8]),
        "subclass": Shifted(*whole.tensors),
    }[kind]
    at_once, n = as_read(data, None)
    assert n == 9 and isinstance(at_once, Table) == (kind != "subclass")
    like = {"0": torch.zeros(1, 2), "1": torch.zeros(1)}
    slots, ids = PLACED[rows]
    found = FunctionReader(at_once, like, slots).fetch(np.array(ids), 1)
    one_by_one = FunctionReader(lambda number: as_inputs(data[int(number[0])]), like, slots).fetch(np.array(ids), 1)
    assert found.bad == one_by_one.bad == {}
    assert torch.equal(found.batch.present, one_by_one.batch.present)
    assert found.batch.inputs.keys() == one_by_one.batch.inputs.keys()
    for name, tensor in one_by_one.batch.inputs.items():
        assert torch.equal(found.batch.inputs[name], tensor) and found.batch.inputs[name].dtype is tensor.dtype


def test_a_dataset_in_memory_of_another_type_or_shape_is_read_as_any_other() -> None:
    data = _in_memory()
    read, _ = as_read(data, None)
    ids = np.array([2, EMPTY, 5])
    wide = FunctionReader(read, {"0": torch.zeros(1, 2).double(), "1": torch.zeros(1)}).fetch(ids, 1)
    assert torch.equal(wide.batch.inputs["0"][[0, 2]], data.tensors[0][[2, 5]].double())
    other = FunctionReader(read, {"0": torch.zeros(1, 3), "1": torch.zeros(1)}).fetch(ids, 1)
    assert other.bad.keys() == {2, 5} and not other.batch.present.any()


def test_a_trained_tensor_in_a_dataset_gets_no_gradient() -> None:
    read, _ = as_read(TensorDataset(torch.ones(3, 2, requires_grad=True)), None)
    found = FunctionReader(read, {"0": torch.zeros(1, 2)}).fetch(np.array([1]), 1)
    assert not found.batch.inputs["0"].requires_grad


class Plain(TensorDataset):
    """Read one by one, as a subclass."""


ROWS = {
    "outside": [0, 9, 1],
    "far outside": [0, 2**70, 1],
    "none": [None, 1, 2],
    "of many": [[0], [1, 2], 3],
    "a mask": torch.tensor([True, False, True]),
    "short words": np.array([3, 0, 1], np.uint8),
    "two dimensions": [[0], [1], [2]],
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("nested", [False, True])
def test_rows_of_which_one_is_missing_are_read_one_by_one(rows: str, nested: bool) -> None:
    whole, part = _in_memory(), Subset[Any]
    data = part(whole, ROWS[rows])
    data = part(data, [0, 1, 2]) if nested else data
    slow = part(Plain(*whole.tensors), ROWS[rows])
    like, ids = {"0": torch.zeros(1, 2), "1": torch.zeros(1)}, np.array([0, EMPTY, 1, 2])
    found = FunctionReader(as_read(data, None)[0], like).fetch(ids, 1)
    one_by_one = FunctionReader(as_read(slow, None)[0], like).fetch(ids, 1)
    assert found.bad.keys() == one_by_one.bad.keys()
    assert torch.equal(found.batch.present, one_by_one.batch.present)
    torch.testing.assert_close(found.batch.inputs, one_by_one.batch.inputs)


class Doubled(Tensor):
    def __getitem__(self, index: Any) -> Any:
        return 2 * super().__getitem__(index)


ODD = {
    "16 bits": lambda x: x.to(torch.uint16),
    "8 bits": lambda x: x.to(torch.float8_e4m3fn),
    "sparse": lambda x: x.to_sparse(1),
    "a subclass": lambda x: x.as_subclass(Doubled),
}


@pytest.mark.parametrize("kind", ODD)
def test_columns_that_are_no_plain_tensors_are_read_one_by_one(kind: str) -> None:
    column = ODD[kind](torch.arange(1.0, 19.0).view(9, 2))
    like = {"0": torch.zeros(1, 2, dtype=column.dtype)}
    found = FunctionReader(as_read(TensorDataset(column), None)[0], like).fetch(np.array([8, EMPTY, 0]), 1)
    wanted = torch.stack([column[8], torch.zeros(2).to(column.dtype), column[0]])
    assert found.bad == {} and torch.equal(found.batch.inputs["0"].float(), wanted.float())


def test_a_sparse_row_is_a_bad_record() -> None:
    def read(number: np.ndarray) -> dict[str, Tensor]:
        row = torch.ones(1, 2)
        return {"x": row.to_sparse() if number[0] == 1 else row}

    found = FunctionReader(read, {"x": torch.zeros(1, 2)}).fetch(np.array([0, 1]), 1)
    assert found.bad.keys() == {1} and found.batch.present.tolist() == [True, False]


class Uncopied(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            raise TypeError("is not copied")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_cannot_be_copied_is_that_records_fault(workers: int) -> None:
    def odd(number: np.ndarray) -> dict[str, Tensor]:
        rows = torch.ones(1, 2)
        return {"x": rows.as_subclass(Uncopied) if number[0] == 5 else rows, "y": torch.ones(1)}

    reader = FunctionReader(odd, LIKE, workers=workers)
    found = reader.fetch(np.array([4, 5, 6]), 1)
    reader.close()
    assert found.batch.present.tolist() == [True, False, True] and found.bad.keys() == {5}


def test_no_rows_are_taken_one_by_one() -> None:
    assert Table.of(Subset(_in_memory(), np.array([], dtype=np.int64))) is None  # pyright: ignore[reportArgumentType]


def test_what_pillow_warns_of_in_a_programs_own_pictures_reaches_no_console_and_a_bomb_is_an_error() -> None:
    """The console is a public sink, and such a warning describes a record. In a process of its own: pytest has filters
    of its own."""
    script = (
        "import warnings, murmuration.train.library.training; from PIL import Image\n"
        "warnings.warn_explicit('Corrupt EXIF data', UserWarning, 'TiffImagePlugin.py', 1, 'PIL.TiffImagePlugin')\n"
        "try: warnings.warn('too many pixels', Image.DecompressionBombWarning)\n"
        "except Image.DecompressionBombWarning: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (done.stdout, done.stderr) == ("refused\n", "")
