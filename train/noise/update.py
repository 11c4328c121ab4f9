"""The only path from the reduced sum to the optimizer, taken once per logical step.

An engine passes every shard of the reduced gradient through an `Update`. `NoisyUpdate` adds the noise and divides
by the constant q·n; `PlainUpdate` (non-private phases) only divides. Each serves one step; without one, the
optimizer does not move.

Exact noise is a whole number of grid steps. The sum is first rounded to that grid, and both remain whole numbers
until they are added; what is then divided and rounded to fp32 is already private.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from murmuration.accounting.errors import SELF_TEST_FAILED, RunError
from murmuration.accounting.ledger.facts import NoiseFact
from murmuration.accounting.noise import CorrelationFact
from murmuration.train.distributed.shards import Fragment

# In grid steps; leaves room for the noise in 64 bits.
FURTHEST = 2.0**62


class Noise(Protocol):
    """N(0, std²) for every element of the clipped sum; the sum is then divided by the constant."""

    @property
    def std(self) -> float: ...

    def at(self, std: float) -> Noise:
        """The same draws with another standard deviation, for a step whose clipping norm is not the first one."""
        ...

    @property
    def divisor(self) -> float: ...

    @property
    def generator(self) -> str:
        """The source of the random bits, as recorded in the ledger."""
        ...

    @property
    def grid(self) -> float:
        """The grid of exact noise, which is counted in multiples of it; 0 for noise that is added as it is."""
        ...

    def correlation(self, step: int) -> CorrelationFact | None:
        """How draws of several steps make this step's noise; None if it is one draw."""
        ...

    def prepare(self, step: int) -> None:
        """Announces that this step's noise is needed next: it may be drawn in advance."""
        ...

    def chunks(
        self, step: int, fragments: Sequence[Fragment], device: torch.device, dtype: torch.dtype = torch.float64
    ) -> Iterator[tuple[Fragment, Tensor]]:
        """The fragments in order, split where they are long, each with its noise on the device."""
        ...


class UpdateError(RunError, RuntimeError):
    """An update was about to reach the weights without its noise, or twice."""

    exit_code = SELF_TEST_FAILED


class Update(Protocol):
    """Turns the reduced sum on a shard into what the optimizer may see; counts the elements that passed through it."""

    @property
    def elements(self) -> int: ...

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None: ...


class NoisyUpdate:
    """Adds the noise of one logical step, once."""

    def __init__(self, mechanism: Noise, step: int) -> None:
        self.mechanism, self.step = mechanism, step
        self.elements = 0
        self._seen: dict[int, list[range]] = {}

    @torch.no_grad()
    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        # A sum in half precision would have been rounded by more than the clipping rule allows for.
        if flat.dtype not in (torch.float32, torch.float64):
            raise UpdateError(f"the reduced sum must be fp32 or fp64 when the noise is added, but is {flat.dtype}")
        for fragment in fragments:
            # Two draws on one element would be the same numbers twice, since noise is keyed by step and element.
            seen, asked = self._seen.setdefault(fragment.parameter, []), fragment.elements
            if any(asked.start < other.stop and other.start < asked.stop for other in seen):
                raise UpdateError(f"noise for {fragment.name} at {fragment.start} was asked for twice in one step")
            seen.append(asked)
        grid = self.mechanism.grid
        # Everything is fp64 until the noise is in, so that rounding acts on what is already private.
        for chunk, noise in self.mechanism.chunks(self.step, fragments, flat.device):
            total = chunk.of(flat)
            # The divisor is the constant q·n: the number of records that were drawn is itself private.
            if grid:
                total.copy_(sum_on_grid(total, noise, grid).div_(self.mechanism.divisor))
            else:
                total.add_(noise).div_(self.mechanism.divisor)
            self.elements += chunk.length

    def fact(self, elements: int) -> NoiseFact:
        mechanism = self.mechanism
        return NoiseFact(
            mechanism.std, mechanism.divisor, elements, mechanism.generator, mechanism.grid,
            mechanism.correlation(self.step),
        )  # fmt: skip


def sum_on_grid(total: Tensor, noise: Tensor, grid: float) -> Tensor:
    """The total, rounded to multiples of the grid, plus the noise, which is given in grid steps; in fp64.

    The grid is a power of two, so the quotient is exact, and rounding changes the difference of two totals by at most
    one grid step in each element. A total beyond FURTHEST is clamped, which never moves two totals further apart.
    """
    if not bool(torch.isfinite(total).all()):
        raise UpdateError("the sum of clipped gradients is no number; a clip engine let one through")
    whole = total.double().div(grid).round_().clamp_(-FURTHEST, FURTHEST).to(torch.int64)
    return whole.add_(noise.to(torch.int64)).double().mul_(grid)


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
