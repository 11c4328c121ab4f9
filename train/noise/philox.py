"""Noise from Philox4x32-10, drawn on the device that needs it. Fast, and not cryptographic.

Philox passes the statistical test batteries, but nobody claims that its 64-bit key cannot be searched for, or its
output not be predicted: against an adversary who computes that far, the promise of a run with this noise rests on
a heuristic. The ledger names the generator, and the certificate says what that means. Every draw still has its own
counter (step, parameter, block) under a key derived from the run's, whatever the world size. The integers are exact
everywhere; the last bit of a draw depends on torch's square root, so replicas must run on one kind of device. Tested
on CPUs, not yet on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import NOISE_CHUNK, in_chunks
from murmuration.train.noise.box_muller import direction_in_place, radius_in_place

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class PhiloxNoise:
    """A `Noise` whose draws are made where they are added."""

    generator = "philox4x32-10"

    def __init__(self, key: bytes, std: float, divisor: float) -> None:
        derived = HKDF(SHA256(), 8, salt=None, info=b"murmuration/1|philox4x32-10").derive(key)
        self._key = (int.from_bytes(derived[:4], "little"), int.from_bytes(derived[4:], "little"))
        self.std = std
        self.divisor = divisor

    def prepare(self, step: int) -> None:
        """Nothing: drawn when it is asked for."""

    @staticmethod
    def of(key: bytes, plan: PrivacyPlan) -> PhiloxNoise:
        return PhiloxNoise(key, plan.noise_std, plan.divisor)

    def draw(
        self, step: int, parameter: int, start: int, length: int, dtype: type[np.floating] = np.float32
    ) -> np.ndarray:
        """On the CPU, for tests and for whoever wants one stretch."""
        if length == 0:
            return np.empty(0, dtype)
        whole = Fragment("", parameter, start, length, 0)
        drawn = [noise.numpy() for _, noise in self.chunks(step, [whole], torch.device("cpu"))]
        return np.concatenate(drawn).astype(dtype)

    def chunks(
        self, step: int, fragments: Sequence[Fragment], device: torch.device, dtype: torch.dtype = torch.float64
    ) -> Iterator[tuple[Fragment, Tensor]]:
        """Small neighbours are drawn in one go: a launch per parameter would cost more than the numbers."""
        for group in _groups(in_chunks(fragments)):
            normals = self._normals(step, group, device).to(dtype)
            begin = 0
            for chunk in group:
                skip = chunk.start % 2
                yield chunk, normals[begin + skip : begin + skip + chunk.length]
                begin += 2 * _blocks(chunk)

    def _normals(self, step: int, group: Sequence[Fragment], device: torch.device) -> Tensor:
        blocks, names = [], []
        for chunk in group:
            name, first = step << 24 | chunk.parameter, chunk.start // 2
            if not (0 <= step < 2**40 and 0 <= chunk.parameter < 2**24 and 0 <= first < 2**62):
                raise ValueError(f"step {step} or parameter {chunk.parameter} does not fit the noise counter")
            blocks.append(torch.arange(first, first + _blocks(chunk), device=device))
            names += [(name & WORD, name >> 32)]
        block = torch.cat(blocks)
        lengths = torch.tensor([_blocks(chunk) for chunk in group], device=device)
        low, high = torch.tensor(names, device=device).repeat_interleave(lengths, dim=0).unbind(1)
        words = philox(self._key, (block & WORD, block >> 32, low, high))
        return _pairs(words, self.std)


def philox(key: tuple[int, int], counter: Words) -> Words:
    """Ten rounds on 32-bit words that lie in int64 tensors (Salmon et al., 2011)."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # wrap modulo 2^64, as they should
        a, b, c, d = (second >> 32 & WORD) ^ b ^ k0, second & WORD, (first >> 32 & WORD) ^ d ^ k1, first & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return a, b, c, d


def _pairs(words: Words, std: float) -> Tensor:
    a, b, c, d = words
    radius = b.double().mul_(2.0**32).add_(a.double())
    sine = (d << 32 | c).double()
    cosine, *scratch = (torch.empty_like(radius) for _ in range(4))
    radius_in_place(torch, radius, (scratch[0], scratch[1], scratch[2]), std)
    direction_in_place(torch, sine, cosine, (scratch[0], scratch[1]))
    return torch.stack((radius * cosine, radius * sine), dim=1).view(-1)


def _groups(chunks: Iterator[Fragment]) -> Iterator[list[Fragment]]:
    group: list[Fragment] = []
    for chunk in chunks:
        if group and sum(other.length for other in group) + chunk.length > NOISE_CHUNK:
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _blocks(chunk: Fragment) -> int:
    """Counters that cover the piece, each for an even element and the odd one after it."""
    return (chunk.start + chunk.length - 1) // 2 - chunk.start // 2 + 1
