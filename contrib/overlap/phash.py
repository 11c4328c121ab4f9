"""64-bit perceptual hashes: which of the lowest 8 x 8 cosine frequencies of a picture lie above their median.

This is imagehash's pHash, on 32 x 32 pixels of luma. Copies that were re-encoded or resized differ in a few bits, other
pictures in about 32. A crop of a few per cent is another picture to it, so windows are hashed as well: all rectangles
with 90, 95 or 100 % of the width and of the height, in steps of 2.5 %. The hash of a crop is close to that of the
window nearest to it. Whether this is so, and how often a stranger is as close: `benchmarks/overlap.py`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np

VERSION = 2
DECODED = 64  # the side to which pictures are decoded before they are averaged down
_SIDE, _LOW = 32, 8
_STEP, _LENGTHS = 1 / 40, (1, 38 / 40, 36 / 40)  # of windows, as shares of a side
_LUMA = np.array([299, 587, 114], dtype=np.float64) / 1000


def window_hashes(pixels: np.ndarray) -> np.ndarray:
    """uint64 [n, WINDOWS] from uint8 [n, 64, 64, 3]; that of the whole picture comes first."""
    stacked = np.concatenate(_projections())
    count = len(stacked) // _LOW
    low = (stacked @ (pixels @ _LUMA) @ stacked.T).reshape(-1, count, _LOW, count, _LOW).swapaxes(2, 3)
    return _bits(low.reshape(-1, _LOW, _LOW)).reshape(-1, WINDOWS)


def _bits(low: np.ndarray) -> np.ndarray:
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


def _spans() -> list[tuple[float, float]]:
    """Where windows begin and end along one side; the whole side comes first."""
    return [(k * _STEP, k * _STEP + long) for long in _LENGTHS for k in range(round((1 - long) / _STEP) + 1)]


WINDOWS = len(_spans()) ** 2


@lru_cache(maxsize=1)
def _projections() -> list[np.ndarray]:
    """For each span of a side of 64 pixels: its 8 lowest cosine frequencies after averaging it down to 32 pixels."""
    found = []
    for begin, end in _spans():
        edges = np.linspace(begin * DECODED, end * DECODED, _SIDE + 1)
        shares = np.zeros((_SIDE, DECODED))
        for cell, pixel in product(range(_SIDE), range(DECODED)):
            shared = min(edges[cell + 1], pixel + 1) - max(edges[cell], pixel)
            shares[cell, pixel] = max(0.0, shared) / (edges[cell + 1] - edges[cell])
        found.append(_cosines() @ shares)
    return found
