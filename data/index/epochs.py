"""Ordinary shuffled epochs, for PUBLIC data only: every record exactly once per epoch, no privacy claimed.

Epochs are one endless stream cut into batches, so every step has exactly `batch` records and no epoch drops its tail.
A step's ids are a pure function of (key, step): resuming needs only the step number. The order of an epoch is a keyed
permutation that is computed on demand (a Feistel network of integers), so a step costs as much for two billion records
as for a thousand, and no order is kept in memory.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from murmuration.data.integer_hash import mixed

_ROUNDS = 8  # four make a good shuffle of a large set; small sets have small halves and need more


class Epochs(Protocol):
    """The records of each step of a phase, steps counted from zero; every step gets the same number."""

    @property
    def batch(self) -> int: ...

    def ids(self, step: int) -> np.ndarray: ...


class PublicEpochs:
    """`ids(step)` for endless epochs over `records` public records."""

    def __init__(self, records: int, batch: int, key: bytes) -> None:
        if records < 1 or batch < 1:
            raise ValueError(f"{records} records in batches of {batch}: both must be at least 1")
        self.records, self.batch, self._key = records, batch, key

    def ids(self, step: int) -> np.ndarray:
        """The `batch` ids of one step, sorted (for sequential reads; order within a batch has no meaning).

        An id can occur twice if a batch spans two epochs.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        at, end = step * self.batch, (step + 1) * self.batch
        parts: list[np.ndarray] = []
        while at < end:
            epoch, start = divmod(at, self.records)
            stop = min(self.records, start + end - at)
            parts.append(_permuted(np.arange(start, stop, dtype=np.uint64), self.records, self.round_keys(epoch)))
            at += stop - start
        return np.sort(np.concatenate(parts)).astype(np.int64)

    def round_keys(self, epoch: int) -> np.ndarray:
        name = struct.pack("<Q", epoch)
        seed = hashlib.blake2b(name, key=self._key[:64], digest_size=8 * _ROUNDS, person=b"mur-epochs")
        return np.frombuffer(seed.digest(), dtype="<u8")


@dataclass(frozen=True)
class PublicDraw:
    ids: np.ndarray


@dataclass(frozen=True)
class PublicOrder:
    """Public epochs as a sampler whose steps count from one, as in all trainers."""

    epochs: Epochs

    def draw(self, step: int) -> PublicDraw:
        return PublicDraw(self.epochs.ids(step - 1))


class Shuffle:
    """One fixed order of `records` records: `at(places)` gives the records at these places."""

    def __init__(self, records: int, key: bytes) -> None:
        self._epochs = PublicEpochs(records, 1, key)

    def at(self, places: np.ndarray) -> np.ndarray:
        return _permuted(places, self._epochs.records, self._epochs.round_keys(0))


def _permuted(places: np.ndarray, records: int, keys: np.ndarray) -> np.ndarray:
    """The record at each place of the order; every record is at exactly one place."""
    half = max(1, ((records - 1).bit_length() + 1) // 2)
    found = _feistel(places, half, keys)
    # The network shuffles a power of four. Numbers outside the set go through it again until they fall inside.
    while len(outside := np.flatnonzero(found >= np.uint64(records))):
        found[outside] = _feistel(found[outside], half, keys)
    return found


def _feistel(numbers: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = numbers >> shift, numbers & mask
    for key in keys:
        left, right = right, left ^ (mixed((right ^ key).view(np.int64)).view(np.uint64) & mask)
    return (left << shift) | right
