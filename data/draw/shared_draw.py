"""The draw of a step, shared among the ranks: each asks the cipher about its part of the records, and gets the others'.

Among two billion records a draw takes a processor seconds, which hundreds of GPUs would spend waiting. The draw itself
is the same, bit for bit. Every part is drawn by two ranks, and both must agree: a processor that errs would otherwise
change who is sampled, and nobody would know.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from murmuration.accounting.errors import REFUSED, RunError
from murmuration.data.draw.poisson import Draw, DrawnInParts

# Records from which sharing a draw saves more than it costs.
SHARED_FROM = 1 << 26

Exchange = Callable[[np.ndarray], list[np.ndarray]]
"""Gives every rank's array to all, in the order of ranks."""


class DrawError(RunError, RuntimeError):
    """Two ranks drew different records."""

    exit_code = REFUSED


class SharedSampler:
    """All ranks call `draw` for the same steps in the same order."""

    def __init__(self, sampler: DrawnInParts, rank: int, world: int, exchange: Exchange) -> None:
        self._sampler, self._rank, self._world, self._exchange = sampler, rank, world, exchange

    def draw(self, step: int) -> Draw:
        neighbour = (self._rank + 1) % self._world
        own, theirs = self._part(step, self._rank), self._part(step, neighbour)
        parts = self._exchange(own)
        if not np.array_equal(parts[neighbour], theirs):
            raise DrawError(
                f"ranks {self._rank} and {neighbour} drew different records from the same part of step {step}: a "
                "processor or its memory errs; check both machines"
            )
        return self._sampler.whole(step, np.concatenate(parts))

    def _part(self, step: int, rank: int) -> np.ndarray:
        # In blocks of four records, which one block of the cipher decides.
        candidates = self._sampler.candidates(step)
        blocks = -(-candidates // 4)
        first, stop = (4 * (each * blocks // self._world) for each in (rank, rank + 1))
        return self._sampler.part(step, first, min(stop, candidates))
