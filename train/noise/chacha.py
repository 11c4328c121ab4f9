"""Noise from ChaCha20, a cryptographic generator, drawn on the device that needs it.

AES is fast on processors, which have instructions for it, and slow on GPUs, which have none. ChaCha20 (RFC 8439) adds,
rotates and xors 32-bit words, which every device does well. So the noise is drawn where it is added, without host
cores or transfers. Anyone who cannot break ChaCha20 cannot distinguish it from true randomness. Every draw has its own
counter (step, parameter, block) under a 256-bit key that is derived from the step's, whatever the world size.
The integers are exact everywhere, and draws are the same on all processors; the last bit of a draw on a GPU depends on
its square root, so replicas must run on one kind of device. On CPUs it draws about a fifth as fast as AES
(``benchmarks/noise.py``); on an H200 it drew 9e8 elements a second (``benchmarks/gpu.py step``), with the CPU's bits.
AES stays the default.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate

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

CONSTANTS = b"expand 32-byte k"
KEY_BYTES = 32
DOUBLE_ROUNDS = 10
PER_BLOCK = 8
"""Normal numbers per block of 64 bytes: one pair from each two 64-bit words."""
HALF = 0xFFFFFFFF
KERNEL_DEVICES = ("cuda",)
GPU_CHUNK = 1 << 23
"""Elements that a GPU draws at once, in 0.4 GiB; what is drawn does not depend on it. Each draw takes a hundred
launches, and an H200 drew 2^20 at a time only as fast as its host launched."""

Keystream = Callable[[Tensor, Tensor, Tensor], Tensor]


class ChaChaNoise:
    """A `Noise` that is drawn on the device where it is added."""

    generator = "chacha20"

    def __init__(self, key: bytes | StepKey, std: float, divisor: float) -> None:
        """A `key` of bytes is used for all steps."""
        self._key_of = by_step(key)
        self.std = std
        self.divisor = divisor

    @property
    def grid(self) -> float:
        return 0.0

    def at(self, std: float) -> ChaChaNoise:
        return ChaChaNoise(self._key_of, std, self.divisor)

    def correlation(self, step: int) -> None:
        """Draws of different steps are independent."""

    def prepare(self, step: int) -> None:
        """Does nothing: noise is drawn when it is needed."""

    @staticmethod
    def of(key: bytes | StepKey, plan: PrivacyPlan) -> ChaChaNoise:
        return ChaChaNoise(key, plan.noise_std, plan.divisor)

    def _key(self, step: int) -> bytes:
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"murmuration/2|chacha20").derive(self._key_of(step))

    def draw(
        self, step: int, parameter: int, start: int, length: int, dtype: type[np.floating] = np.float32
    ) -> np.ndarray:
        """Draws one stretch on the CPU, for tests and other callers that need only that."""
        if length == 0:
            return np.empty(0, dtype)
        whole = Fragment("", parameter, start, length, 0)
        drawn = [noise.numpy() for _, noise in self.chunks(step, [whole], torch.device("cpu"))]
        return np.concatenate(drawn).astype(dtype)

    def chunks(
        self, step: int, fragments: Sequence[Fragment], device: torch.device, dtype: torch.dtype = torch.float64
    ) -> Iterator[tuple[Fragment, Tensor]]:
        """Draws small neighbours together: a launch per parameter would cost more than the numbers."""
        for group in in_groups(fragments, device):
            normals = self._normals(step, group, device).to(dtype)
            begin = 0
            for chunk in group:
                skip = chunk.start % PER_BLOCK
                yield chunk, normals[begin + skip : begin + skip + chunk.length]
                begin += PER_BLOCK * _blocks(chunk)

    def _normals(self, step: int, group: Sequence[Fragment], device: torch.device) -> Tensor:
        for chunk in group:
            # A number that did not fit its words would share its draw with another step, parameter or
            # element.
            last = (chunk.start + chunk.length - 1) // PER_BLOCK
            if not (0 <= step < 2**32 and 0 <= chunk.parameter < 2**32 and chunk.start >= 0 and last < 2**63):
                raise ValueError(
                    f"step {step}, parameter {chunk.parameter} or element {chunk.start} does not fit the noise counter"
                )
        counts = [_blocks(chunk) for chunk in group]
        ends = list(accumulate(counts))
        # Little is transferred, whatever the fragments' sizes: blocks are numbered on the device.
        table = torch.tensor(
            [
                [chunk.start // PER_BLOCK - end + count for chunk, end, count in zip(group, ends, counts, strict=True)],
                [chunk.parameter for chunk in group],
                counts,
            ],
            device=device,
        )
        shift, parameter = table[:2].repeat_interleave(table[2], 1, output_size=ends[-1])
        block = torch.arange(ends[-1], device=device).add_(shift)
        kernel = _kernel() if device.type in KERNEL_DEVICES else None
        return _pairs((kernel or keystream)(fixed_words(self._key(step), step, device), block, parameter), self.std)


def fixed_words(key: bytes, step: int, device: torch.device) -> Tensor:
    """The words that all blocks of a step share: constants, key, and the step, which is the last word of the nonce."""
    return torch.tensor(struct.unpack("<13i", CONSTANTS + key + struct.pack("<I", step)), dtype=torch.int32).to(device)


def keystream(fixed: Tensor, block: Tensor, parameter: Tensor) -> Tensor:
    """RFC 8439's block function: int32 [16, blocks], whose columns are the words of each block.

    Its counter is the low half of the block's number; its nonce is the other half, the parameter and the step.
    """
    start = torch.empty(16, len(block), dtype=torch.int32, device=block.device)
    start[:12] = fixed[:12, None]
    start[12:14] = block.view(torch.int32).view(-1, 2).T
    start[14] = parameter.view(torch.int32)[::2]
    start[15] = fixed[12]
    a, b, c, d = start.clone().view(4, 4, -1)
    for _ in range(DOUBLE_ROUNDS):
        _quarter_rounds(a, b, c, d)
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        _quarter_rounds(a, b, c, d)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat((a, b, c, d)).add_(start)


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    """Four at once, in place; int32 wraps as unsigned words do."""
    for one, two, three, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        one.add_(two)
        three.bitwise_xor_(one)
        right = (three >> 32 - by).bitwise_and_((1 << by) - 1)  # the shift repeats the sign
        three.bitwise_left_shift_(by).bitwise_or_(right)


@cache
def _kernel() -> Keystream | None:
    """Some builds of PyTorch come without Triton."""
    if find_spec("triton") is None:
        return None
    from murmuration.train.noise.chacha_triton import keystream as kernel

    return kernel


def _pairs(words: Tensor, std: float) -> Tensor:
    """Normal pairs in the order of the elements: of two 64-bit words, the first gives the radius, the second the
    direction."""
    parts = words.view(4, 4, -1)
    radius = _unsigned(parts[:, 1]).mul_(2.0**32).add_(_unsigned(parts[:, 0]))
    sine = parts[:, 3].double().mul_(2.0**32).add_(_unsigned(parts[:, 2]))
    cosine, *scratch = (torch.empty_like(radius) for _ in range(4))
    ops = _OnProcessor if words.device.type == "cpu" else torch
    radius_in_place(ops, radius, (scratch[0], scratch[1], scratch[2]), std)
    direction_in_place(ops, sine, cosine, (scratch[0], scratch[1]))
    return torch.stack((radius * cosine, radius * sine), dim=2).transpose(0, 1).reshape(-1)


class _OnProcessor:
    """PyTorch's operations, but for the root: its own comes from a library that rounds it in one way on some processors
    and in another way on others."""

    int64 = torch.int64
    multiply, add, subtract, divide = torch.multiply, torch.add, torch.subtract, torch.divide
    bitwise_right_shift, bitwise_left_shift = torch.bitwise_right_shift, torch.bitwise_left_shift

    @staticmethod
    def sqrt(of: Tensor, *, out: Tensor) -> None:
        np.sqrt(of.numpy(), out=out.numpy())


def _unsigned(words: Tensor) -> Tensor:
    """Exact. The sum of two halves is then rounded only once, to the number nearest to the whole word."""
    return (words.long() & HALF).double()


def in_groups(fragments: Sequence[Fragment], device: torch.device) -> Iterator[list[Fragment]]:
    """Pieces that are drawn at once, neighbours together."""
    most = GPU_CHUNK if device.type == "cuda" else NOISE_CHUNK
    group, drawn = list[Fragment](), 0
    for chunk in in_chunks(fragments, most):
        cost = PER_BLOCK * _blocks(chunk)
        if group and drawn + cost > most:
            yield group
            group, drawn = [], 0
        group.append(chunk)
        drawn += cost
    if group:
        yield group


def _blocks(chunk: Fragment) -> int:
    """Blocks that cover the piece."""
    return (chunk.start + chunk.length - 1) // PER_BLOCK - chunk.start // PER_BLOCK + 1
