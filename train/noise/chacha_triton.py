"""ChaCha20 as one GPU kernel: each thread keeps the state of a block in registers and writes its words once.

As separate operations, each of the 20 rounds goes through memory many times. The words are the same bit for bit.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCKS, WARPS = 128, 4


@triton.jit
def _rotated(word, BY: tl.constexpr):  # pyright: ignore
    return (word << BY) | (word >> (32 - BY))


@triton.jit
def _quarter(a, b, c, d):  # pyright: ignore
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _row(fixed, ROW: tl.constexpr, BLOCKS: tl.constexpr):  # pyright: ignore
    """Four words that all blocks share, repeated for each block."""
    word = fixed + 4 * ROW + tl.zeros([BLOCKS], tl.int32)
    one, two = tl.load(word).to(tl.uint32, bitcast=True), tl.load(word + 1).to(tl.uint32, bitcast=True)
    return one, two, tl.load(word + 2).to(tl.uint32, bitcast=True), tl.load(word + 3).to(tl.uint32, bitcast=True)


@triton.jit
def _counter(fixed, block, parameter, at, there):  # pyright: ignore
    """The last row: the number of the block in two words, the parameter, the step."""
    number = tl.load(block + at, mask=there, other=0)
    name = tl.load(parameter + at, mask=there, other=0).to(tl.uint32)
    step = tl.load(fixed + 12 + tl.zeros_like(at)).to(tl.uint32, bitcast=True)
    return number.to(tl.uint32), (number >> 32).to(tl.uint32), name, step


@triton.jit
def _store_row(words, count, at, there, ROW: tl.constexpr, a, b, c, d):  # pyright: ignore
    place = words + 4 * ROW * count + at
    tl.store(place, a.to(tl.int32, bitcast=True), mask=there)
    tl.store(place + count, b.to(tl.int32, bitcast=True), mask=there)
    tl.store(place + 2 * count, c.to(tl.int32, bitcast=True), mask=there)
    tl.store(place + 3 * count, d.to(tl.int32, bitcast=True), mask=there)


@triton.jit
def _keystream(fixed, block, parameter, words, count, BLOCKS: tl.constexpr):  # pyright: ignore
    at = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    there = at < count
    a0, a1, a2, a3 = _row(fixed, 0, BLOCKS)  # pyright: ignore
    b0, b1, b2, b3 = _row(fixed, 1, BLOCKS)
    c0, c1, c2, c3 = _row(fixed, 2, BLOCKS)
    d0, d1, d2, d3 = _counter(fixed, block, parameter, at, there)
    for _ in range(10):
        a0, b0, c0, d0 = _quarter(a0, b0, c0, d0)
        a1, b1, c1, d1 = _quarter(a1, b1, c1, d1)
        a2, b2, c2, d2 = _quarter(a2, b2, c2, d2)
        a3, b3, c3, d3 = _quarter(a3, b3, c3, d3)
        a0, b1, c2, d3 = _quarter(a0, b1, c2, d3)
        a1, b2, c3, d0 = _quarter(a1, b2, c3, d0)
        a2, b3, c0, d1 = _quarter(a2, b3, c0, d1)
        a3, b0, c1, d2 = _quarter(a3, b0, c1, d2)
    i0, i1, i2, i3 = _row(fixed, 0, BLOCKS)
    _store_row(words, count, at, there, 0, a0 + i0, a1 + i1, a2 + i2, a3 + i3)
    i0, i1, i2, i3 = _row(fixed, 1, BLOCKS)
    _store_row(words, count, at, there, 1, b0 + i0, b1 + i1, b2 + i2, b3 + i3)
    i0, i1, i2, i3 = _row(fixed, 2, BLOCKS)
    _store_row(words, count, at, there, 2, c0 + i0, c1 + i1, c2 + i2, c3 + i3)
    i0, i1, i2, i3 = _counter(fixed, block, parameter, at, there)
    _store_row(words, count, at, there, 3, d0 + i0, d1 + i1, d2 + i2, d3 + i3)


def keystream(fixed: Tensor, block: Tensor, parameter: Tensor) -> Tensor:
    """`chacha.keystream` in one launch: int32 [13], int64 [blocks] twice -> int32 [16, blocks]."""
    words = torch.empty(16, len(block), dtype=torch.int32, device=block.device)
    with torch.cuda.device_of(block):
        _keystream[(triton.cdiv(len(block), BLOCKS),)](
            fixed, block, parameter.contiguous(), words, len(block), BLOCKS=BLOCKS, num_warps=WARPS,  # pyright: ignore
        )  # fmt: skip
    return words
