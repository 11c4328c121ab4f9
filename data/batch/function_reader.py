"""Micro-batches of records that a function returns, such as tensors in memory or a custom data set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from murmuration.data.decode.decode import BadRecord
from murmuration.data.draw.micro_batch import EMPTY, ROW_SHARE, Fetched, MicroBatch

Read = Callable[[np.ndarray], Mapping[str, Tensor]]
"""Maps an array with the number of one record to the model's inputs, by name, each with one row, or with one for each
of the record's views."""


class FunctionReader:
    """A `Reader` for a `Loader`. `read` is called for one record at a time, by one thread at a time, so that the inputs
    of a record cannot depend on the others that were drawn.

    A record for which it raises BadRecord, or returns another shape than that of `like`, is absent; n does not change.
    It may return up to `rows` rows for a record, whose losses are averaged.
    """

    in_flight = 1

    def __init__(self, read: Read, like: Mapping[str, Tensor], rows: int = 1) -> None:
        self._read, self._rows = read, rows
        self._empty = {name: torch.zeros_like(tensor[:1]) for name, tensor in like.items()}
        self._lock = threading.Lock()
        self.bad_reasons: dict[int, str] = {}

    def fetch(self, ids_row: np.ndarray, step: int) -> Fetched:
        del step
        present = torch.zeros(len(ids_row), dtype=torch.bool)
        count = len(ids_row) * self._rows
        inputs = {name: tensor.repeat(count, *[1] * (tensor.dim() - 1)) for name, tensor in self._empty.items()}
        shares = torch.zeros(count)
        bad: dict[int, str] = {}
        with self._lock:
            for place in np.flatnonzero(ids_row != EMPTY):
                try:
                    found = self._one(ids_row[place : place + 1])
                except BadRecord as error:
                    bad[int(ids_row[place])] = str(error)
                    continue
                own = slice(place * self._rows, place * self._rows + len(next(iter(found.values()))))
                for name, rows in found.items():
                    inputs[name][own] = rows.to(inputs[name].dtype)
                shares[own] = 1 / (own.stop - own.start)
                present[place] = True
        return Fetched(MicroBatch(inputs if self._rows == 1 else {**inputs, ROW_SHARE: shares}, present), bad)

    def _one(self, number: np.ndarray) -> dict[str, Tensor]:
        found = dict(self._read(number))
        if found.keys() != self._empty.keys():
            raise ValueError(
                f"read() returns other inputs than those of the synthetic records, {sorted(self._empty)}; both are the "
                "model's inputs, so give both the same names"
            )
        shape = next(iter(found.values())).shape
        count = min(max(1, shape[0]), self._rows) if shape else 1
        for name, rows in found.items():
            wanted = [count, *self._empty[name].shape[1:]]
            if list(rows.shape) != wanted:
                raise BadRecord(f"{name} has shape {list(rows.shape)}, not {wanted}")
        return found

    def report(self, fetched: Fetched) -> None:
        """Note the bad records. Private: which records are unusable reveals something about them."""
        for record, reason in fetched.bad.items():
            self.bad_reasons.setdefault(record, reason)

    def close(self) -> None:
        """Nothing to close."""
