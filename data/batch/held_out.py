"""Private records that are drawn like all others but not trained on, so that accuracy can be measured on them.

Whether a record is held out is a function of its number and the share only. It depends on no key, so that a run that
continues with new keys holds out the same records, and on no content, so that neighbouring data sets are split alike.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from murmuration.data.batch.loader import Reader
from murmuration.data.draw.micro_batch import Fetched
from murmuration.data.integer_hash import GOLDEN, mixed

HELD_OUT = "held_out"


def is_held_out(records: np.ndarray, share: float) -> np.ndarray:
    """Whether each record number is held out; the placeholder of an empty slot is not."""
    hashes = mixed((records.astype(np.int64) + 1) * GOLDEN).view(np.uint64)
    return (hashes < np.uint64(round(share * 2**63) * 2)) & (records >= 0)


class HeldOutReader:
    """Marks the held-out records of each micro-batch; the step removes the mark and trains on the rest."""

    def __init__(self, inner: Reader, share: float) -> None:
        self._inner, self._share = inner, share

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight

    def fetch(self, ids_row: np.ndarray, step: int) -> Fetched:
        found = self._inner.fetch(ids_row, step)
        mark = torch.from_numpy(is_held_out(ids_row, self._share))
        return Fetched(replace(found.batch, inputs={**found.batch.inputs, HELD_OUT: mark}), found.bad)

    def report(self, fetched: Fetched) -> None:
        self._inner.report(fetched)

    def close(self) -> None:
        self._inner.close()
