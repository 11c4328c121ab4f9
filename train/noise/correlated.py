"""Noise that is correlated over the steps of a block: a weighted sum of the keyed draws of its steps so far.

The draws are functions of their step's key, so those of earlier steps are drawn again, on whichever rank holds the
shard: nothing is stored between steps, and nothing about the noise is in a checkpoint. The weights are the plan's
(`accounting/banded.py`, where their privacy is explained).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from murmuration.accounting.banded import BandedNoise
from murmuration.accounting.noise import CorrelationFact
from murmuration.train.distributed.shards import Fragment
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.chacha import ChaChaNoise, in_groups


class CorrelatedNoise:
    """A `Noise` whose `std` is that of the draws; what it adds at a step is given by `correlation`."""

    grid = 0.0

    def __init__(self, draws: AESNoise | ChaChaNoise, matrix: BandedNoise, first: int) -> None:
        """`first`: the first step of the segment. Its keys draw nothing for the steps before."""
        self._draws, self._matrix, self._first = draws, matrix, first

    @property
    def std(self) -> float:
        return self._draws.std

    def at(self, std: float) -> CorrelatedNoise:
        """All draws are scaled alike, those of earlier steps, too: noise and sum are then those of the matrix, in units
        of the step's clipping norm."""
        return CorrelatedNoise(self._draws.at(std), self._matrix, self._first)

    @property
    def divisor(self) -> float:
        return self._draws.divisor

    @property
    def generator(self) -> str:
        return self._draws.generator

    def correlation(self, step: int) -> CorrelationFact:
        return self._matrix.correlation(self.std, step, self._first)

    def prepare(self, step: int) -> None:
        """Does nothing: noise is drawn when it is needed."""

    def draw(
        self, step: int, parameter: int, start: int, length: int, dtype: type[np.floating] = np.float32
    ) -> np.ndarray:
        """Noise for elements [start, start + length) of one parameter. Products and sums are separate operations in
        the order of the steps, so that every processor gets the same bits."""
        total = np.zeros(length)
        for at, weight in self._matrix.weights(step, self._first):
            drawn = self._draws.draw(at, parameter, start, length, np.float64)
            np.multiply(drawn, weight, out=drawn)
            np.add(total, drawn, out=total)
        return total.astype(dtype, copy=False)

    def chunks(
        self, step: int, fragments: Sequence[Fragment], device: torch.device, dtype: torch.dtype = torch.float64
    ) -> Iterator[tuple[Fragment, Tensor]]:
        for group in in_groups(fragments, device):
            totals = [torch.zeros(chunk.length, dtype=torch.float64, device=device) for chunk in group]
            for at, weight in self._matrix.weights(step, self._first):
                drawn = self._draws.chunks(at, group, device, torch.float64)
                for total, (_, noise) in zip(totals, drawn, strict=True):
                    total.add_(noise.mul_(weight))
            yield from ((chunk, total.to(dtype)) for chunk, total in zip(group, totals, strict=True))
