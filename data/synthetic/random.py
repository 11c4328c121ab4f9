"""Random numbers for synthetic pictures: number j of record i is a hash of (seed, i, j), on any device.

The hash uses only integers, and gives the same ones on CPU and GPU, in any batch and any order; torch's own generators
promise neither. A record draws the same count of numbers whatever values it drew before, so records of a batch never
wait for each other. Nothing here is secret: use it for pictures, never for privacy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from murmuration.data.integer_hash import GOLDEN, mixed, shifted

_UNIT = 2.0**-24  # float32 represents 24 bits exactly


class Draws:
    """One stream per record of a batch; each call continues where the last one stopped."""

    def __init__(self, keys: Tensor) -> None:
        self._keys, self._used = keys, 0

    @classmethod
    def of(cls, seed: int, records: Sequence[int], device: torch.device | str = "cpu") -> Draws:
        digest = hashlib.blake2b(str(seed).encode(), digest_size=8, person=b"mur-draws").digest()
        base = int.from_bytes(digest, "little", signed=True)
        return cls(mixed(torch.tensor(list(records), dtype=torch.int64, device=device) * GOLDEN + base))

    @property
    def batch(self) -> int:
        return len(self._keys)

    @property
    def device(self) -> torch.device:
        return self._keys.device

    def branch(self, number: int) -> Draws:
        """A separate stream: the numbers one part of a picture draws do not shift those of another part."""
        return Draws(mixed(self._keys ^ ((number + 1) * 0x9E3779B97F4A7C1 & 0x7FFFFFFFFFFFFFFF)))

    def some(self, rows: Tensor) -> Draws:
        """The same streams for a part of the records."""
        part = Draws(self._keys[rows])
        part._used = self._used
        return part

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """float32 [batch, *shape] in [low, high)."""
        return self._unit(math.prod(shape)).view(self.batch, *shape) * (high - low) + low

    def choice(self, count: int, *shape: int) -> Tensor:
        """int64 [batch, *shape] in 0..count-1."""
        return (self._unit(math.prod(shape)) * count).to(torch.int64).clamp_(max=count - 1).view(self.batch, *shape)

    def normal(self, *shape: int) -> Tensor:
        """float32 [batch, *shape], standard normal (Box-Muller: never beyond 5.8)."""
        count = math.prod(shape)
        half = (count + 1) // 2
        both = self._unit(2 * half).view(self.batch, 2, half)
        length = (both[:, 0] + _UNIT).log_().mul_(-2).sqrt_()
        angle = both[:, 1] * (2 * math.pi)
        pair = torch.cat([length * angle.cos(), length * angle.sin()], dim=1)
        return pair[:, :count].reshape(self.batch, *shape)

    def _unit(self, count: int) -> Tensor:
        """float32 [batch, count] in [0, 1): two numbers from each hash."""
        hashes = (count + 1) // 2
        steps = torch.arange(self._used + 1, self._used + hashes + 1, dtype=torch.int64, device=self.device)
        self._used += hashes
        bits = mixed(self._keys[:, None] + steps * GOLDEN)
        halves = torch.cat([shifted(bits, 40), bits & 0xFFFFFF], dim=1)
        return halves[:, :count].to(torch.float32) * _UNIT
