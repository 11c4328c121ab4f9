"""Procedural textures for the non-private warm start of a masked autoencoder (ViP's synthetic phase).

Three families with the statistics that natural images have and flat shapes lack: dead leaves (occlusion and
scale invariance), 1/f colour spectra (correlation at all distances) and domain-warped sines (smooth shading,
after the idea of shader art; the formulas are our own, so no picture or code of anybody needs a licence).
"""

from __future__ import annotations

import numpy as np

FAMILIES = ("dead leaves", "spectrum", "shader")


def texture(side: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [side, side, 3] of a family chosen by `rng`."""
    family = (dead_leaves, spectrum, shader)[int(rng.integers(len(FAMILIES)))]
    return np.clip(family(side, rng) * 255 + 0.5, 0, 255).astype(np.uint8)


def dead_leaves(side: int, rng: np.random.Generator) -> np.ndarray:
    """Opaque discs and rotated boxes with radii by a power law, nearest first, drawn at twice the size."""
    # The smallest radius shrinks with the side, so larger pictures need more leaves to be as full.
    fine, leaves = 2 * side, 8 + 2 * side
    grid = (np.arange(fine, dtype=np.float32) + 0.5) / fine
    # Density ~ r^-3 between the limits: the only exponent for which zooming changes nothing.
    low, high = 1.5 / side, 0.45
    radius = 1 / np.sqrt(rng.uniform(1 / high**2, 1 / low**2, leaves))
    # The last leaves are large, so that no gap is left behind the others.
    radius[-8:] = rng.uniform(0.35, 0.8, 8)
    centre = rng.uniform(-0.05, 1.05, (leaves, 2)).astype(np.float32)
    turn = rng.uniform(0, np.pi, leaves).astype(np.float32)
    box = rng.random(leaves) < 0.4
    colour = _palette(rng, leaves)
    slope = rng.uniform(-0.35, 0.35, (leaves, 2)).astype(np.float32)
    image = np.empty((fine, fine, 3), np.float32)
    image[:] = colour[-1]
    for leaf in range(leaves - 1, -1, -1):
        reach = float(radius[leaf]) * 1.42
        left, right = np.searchsorted(grid, [centre[leaf, 0] - reach, centre[leaf, 0] + reach])
        top, bottom = np.searchsorted(grid, [centre[leaf, 1] - reach, centre[leaf, 1] + reach])
        if left == right or top == bottom:
            continue
        x = grid[None, left:right] - centre[leaf, 0]
        y = grid[top:bottom, None] - centre[leaf, 1]
        if box[leaf]:
            cos, sin = np.cos(turn[leaf]), np.sin(turn[leaf])
            inside = np.maximum(np.abs(cos * x + sin * y), np.abs(cos * y - sin * x)) < radius[leaf]
        else:
            inside = x * x + y * y < radius[leaf] ** 2
        light = 1 + slope[leaf, 0] * x + slope[leaf, 1] * y
        np.copyto(image[top:bottom, left:right], colour[leaf] * light[..., None], where=inside[..., None])
    return image.reshape(side, 2, side, 2, 3).mean(axis=(1, 3))


def spectrum(side: int, rng: np.random.Generator) -> np.ndarray:
    """Gaussian noise with a 1/f^a amplitude, somewhat stretched, its channels mixed as a random palette."""
    across = np.fft.rfftfreq(side).astype(np.float32)[None, :] * np.float32(2 ** rng.uniform(-0.7, 0.7))
    down = np.fft.fftfreq(side).astype(np.float32)[:, None]
    frequency = np.sqrt(across**2 + down**2)
    frequency[0, 0] = 1.0
    amplitude = frequency ** np.float32(-rng.uniform(0.8, 2.0))
    amplitude[0, 0] = 0.0
    white = rng.standard_normal((3, side, side), dtype=np.float32)
    field = np.fft.irfft2(np.fft.rfft2(white) * amplitude, s=(side, side)).astype(np.float32)
    field /= field.std(axis=(1, 2), keepdims=True) + 1e-6
    # Channels of photographs mostly rise and fall together; a little of each is its own.
    mix = np.float32(0.75) * np.ones((3, 1), np.float32) * np.array([1, 0, 0], np.float32)
    mix = mix + rng.normal(0, 0.3, (3, 3)).astype(np.float32)
    level = rng.uniform(0.35, 0.65, 3).astype(np.float32)
    contrast = np.float32(rng.uniform(0.14, 0.26))
    return level + contrast * np.tensordot(field, mix, axes=(0, 1))


def shader(side: int, rng: np.random.Generator, octaves: int = 4) -> np.ndarray:
    """A plane of coordinates bent again and again by its own sines, then coloured by a cosine palette."""
    grid = np.linspace(-1, 1, side, dtype=np.float32) * np.float32(rng.uniform(0.8, 3.0))
    x, y = np.broadcast_to(grid[None, :], (side, side)), np.broadcast_to(grid[:, None], (side, side))
    scale = np.float32(1.0)
    for _ in range(octaves):
        bend, phase = rng.uniform(0.4, 1.6, 4).astype(np.float32), rng.uniform(0, 6.28, 2).astype(np.float32)
        x, y = (
            x + bend[0] / scale * np.sin(bend[1] * scale * y + phase[0]),
            y + bend[2] / scale * np.sin(bend[3] * scale * x + phase[1]),
        )
        scale = scale * np.float32(1.7)
    value = np.sin(x * np.float32(rng.uniform(0.6, 2))) + np.cos(y * np.float32(rng.uniform(0.6, 2)))
    level, swing = rng.uniform(0.35, 0.65, 3), rng.uniform(0.15, 0.45, 3)
    rate, shift = rng.uniform(0.5, 1.6, 3), rng.uniform(0, 6.28, 3)
    channels = [level[i] + swing[i] * np.cos(np.float32(rate[i]) * value + np.float32(shift[i])) for i in range(3)]
    return np.stack(channels, axis=-1)


def _palette(rng: np.random.Generator, count: int) -> np.ndarray:
    """Colours around a few common ones: free colours would average to mud."""
    base = rng.uniform(0.05, 0.95, (4, 3))
    return np.clip(base[rng.integers(4, size=count)] + rng.normal(0, 0.12, (count, 3)), 0, 1).astype(np.float32)
