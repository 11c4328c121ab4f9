"""The ways to draw the records of a step. Each is one object, with everything that follows from it: rate and divisor,
what one record's part in so many steps is to the accountant, how the ledger counts it, and the sentences about it.

A plan freezes one of them. The sampler that is made of it (`data/draw/samplers.py`) reports with every step what it
drew by, and the ledger refuses a step that was drawn otherwise. A new way is a class here, an entry of `SAMPLINGS`, and
its sampler.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from murmuration.accounting.errors import PlanError
from murmuration.accounting.event import Event
from murmuration.accounting.strict_json import CLOSED

RATE_DENOMINATOR = 2**32
SamplingKind = Literal["poisson", "allocation"]
"""As a config names it; Poisson samples are cyclic where noise is correlated."""
MOST_SLOTS = 2**20
MOST_OFF = 0.1
"""The largest share by which random allocation may change the expected batch that was asked for."""


class _Sampling(ABC):
    """What all ways have in common. Steps count from 1."""

    name: ClassVar[str] = "Poisson"
    parts: int = 1
    """Into how many parts the records are dealt; step t draws from part t modulo so many."""
    sentence: ClassVar[str] = ""
    """What a certificate adds to the mechanism of a Poisson sample."""
    deviation: ClassVar[str | None] = None
    """What a certificate adds about copies of the secret file."""
    no_groups: ClassVar[str | None] = None
    """Why nothing is proved for several records of one person; None: something is."""

    @property
    @abstractmethod
    def rate(self) -> float:
        """The probability, exactly, with which a step takes a record whose turn it is."""

    @property
    @abstractmethod
    def period(self) -> int:
        """The steps of a block or epoch, in which each record has one turn."""

    @property
    def steps_of_a_key(self) -> int:
        """How many steps are drawn by the same key."""
        return 1

    def divisor(self, records: int) -> float:
        """The expected batch."""
        return self.rate * records / self.parts

    def turns(self, steps: int) -> int:
        """The most often that one record can take part in so many successive steps which begin a block or epoch; a cut
        one counts as whole. So many mechanisms are accounted for."""
        return -(-steps // self.period)

    def event(self, sigma: float, count: int) -> Event:
        return Event(self.rate, sigma, count)

    def part(self, step: int) -> int:
        """The part of the records that a step draws from: steps of different parts act on different records."""
        return step % self.parts

    def charged_as_one(self, step: int) -> int:
        """The number of what is charged as one mechanism: a step, or an epoch."""
        return step

    def with_batch(self, records: int, batch: float) -> AnySampling | None:
        """The same with another expected batch; None where the batch is not free."""
        return None

    def require(self, records: int, steps: int) -> None:  # noqa: B027  (most need nothing)
        """Refuses so few records or steps."""


class _WithRate(_Sampling):
    threshold: int

    def __post_init__(self) -> None:
        if not 1 <= self.threshold <= RATE_DENOMINATOR:
            raise PlanError(f"the sampling threshold K must lie in [1, 2^32], but is {self.threshold}")

    @property
    def rate(self) -> float:
        return self.threshold / RATE_DENOMINATOR  # at most 33 bits, which fit a double

    def described(self, records: int, steps: int) -> dict[str, Any]:
        found = {"n": records, "rate": self.rate, "expected_batch": self.divisor(records), "threshold": self.threshold}
        return found if self.parts == 1 else found | {"bands": self.parts, "turns": self.turns(steps)}

    def in_words(self, records: int, steps: int) -> str:
        drawn = f"q = {self.rate:.8g} = {self.threshold}/2^32"
        return drawn if self.parts == 1 else f"{drawn} in {self.turns(steps)} turns of {self.parts} parts"

    def in_a_dry_run(self, records: int, steps: int) -> str:
        batch = self.divisor(records)
        return f"q             {self.rate:.8g} = {self.threshold}/2^32 (expected batch {batch:,.2f})"


@dataclass(frozen=True)
class Poisson(_WithRate):
    """Each record joins each step independently with probability K / 2^32."""

    __pydantic_config__ = CLOSED
    threshold: int
    kind: Literal["poisson"] = "poisson"

    @property
    def period(self) -> int:
        return 1

    def with_batch(self, records: int, batch: float) -> Poisson:
        return Poisson(threshold_for(records, batch))

    def __str__(self) -> str:
        return f"a Poisson sample with K = {self.threshold}"


@dataclass(frozen=True)
class CyclicPoisson(_WithRate):
    """The records are dealt into parts, whose turns follow each other; each record of the part whose turn it is joins
    the step independently with probability K / 2^32."""

    __pydantic_config__ = CLOSED
    no_groups = "with correlated noise nothing is proved for several records of one person"
    threshold: int
    parts: int = field()
    kind: Literal["cyclic-poisson"] = "cyclic-poisson"

    @property
    def period(self) -> int:
        return self.parts

    def with_batch(self, records: int, batch: float) -> CyclicPoisson:
        return CyclicPoisson(threshold_for(records, batch, self.parts), self.parts)

    def require(self, records: int, steps: int) -> None:
        if not 1 < self.parts <= min(records, steps):
            raise PlanError(f"{self.parts} bands need as many records and steps, not {records} and {steps}")

    def __str__(self) -> str:
        return f"a Poisson sample with K = {self.threshold} of one of {self.parts} parts"


@dataclass(frozen=True)
class RandomAllocation(_Sampling):
    """The steps are cut into epochs of `slots`, and each record takes part in exactly one step of every epoch; the last
    epoch may be cut."""

    __pydantic_config__ = CLOSED
    name = "random allocation"
    sentence = (
        "; where a plan's sampling is `allocation`: not a Poisson sample, but epochs of `slots` steps, in each of "
        "which every record takes part in one step, chosen uniformly (up to a relative slots/2^32, which is charged) "
        "and in secret by a key that is new for each epoch and segment; the divisor is n/slots, and an epoch is "
        "charged whole once it begins"
    )
    deviation = (
        "Where records are allocated to the steps of an epoch, the key of that allocation is kept until the epoch ends "
        "(that of a last epoch which the plan cuts short: until the next private phase, or the end of the run). "
        "Whoever copied the secret file meanwhile can tell in which of the epoch's steps, earlier ones included, each "
        "record takes part, but not take the noise off those before. Against them the claim covers the epochs before "
        "alone."
    )
    no_groups = "with random allocation nothing is proved for several records of one person"
    slots: int
    kind: Literal["allocation"] = "allocation"

    def __post_init__(self) -> None:
        if not 1 < self.slots <= MOST_SLOTS:
            raise PlanError(f"an epoch of random allocation has 2 to {MOST_SLOTS:,} steps, not {self.slots}")

    @property
    def rate(self) -> float:
        return 1 / self.slots

    @property
    def period(self) -> int:
        return self.slots

    @property
    def steps_of_a_key(self) -> int:
        return self.slots

    def divisor(self, records: int) -> float:
        return records / self.slots

    def event(self, sigma: float, count: int) -> Event:
        return Event(self.rate, sigma, count, slots=self.slots)

    def charged_as_one(self, step: int) -> int:
        return (step - 1) // self.slots

    def require(self, records: int, steps: int) -> None:
        if self.slots > steps:
            raise PlanError(f"an epoch of {self.slots} steps of random allocation is longer than all {steps} steps")

    def described(self, records: int, steps: int) -> dict[str, Any]:
        found = {"n": records, "rate": self.rate, "expected_batch": self.divisor(records), "slots": self.slots}
        return found | {"epochs": self.turns(steps)}

    def in_words(self, records: int, steps: int) -> str:
        return f"{self.turns(steps)} epochs of {self.slots} steps, expected batch {self.divisor(records):,.2f}"

    def in_a_dry_run(self, records: int, steps: int) -> str:
        turns = self.turns(steps)
        text = (
            f"allocation    each record in one of {self.slots:,} steps (expected batch {self.divisor(records):,.2f}), "
            f"{turns:,} times"
        )
        cut = turns * self.slots - steps
        return text + (f"; the last epoch lacks {cut:,} steps and is charged whole" if cut else "")

    def __str__(self) -> str:
        return f"random allocation to epochs of {self.slots} steps"


AnySampling = Poisson | CyclicPoisson | RandomAllocation
SAMPLINGS: dict[str, type[AnySampling]] = {each.kind: each for each in (Poisson, CyclicPoisson, RandomAllocation)}


def sampling_of_dict(value: dict[str, Any]) -> AnySampling:
    """As a ledger or a certificate states it."""
    return SAMPLINGS[value["kind"]](**value)


def make_sampling(
    kind: SamplingKind, records: int, expected_batch: float, steps: int, parts: int = 1
) -> AnySampling:  # fmt: skip
    """What a user asks for. An allocation whose steps take all records is a Poisson sample with q = 1."""
    if kind == "poisson":
        threshold = threshold_for(records, expected_batch, parts)
        return Poisson(threshold) if parts == 1 else CyclicPoisson(threshold, parts)
    slots = slots_for(records, expected_batch, steps)
    return Poisson(RATE_DENOMINATOR) if slots == 1 else RandomAllocation(slots)


def threshold_for(records: int, expected_batch: float, parts: int = 1) -> int:
    """K with q = K / 2^32 nearest to expected_batch / records; times `parts`, where a step draws from one of them."""
    if records < 1:
        raise PlanError(f"a private phase needs at least one record, but the index has {records}")
    if not 0 < expected_batch <= records:
        raise PlanError(f"expected_batch must lie in (0, {records}], the number of records, but is {expected_batch:g}")
    rate = expected_batch / records * parts
    if parts > 1 and rate > 1 + 1e-12:  # a quotient of n, times the parts, may be rounded upwards
        raise PlanError(
            f"each of {parts} parts of the {records} records must hold the expected batch, {expected_batch:g}; use at "
            f"most {math.floor(records / expected_batch)} bands"
        )
    return min(RATE_DENOMINATOR, max(1, round(rate * RATE_DENOMINATOR)))


def slots_for(records: int, expected_batch: float, steps: int) -> int:
    """The steps of an epoch of random allocation: so many that the number of epochs, the last of which may be cut, is
    the whole number nearest to how often `expected_batch` lets a record take part."""
    threshold_for(records, expected_batch)  # refused if the batch does not fit
    often = steps * expected_batch / records
    slots = -(-steps // max(1, round(often)))
    if abs(records / slots / expected_batch - 1) > MOST_OFF:
        other = max(1, round(records / expected_batch))
        raise PlanError(
            f"random allocation lets each record take part a whole number of times, but {steps} steps of "
            f"{expected_batch:g} records are {often:.3g} times; use expected_batch = {records / slots:.6g}, or "
            f"{records / other:.6g} with steps = {other * max(1, round(often))}, or Poisson sampling"
        )
    return slots
