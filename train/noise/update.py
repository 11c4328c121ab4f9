"""Between the reduced sum and the optimizer: the only door, opened once per logical step.

An engine hands every shard of the reduced gradient through an `Update`. `NoisyUpdate` adds the noise and divides
by the constant q·n; `PlainUpdate` (non-private phases) only divides. Each serves one step; without one the
optimizer does not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from murmuration.accounting.errors import SELF_TEST_FAILED, RunError
from murmuration.accounting.ledger.facts import NoiseFact
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import Noise


class UpdateError(RunError, RuntimeError):
    """An update was about to reach the weights without its noise, or twice."""

    exit_code = SELF_TEST_FAILED


class Update(Protocol):
    """Turns the reduced sum on a shard into what the optimizer may see; counts the elements it turned."""

    @property
    def elements(self) -> int: ...

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None: ...


class NoisyUpdate:
    """One-shot: the noise of one logical step."""

    def __init__(self, mechanism: Noise, step: int) -> None:
        self.mechanism = mechanism
        self.step = step
        self.elements = 0
        self._seen: dict[int, list[range]] = {}

    @torch.no_grad()
    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        if flat.dtype not in (torch.float32, torch.float64):
            raise UpdateError(f"the reduced sum must be fp32 or fp64 when the noise is added, but is {flat.dtype}")
        for fragment in fragments:
            seen, asked = self._seen.setdefault(fragment.parameter, []), fragment.elements
            if any(asked.start < other.stop and other.start < asked.stop for other in seen):
                raise UpdateError(f"noise for {fragment.name} at {fragment.start} was asked for twice in one step")
            seen.append(asked)
        # In fp64 until here, so that rounding is one more act on what is already private.
        for chunk, noise in self.mechanism.chunks(self.step, fragments, flat.device):
            chunk.of(flat).add_(noise).div_(self.mechanism.divisor)
            self.elements += chunk.length

    def fact(self, elements: int) -> NoiseFact:
        return NoiseFact(self.mechanism.std, self.mechanism.divisor, elements, self.mechanism.generator)


class PlainUpdate:
    """The mean over a public batch; no noise, no promise."""

    def __init__(self, batch: int, step: int = 0) -> None:
        self.batch, self.step = batch, step
        self.elements = 0

    @torch.no_grad()
    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            fragment.of(flat).div_(self.batch)
            self.elements += fragment.length
