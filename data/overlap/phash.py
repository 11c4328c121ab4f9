"""64-bit perceptual hashes: which of the lowest 8 x 8 cosine frequencies of a picture lie above their median.

This is imagehash's pHash, on 32 x 32 pixels of luma. Copies that were re-encoded or resized differ in a few bits, other
pictures in about 32; a crop of a few per cent counts as another picture.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

VERSION = 1
DECODED = 64  # the side to which pictures are decoded before they are averaged down
_SIDE, _LOW = 32, 8
_LUMA = np.array([299, 587, 114], dtype=np.float64) / 1000


def perceptual_hashes(pixels: np.ndarray) -> np.ndarray:
    """uint64 [n] from uint8 [n, 64, 64, 3]."""
    luma = pixels @ _LUMA
    small = luma.reshape(-1, _SIDE, DECODED // _SIDE, _SIDE, DECODED // _SIDE).mean(axis=(2, 4))
    low = _cosines() @ small @ _cosines().T
    # Rounded more coarsely than rounding errors: in a flat picture all frequencies but one are 0, on every machine.
    flat = low.reshape(-1, _LOW * _LOW).round(6)
    bits = flat > np.median(flat, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


def hamming(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.bitwise_count(one ^ other)


@lru_cache(maxsize=1)
def _cosines() -> np.ndarray:
    """The first rows of the cosine transform (type II, not normalised, like scipy's default)."""
    frequency, place = np.arange(_LOW)[:, None], np.arange(_SIDE)[None, :]
    return 2 * np.cos(np.pi * frequency * (2 * place + 1) / (2 * _SIDE))
