"""Gaussian noise as a pure function of (key, step, parameter, element), from an AES-256-CTR keystream.

Because the draw does not depend on who asks, each element of the model gets the same one draw at any world size
and ZeRO stage, replicas agree without talking, and a resumed step repeats its noise bit by bit.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from accounting.plan import PrivacyPlan

BLOCK_BYTES = 16  # one AES block: two 64-bit uniforms, hence two normals
CHUNK_BLOCKS = 1 << 18


class NoiseMechanism:
    """N(0, std²) per element of the clipped sum, then the division by a constant."""

    def __init__(self, key: bytes, std: float, divisor: float) -> None:
        self._key = key
        self.std = std
        self.divisor = divisor

    @staticmethod
    def of(key: bytes, plan: PrivacyPlan) -> NoiseMechanism:
        return NoiseMechanism(key, plan.noise_std, plan.divisor)

    def draw(self, step: int, parameter: int, start: int, length: int) -> np.ndarray:
        """float32 noise for elements [start, start + length) of one parameter."""
        if length == 0:
            return np.empty(0, np.float32)
        out = np.empty(length, np.float32)
        first, last = start // 2, (start + length - 1) // 2 + 1
        for block in range(first, last, CHUNK_BLOCKS):
            count = min(CHUNK_BLOCKS, last - block)
            normals = self._normals(step, parameter, block, count)
            offset = 2 * block - start
            cut = max(0, -offset)
            piece = normals[cut : cut + length - (offset + cut)]
            out[offset + cut : offset + cut + len(piece)] = piece
        return out

    def _normals(self, step: int, parameter: int, block: int, count: int) -> np.ndarray:
        """Box-Muller in fp64 on 64-bit uniforms: tails reach sqrt(2·ln 2^64) = 9.4 standard deviations."""
        if not (0 <= step < 2**40 and 0 <= parameter < 2**24 and 0 <= block < 2**64 - count):
            raise ValueError(f"step {step} or parameter {parameter} does not fit the noise counter")
        counter = (step << 88 | parameter << 64 | block).to_bytes(BLOCK_BYTES, "big")
        encryptor = Cipher(algorithms.AES256(self._key), modes.CTR(counter)).encryptor()
        words = np.frombuffer(encryptor.update(bytes(count * BLOCK_BYTES)), "<u8").reshape(count, 2)
        radius = np.sqrt(-2.0 * np.log((words[:, 0].astype(np.float64) + 1.0) * 2.0**-64))
        angle = words[:, 1].astype(np.float64) * (2.0 * np.pi * 2.0**-64)
        normals = np.empty((count, 2))
        np.multiply(radius, np.cos(angle), out=normals[:, 0])
        np.multiply(radius, np.sin(angle), out=normals[:, 1])
        normals *= self.std
        return normals.reshape(-1)
