"""Gaussian noise as a pure function of (key of the step, step, parameter, element), from an AES-256-CTR keystream.

Because a draw does not depend on the rank that makes it, each element of the model gets the same single draw at any
world size and ZeRO stage, replicas agree without communication, and a resumed step repeats its noise bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Self

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from murmuration.accounting.metrics import PlannedMetric
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.draw.poisson import StepKey, by_step
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.box_muller import direction_in_place, radius_in_place

BLOCK_BYTES = 16  # one AES block: two 64-bit uniforms, hence two normals
# The scratch of a chunk fits into the second-level cache: 94 million normals per second on one core of an AMD EPYC with
# AVX-512, where numpy's own log, sin and cos give 38 million (python benchmarks/noise.py).
CHUNK_BLOCKS = 1 << 14
NOISE_CHUNK = 1 << 20
"""Elements yielded at a time, so that the noise of a large embedding is never in memory as a whole."""


class AESNoise:
    """Cryptographic noise: anyone who cannot break AES-256 cannot distinguish it from true randomness."""

    generator = "aes-256-ctr"

    def __init__(self, key: bytes | StepKey, std: float, divisor: float) -> None:
        """A `key` of bytes is used for all steps."""
        self._key = by_step(key)
        self.std = std
        self.divisor = divisor

    def at(self, std: float) -> Self:
        other = copy(self)
        other.std = std
        return other

    def correlation(self, step: int) -> None:
        """Draws of different steps are independent."""

    def prepare(self, step: int) -> None:
        """Does nothing: noise is drawn when it is needed."""

    @property
    def grid(self) -> float:
        return 0.0

    @staticmethod
    def of(key: bytes | StepKey, plan: PrivacyPlan) -> AESNoise:
        return AESNoise(key, plan.noise_std, plan.divisor)

    @staticmethod
    def of_metric(key: bytes | StepKey, metric: PlannedMetric, plan: PrivacyPlan) -> AESNoise:
        return AESNoise(key, metric.std, plan.divisor)

    def chunks(
        self, step: int, fragments: Sequence[Fragment], device: torch.device, dtype: torch.dtype = torch.float64
    ) -> Iterator[tuple[Fragment, Tensor]]:
        for fragment in in_chunks(fragments):
            if dtype not in (torch.float32, torch.float64):
                raise ValueError(f"noise is drawn in float64 or rounded to float32, not in {dtype}")
            numpy_type = np.float64 if dtype == torch.float64 else np.float32
            drawn = self.draw(step, fragment.parameter, fragment.start, fragment.length, numpy_type)
            yield fragment, torch.from_numpy(drawn).to(device)

    def draw(
        self, step: int, parameter: int, start: int, length: int, dtype: type[np.floating] = np.float32
    ) -> np.ndarray:
        """Noise for elements [start, start + length) of one parameter; float32 is the float64 draw, rounded."""
        out = np.empty(length, dtype)
        if length == 0:
            return out
        # Drawn in fp64 whatever is asked for, so that fp32 noise is the rounded fp64 noise and not another draw.
        # Normals come in pairs, each from one block of the cipher, whose counter is the place in the parameter. So an
        # element has the same number whichever rank holds it, and however shards are cut.
        first, last = start // 2, (start + length - 1) // 2 + 1
        stream = self._keystream(step, parameter, first, last - first)
        scratch = Scratch(min(CHUNK_BLOCKS, last - first))
        for block in range(first, last, CHUNK_BLOCKS):
            normals = scratch.normals(stream, min(CHUNK_BLOCKS, last - block), self.std)
            offset = 2 * block - start
            cut_off = max(0, -offset)
            target = out[offset + cut_off : offset + len(normals)]
            target[...] = normals[cut_off : cut_off + len(target)]
        return out

    def _keystream(self, step: int, parameter: int, block: int, count: int):
        """40 bits for the step, 24 for the parameter, 64 for the block: no two draws of a key share a counter."""
        if not (0 <= step < 2**40 and 0 <= parameter < 2**24 and 0 <= block < 2**64 - count):
            raise ValueError(f"step {step} or parameter {parameter} does not fit the noise counter")
        counter = (step << 88 | parameter << 64 | block).to_bytes(BLOCK_BYTES, "big")
        return Cipher(algorithms.AES256(self._key(step)), modes.CTR(counter)).encryptor()


class Scratch:
    """Memory of one draw, reused for every chunk of it."""

    def __init__(self, blocks: int) -> None:
        self.zeros = bytes(blocks * BLOCK_BYTES)
        self.words = bytearray(blocks * BLOCK_BYTES + BLOCK_BYTES)  # the cipher requires room for one more block
        self.normal = np.empty((blocks, 2))
        self.floats = np.empty((6, blocks))
        """The first row contains the radii of the last draw."""

    def word_pair(self, at: int) -> tuple[int, int]:
        """The words from which the last draw made a pair of normals."""
        first, second = np.frombuffer(self.words, "<u8", count=2, offset=at * BLOCK_BYTES).tolist()
        return first, second

    def normals(self, stream, count: int, std: float) -> np.ndarray:
        """Box-Muller in fp64 on 64-bit uniforms: tails reach 9.4 standard deviations."""
        stream.update_into(memoryview(self.zeros)[: count * BLOCK_BYTES], self.words)
        words = np.frombuffer(self.words, "<u8", count=2 * count).reshape(count, 2)
        radius, sine, cosine, *scratch = self.floats[:, :count]
        radius[...] = words[:, 0]
        sine[...] = words[:, 1].view("<i8")
        radius_in_place(np, radius, (scratch[0], scratch[1], scratch[2]), std)
        direction_in_place(np, sine, cosine, (scratch[0], scratch[1]))
        normals = self.normal[:count]
        np.multiply(radius, cosine, out=normals[:, 0])
        np.multiply(radius, sine, out=normals[:, 1])
        return normals.reshape(-1)


def in_chunks(fragments: Sequence[Fragment], most: int = NOISE_CHUNK) -> Iterator[Fragment]:
    """Fragments of at most so many elements, in the given order."""
    for fragment in fragments:
        for offset in range(0, fragment.length, most):
            yield replace(
                fragment,
                start=fragment.start + offset,
                length=min(most, fragment.length - offset),
                position=fragment.position + offset,
            )
