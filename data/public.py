"""Ordinary shuffled epochs, for PUBLIC data only: every record exactly once per epoch, no privacy claimed.

Epochs are one endless stream cut into batches, so every step has exactly `batch` records and no epoch drops
its tail. A step's ids are a pure function of (key, step): resuming needs the step number and nothing else.
Integers only (raw Philox output, stable sort), because numpy promises its higher-level shuffles for one
build only.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np


class PublicEpochs:
    """`ids(step)` for endless epochs over `records` public records."""

    def __init__(self, records: int, batch: int, key: bytes) -> None:
        if records < 1 or batch < 1:
            raise ValueError(f"{records} records in batches of {batch}: both must be at least 1")
        self.records, self.batch, self._key = records, batch, key
        self._cached: tuple[int, np.ndarray] | None = None

    def ids(self, step: int) -> np.ndarray:
        """The `batch` ids of one step, sorted (for sequential reads; order within a batch carries nothing).

        An id can occur twice where a batch spans two epochs.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        at, end = step * self.batch, (step + 1) * self.batch
        parts: list[np.ndarray] = []
        while at < end:
            epoch, start = divmod(at, self.records)
            stop = min(self.records, start + end - at)
            parts.append(self._order(epoch)[start:stop])
            at += stop - start
        return np.sort(np.concatenate(parts))

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            seed = hashlib.blake2b(struct.pack("<Q", epoch), key=self._key[:64], digest_size=16, person=b"mur-epochs")
            raw = np.random.Philox(key=np.frombuffer(seed.digest(), dtype="<u8")).random_raw(self.records)
            self._cached = epoch, np.argsort(raw, kind="stable").astype(np.int64, copy=False)
        return self._cached[1]
