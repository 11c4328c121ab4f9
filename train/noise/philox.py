"""Noise from Philox4x64-10, drawn on the device that needs it. Fast, and not cryptographic.

Philox passes the statistical test batteries, and its key has 128 bits, so nobody searches for it; but nobody claims
that its output cannot be predicted. Against an adversary who finds a way, the promise of a run with this noise rests on
a heuristic. The ledger names the generator, and the certificate says what that means. Every draw has its own counter
(step, parameter, block) under a key derived from the run's, whatever the world size. The integers are exact everywhere;
the last bit of a draw depends on torch's square root, so replicas must run on one kind of device. Tested on CPUs, not
yet on a GPU. (Version 0.1 used Philox4x32-10, whose key has 64 bits; its runs verify, and cannot be continued with it.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.draw.poisson import StepKey, by_step
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import NOISE_CHUNK, in_chunks
from murmuration.train.noise.box_muller import direction_in_place, radius_in_place

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
KEY_BYTES = 16
WORD, HALF = 0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF
PER_BLOCK = 4
"""Normal numbers of one counter: two words each for two pairs."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class PhiloxNoise:
    """A `Noise` whose draws are made where they are added."""

    generator = "philox4x64-10"

    def __init__(self, key: bytes | StepKey, std: float, divisor: float) -> None:
        """A key of bytes is the key of all steps."""
        self._key_of = by_step(key)
        self.std = std
        self.divisor = divisor

    @property
    def grid(self) -> float:
        return 0.0

    def prepare(self, step: int) -> None:
        """Nothing: drawn when it is asked for."""

    @staticmethod
    def of(key: bytes | StepKey, plan: PrivacyPlan) -> PhiloxNoise:
        return PhiloxNoise(key, plan.noise_std, plan.divisor)

    def _key(self, step: int) -> tuple[int, int]:
        info = b"murmuration/1|philox4x64-10"
        derived = HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(self._key_of(step))
        return int.from_bytes(derived[:8], "little"), int.from_bytes(derived[8:], "little")

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
                skip = chunk.start % PER_BLOCK
                yield chunk, normals[begin + skip : begin + skip + chunk.length]
                begin += PER_BLOCK * _blocks(chunk)

    def _normals(self, step: int, group: Sequence[Fragment], device: torch.device) -> Tensor:
        blocks, names = [], []
        for chunk in group:
            name, first = step << 24 | chunk.parameter, chunk.start // PER_BLOCK
            if not (0 <= step < 2**40 and 0 <= chunk.parameter < 2**24 and 0 <= first < 2**62):
                raise ValueError(f"step {step} or parameter {chunk.parameter} does not fit the noise counter")
            blocks.append(torch.arange(first, first + _blocks(chunk), device=device))
            names.append(_signed(name))
        block = torch.cat(blocks)
        lengths = torch.tensor([_blocks(chunk) for chunk in group], device=device)
        name = torch.tensor(names, device=device).repeat_interleave(lengths)
        rest = torch.zeros_like(block)
        return _pairs(philox(self._key(step), (block, name, rest, rest)), self.std)


def philox(key: tuple[int, int], counter: Words) -> Words:
    """Ten rounds on 64-bit words, as int64 tensors that wrap (Salmon et al., 2011)."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(a, MULTIPLIERS[0])
        high1, low1 = _product(c, MULTIPLIERS[1])
        a, b, c, d = high1 ^ b ^ _signed(k0), low1, high0 ^ d ^ _signed(k1), low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return a, b, c, d


def _product(words: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low half of the 128-bit product of unsigned words, of which int64 has the low one alone."""
    low, high = words & HALF, words >> 32 & HALF
    small, large = constant & HALF, constant >> 32
    first, second = low * large, high * small
    carried = (low * small >> 32 & HALF) + (first & HALF) + (second & HALF)
    above = high * large + (first >> 32 & HALF) + (second >> 32 & HALF) + (carried >> 32)
    return above, words * _signed(constant)


def _signed(word: int) -> int:
    """The same 64 bits, as int64 takes them."""
    return word - (1 << 64) if word >> 63 else word


def _unsigned(words: Tensor) -> Tensor:
    """As fp64, rounded once: the exact value's nearest."""
    return (words >> 32 & HALF).double().mul_(2.0**32).add_((words & HALF).double())


def _pairs(words: Words, std: float) -> Tensor:
    """In the order of the elements: two of the first two words, then two of the others."""
    a, b, c, d = words
    radius = torch.stack((_unsigned(a), _unsigned(c)), dim=1).view(-1)
    sine = torch.stack((b, d), dim=1).view(-1).double()
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
    """Counters that cover the piece, each for four elements."""
    return (chunk.start + chunk.length - 1) // PER_BLOCK - chunk.start // PER_BLOCK + 1
