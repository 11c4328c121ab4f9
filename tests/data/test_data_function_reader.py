"""Micro-batches of records that a function returns: one record at a time, and unusable ones left out."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from murmuration.data.batch.function_reader import FunctionReader
from murmuration.data.decode.decode import BadRecord
from murmuration.data.draw.micro_batch import EMPTY

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


@pytest.mark.parametrize("names", [("x",), ("x", "y", "z"), ("x", "z")])
def test_other_names_are_refused(names: tuple[str, ...]) -> None:
    reader = FunctionReader(lambda _: {name: torch.ones(1, 2) for name in names}, LIKE)
    with pytest.raises(ValueError, match="other inputs"):
        reader.fetch(np.array([0]), 1)


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
