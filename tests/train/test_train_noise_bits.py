"""The very numbers: Box-Muller on AES written out a second time, pinned, and the same on every processor."""

from __future__ import annotations

import hashlib
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.box_muller import direction_in_place, radius_in_place

KEY = bytes(range(32))
ROOT = Path(__file__).resolve().parents[2]


def test_the_noise_is_box_muller_on_aes_256_block_by_block() -> None:
    """Written out a second time: ledgers and resumed runs rely on these very numbers."""
    step, parameter, start, length = 3, 2, 5, 8
    drawn = AESNoise(KEY, 2.0, 1.0).draw(step, parameter, start, length, np.float64)
    block_cipher = Cipher(algorithms.AES256(KEY), modes.ECB()).encryptor()
    for offset, value in enumerate(drawn.tolist()):
        block, half = divmod(start + offset, 2)
        counter = step.to_bytes(5, "big") + parameter.to_bytes(3, "big") + block.to_bytes(8, "big")
        first, second = struct.unpack("<QQ", block_cipher.update(counter))
        angle = 2 * math.pi * second / 2**64
        radius = math.sqrt(-2 * math.log((first + 1) / 2**64))
        expected = 2.0 * radius * (math.sin(angle) if half else math.cos(angle))
        assert value == pytest.approx(expected, rel=1e-14, abs=4e-15)


# Figures of one machine; another processor, numpy or number of threads must draw the very same.
PINNED = "9032198bc765225a"


def test_the_bits_are_pinned_and_float32_is_the_draw_rounded() -> None:
    mechanism = AESNoise(KEY, 2.0, 1.0)
    exact = mechanism.draw(3, 2, 5, 100_001, np.float64)
    assert hashlib.sha256(exact.tobytes()).hexdigest().startswith(PINNED)
    assert np.array_equal(exact.astype(np.float32), mechanism.draw(3, 2, 5, 100_001))


@pytest.mark.rest
def test_vector_instructions_do_not_change_a_bit() -> None:
    """numpy without its AVX paths: what an older processor would draw."""
    features = [name for name in np._core._multiarray_umath.__cpu_dispatch__ if name]  # pyright: ignore
    code = (
        "import hashlib, numpy as np\nfrom murmuration.train.noise.aes import AESNoise\n"
        f"drawn = AESNoise({KEY!r}, 2.0, 1.0).draw(3, 2, 5, 100_001, np.float64)\n"
        "print(hashlib.sha256(drawn.tobytes()).hexdigest())"
    )
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(features), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(PINNED), done.stderr


def test_logarithm_and_sine_are_right_to_rounding_with_numpy_and_with_torch() -> None:
    words = np.random.default_rng(1).integers(0, 2**64, size=(100_000, 2), dtype=np.uint64)
    edges = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 2**62, 3 << 62, 6521908912666391106, 13043817825332782212]
    words[: len(edges), 0] = words[: len(edges), 1] = edges
    radius, sine = words[:, 0].astype(np.float64), words[:, 1].view(np.int64).astype(np.float64)
    same_radius, same_sine = torch.from_numpy(radius.copy()), torch.from_numpy(sine.copy())
    expected = 1.7 * np.sqrt(-2 * np.log((radius + 1) * 2.0**-64))
    angle = words[:, 1].astype(np.float64) * (2 * np.pi / 2**64)
    cosine, *scratch = np.empty((4, len(words)))
    radius_in_place(np, radius, (scratch[0], scratch[1], scratch[2]), 1.7)
    direction_in_place(np, sine, cosine, (scratch[0], scratch[1]))
    assert np.abs(radius - expected).max() < 4e-15 and (radius[expected > 0] / expected[expected > 0]).std() < 4e-16
    assert np.abs(cosine - np.cos(angle)).max() < 4e-15 and np.abs(sine - np.sin(angle)).max() < 4e-15
    assert np.abs(cosine**2 + sine**2 - 1).max() < 4e-15
    same_cosine, *spare = torch.empty(4, len(words), dtype=torch.float64)
    radius_in_place(torch, same_radius, (spare[0], spare[1], spare[2]), 1.7)
    direction_in_place(torch, same_sine, same_cosine, (spare[0], spare[1]))
    for mine, other in ((radius, same_radius), (sine, same_sine), (cosine, same_cosine)):
        assert np.abs(mine - other.numpy()).max() < 4e-15, "only the square root may differ, in its last bit"
