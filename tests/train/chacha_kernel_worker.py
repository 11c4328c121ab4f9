"""Compares the ChaCha20 kernel in Triton's interpreter with torch; needs TRITON_INTERPRET=1 at its start."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise import chacha
from murmuration.train.noise.chacha_triton import BLOCKS
from murmuration.train.noise.chacha_triton import keystream as kernel

CPU = torch.device("cpu")
KEYS = (bytes(range(32)), bytes(range(255, 223, -1)))


def words() -> list[bool]:
    """Around the borders of programs, of the counter's halves and of signs."""
    found = []
    for key, step in zip(KEYS, (1, 2**32 - 1), strict=True):
        fixed = chacha.fixed_words(key, step, CPU)
        for blocks, first in ((1, 2**31), (BLOCKS, 2**32 - 5), (2 * BLOCKS + 1, 2**63 - 500)):
            block = torch.arange(first, first + blocks)
            parameter = torch.arange(blocks) + 2**32 - blocks
            found.append(torch.equal(kernel(fixed, block, parameter), chacha.keystream(fixed, block, parameter)))
    return found


def known() -> bool:
    """The first and the last word of RFC 8439, section 2.3.2."""
    fixed, block = chacha.fixed_words(KEYS[0], 0, CPU), torch.tensor([0x09000000 << 32 | 1])
    found = kernel(fixed, block, torch.tensor([0x4A000000]))
    return [int(word) & 0xFFFFFFFF for word in found[::15, 0]] == [0xE4E7F110, 0x4E3C50A2]


def noise() -> tuple[bool, int]:
    """All of a draw is the same with the kernel, which is launched once for a group of fragments."""
    fragments = [Fragment(str(i), 2**20 * i, 3 * i, 100 + i, 0) for i in range(4)]
    calls = 0

    def counted(fixed: Tensor, block: Tensor, parameter: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return kernel(fixed, block, parameter)

    def drawn() -> list[Tensor]:
        return [values.clone() for _, values in chacha.ChaChaNoise(KEYS[0], 2.0, 1.0).chunks(3, fragments, CPU)]

    plain = drawn()
    chacha.KERNEL_DEVICES, chacha._kernel = ("cpu",), lambda: counted
    return all(torch.equal(one, other) for one, other in zip(plain, drawn(), strict=True)), calls


if __name__ == "__main__":
    same, calls = noise()
    print("RESULTS " + json.dumps({"words": words(), "known": known(), "noise": same, "calls": calls}))
