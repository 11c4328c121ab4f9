"""The sampler of each way to draw records: Poisson draws (`poisson.py`), random allocation, either shared by ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from murmuration.accounting.errors import REFUSED, RunError
from murmuration.accounting.sampling import AnySampling, RandomAllocation
from murmuration.data.draw.poisson import (
    LANES,
    Draw,
    DrawnInParts,
    PoissonSampler,
    StepKey,
    by_step,
    keyed_digest,
    lanes_between,
    require_keys_and_records,
    require_part,
)

# Records from which sharing a draw saves more than it costs.
SHARED_FROM = 1 << 26
Exchange = Callable[[np.ndarray], list[np.ndarray]]
"""Gives every rank's array to all, in the order of ranks."""


class AllocationSampler:
    """Allocates each of `records` records to one of the `slots` steps of every epoch, purely from (key, step).

    The steps 1, 2, … are cut into epochs of t. The step of record i in an epoch is the floor of x·t / 2^32, where x is
    32-bit lane i % 4 of AES-256-CTR(key of the epoch, counter = epoch << 64 | i // 4): one number, whose owner takes
    part in one step, however often and by whomever the epoch is drawn. To draw a step means to find the lanes between
    two whole numbers, so it costs what a Poisson draw costs, needs no memory between steps and no seek after a restart.
    The t steps are equally likely up to a relative t / 2^32, for which the accounting pays
    (`accounting/epsilon/allocation.py`).

    The key must be the same at all steps of an epoch; `accounting/keys.py` keeps it for as long. A segment that begins
    in the middle of an epoch allocates all records anew: those that fall on steps before it take no part in the rest.
    """

    def __init__(self, key: bytes | StepKey, digest_key: bytes | StepKey, records: int, slots: int) -> None:
        """A key given as bytes is the key of all steps."""
        require_keys_and_records(key, digest_key, records)
        RandomAllocation(slots)  # refused unless an epoch has 2 to 2^20 steps
        self._key, self._digest_key = by_step(key), by_step(digest_key)
        self.records, self.slots, self.threshold = records, slots, max(1, round(LANES / slots))

    def draw(self, step: int) -> Draw:
        """The records of one step, sorted; the same on any rank, at any time."""
        return self.whole(step, self.part(step, 0, self.records))

    def candidates(self, step: int) -> int:
        """The number of records that the step draws from."""
        del step
        return self.records

    def whole(self, step: int, ids: np.ndarray) -> Draw:
        """The draw whose records are `ids`, put together from its parts."""
        ids.flags.writeable = False
        digest = keyed_digest(self._digest_key(step), (step, self.threshold, self.records, 1, self.slots), ids)
        return Draw(step, RandomAllocation(self.slots), self.records, digest, ids)

    def part(self, step: int, first: int, stop: int) -> np.ndarray:
        """The records of one step, of those from `first`, a multiple of 4, up to `stop`."""
        if not 1 <= step < 1 << 64:
            raise ValueError(f"step {step} is outside 1..2**64-1; epochs begin with step 1")
        require_part(first, stop, self.records)
        epoch, slot = divmod(step - 1, self.slots)
        low, high = (-(-place * LANES // self.slots) for place in (slot, slot + 1))
        return lanes_between(self._key(step), epoch, first, stop, low, high)


def make_sampler(
    rule: AnySampling, key: bytes | StepKey, digest_key: bytes | StepKey, records: int
) -> DrawnInParts:  # fmt: skip
    if isinstance(rule, RandomAllocation):
        return AllocationSampler(key, digest_key, records, rule.slots)
    return PoissonSampler(key, digest_key, records, rule.threshold, rule.parts)


class DrawError(RunError, RuntimeError):
    """Two ranks drew different records."""

    exit_code = REFUSED


class SharedSampler:
    """The draw of a step, shared among the ranks: each asks the cipher about its part of the records, and gets the
    others'. All ranks call `draw` for the same steps in the same order.

    Among two billion records a draw takes a processor seconds, which hundreds of GPUs would spend waiting. The draw
    itself is the same, bit for bit. Every part is drawn by two ranks, and both must agree: a processor that errs would
    otherwise change who is sampled, and nobody would know.
    """

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
