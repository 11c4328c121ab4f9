"""Exact Poisson sampling: which records take part in step t, as a pure function of (key of t, t).

Record i joins step t iff 32-bit lane i % 4 of AES-256-CTR(key of t, counter = t << 64 | i // 4) is below K, so
q = K / 2^32 exactly, and that q is the one accounted. Only integers take part: a floating-point comparison
that differs between two processors would shift the draw, and ranks would sample a record twice. Nothing
depends on world size, workers or restarts, and the sampler holds no state, so a resumed run needs no seek.

Where records take turns (`parts` above 1), step t draws from the records whose number is t modulo `parts`, and lane i
is of the i-th of those. Which record belongs to which part is public and the same in every segment, because the
accounting counts the turns of each part (docs/proof.md).

The draw must stay secret (amplification assumes it), hence a cipher under a secret key, not a seeded PRNG.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from murmuration.accounting.sampling import AnySampling, CyclicPoisson, Poisson

LANES = 1 << 32
_CHUNK_BYTES = 4 << 20
_ZEROS = bytes(_CHUNK_BYTES)


StepKey = Callable[[int], bytes]
"""The key of a step, which differs from that of every other step: keys of the past can then be forgotten."""


def by_step(key: bytes | StepKey) -> StepKey:
    return key if callable(key) else lambda step: key


@dataclass(frozen=True, eq=False)
class Draw:
    """What was actually drawn; the ledger records these fields, not a config. `ids` is private."""

    step: int
    rule: AnySampling
    records: int
    digest: str
    ids: np.ndarray


class Ids(Protocol):
    @property
    def ids(self) -> np.ndarray: ...


Drawn = TypeVar("Drawn", bound=Ids, covariant=True)


class Sampler(Protocol[Drawn]):
    """Decides which records take part in a step: a function of the step number alone."""

    def draw(self, step: int) -> Drawn: ...


class DrawnInParts(Protocol):
    """A draw that ranks can make together: each asks for a part of the candidates that begins with a multiple of 4."""

    def draw(self, step: int) -> Draw: ...

    def candidates(self, step: int) -> int: ...

    def part(self, step: int, first: int, stop: int) -> np.ndarray: ...

    def whole(self, step: int, ids: np.ndarray) -> Draw: ...


class PoissonSampler:
    """Draws each of `records` records independently with probability threshold / 2^32, or, with `parts` above 1, each
    of those whose turn it is."""

    def __init__(
        self, key: bytes | StepKey, digest_key: bytes | StepKey, records: int, threshold: int, parts: int = 1
    ) -> None:
        """A key given as bytes is the key of all steps."""
        require_keys_and_records(key, digest_key, records)
        if not 1 <= threshold <= LANES:
            raise ValueError(f"threshold {threshold} is outside 1..2**32; q = threshold / 2**32")
        if not 1 <= parts <= records:
            raise ValueError(f"{records} records cannot be dealt into {parts} parts; each part needs one")
        self._key, self._digest_key = by_step(key), by_step(digest_key)
        self.records, self.threshold, self.parts = records, threshold, parts

    @property
    def q(self) -> float:
        return self.threshold / LANES

    def draw(self, step: int) -> Draw:
        """The records of one step, sorted; the same on any rank, at any time."""
        return self.whole(step, self.part(step, 0, self.candidates(step)))

    def candidates(self, step: int) -> int:
        """The number of records that the step draws from."""
        return -(-(self.records - step % self.parts) // self.parts)

    def whole(self, step: int, ids: np.ndarray) -> Draw:
        """The draw whose records are `ids`, put together from its parts."""
        ids.flags.writeable = False
        numbers = (step, self.threshold, self.records, *([] if self.parts == 1 else [self.parts]))
        digest = keyed_digest(self._digest_key(step), numbers, ids)
        rule = Poisson(self.threshold) if self.parts == 1 else CyclicPoisson(self.threshold, self.parts)
        return Draw(step, rule, self.records, digest, ids)

    def part(self, step: int, first: int, stop: int) -> np.ndarray:
        """The records that one step draws from its candidates, of those from `first`, a multiple of 4, up to `stop`."""
        if not 0 <= step < 1 << 64:
            raise ValueError(f"step {step} is outside 0..2**64-1")
        require_part(first, stop, self.candidates(step))
        drawn = lanes_between(self._key(step), step, first, stop, 0, self.threshold)
        return drawn if self.parts == 1 else drawn * self.parts + step % self.parts


def lanes_between(key: bytes, number: int, first: int, stop: int, low: int, high: int) -> np.ndarray:
    """Which of the lanes from `first`, a multiple of 4, up to `stop` of AES-256-CTR(key, counter = number << 64 |
    lane // 4) are at least `low` and below `high`."""
    # An unsigned 64-bit limit: as a 32-bit number 2**32 would wrap to 0 and q = 1 would draw nobody.
    least, limit = np.uint32(low), np.uint64(high - low)
    counter = (number << 64) + first // 4
    stream = Cipher(algorithms.AES256(key), modes.CTR(counter.to_bytes(16, "big"))).encryptor()
    # update_into needs room for one block more than it writes.
    buffer = bytearray(_CHUNK_BYTES + 16)
    found = [np.zeros(0, dtype=np.int64)]
    for start in range(first, stop, _CHUNK_BYTES // 4):
        count = min(_CHUNK_BYTES // 4, stop - start)
        stream.update_into(memoryview(_ZEROS)[: 4 * count], buffer)
        lanes = np.frombuffer(buffer, dtype="<u4", count=count)
        # Below `low` the difference wraps to more than any limit but 2**32, which comes with low = 0 alone.
        found.append(np.flatnonzero(np.less(lanes - least if low else lanes, limit)) + start)
    return np.concatenate(found).astype(np.int64, copy=False)


def keyed_digest(key: bytes, numbers: Sequence[int], ids: np.ndarray) -> str:
    """Keyed, because a bare hash of the ids would let anyone test a guess about who took part."""
    mac = hmac.new(key, struct.pack(f"<{len(numbers)}Q", *numbers), hashlib.sha256)
    mac.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
    return mac.hexdigest()


def require_keys_and_records(key: bytes | StepKey, digest_key: bytes | StepKey, records: int) -> None:
    if (isinstance(key, bytes) and len(key) != 32) or (isinstance(digest_key, bytes) and len(digest_key) < 32):
        raise ValueError("the sampler needs a 32-byte key and a digest key of at least 32 bytes; derive both")
    if records < 1:
        raise ValueError(f"{records} records: nothing to sample from; index the shards first")


def require_part(first: int, stop: int, candidates: int) -> None:
    if first % 4 or not 0 <= first <= stop <= candidates:
        raise ValueError(f"records {first} to {stop} of {candidates} are no part that begins with a cipher block")
