"""What canaries show of each of their turns, whatever the mechanism: the same numbers as of independent steps.

A turn is what the ledger counts: a Poisson step; a block of correlated noise, in which a canary may take part in one
step; an epoch of random allocation, in which it takes part in one step that nobody knows.

A block releases its sums x with the noise B·z. The auditor has the matrix and multiplies what was released by M = B⁻¹,
which loses nothing: M·x + z, with independent z. A canary whose turn was step s of the block moved that by its gradient
along column s of M alone, so its projection on that column holds all there is to see of it. A segment that begins
within a block has draws of its own, so it is multiplied by the inverse of its own part of B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from murmuration.accounting.banded import BandedNoise
from murmuration.accounting.epsilon.audit_pairs import Pairs, pairs_of
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import RandomAllocation


@dataclass(frozen=True)
class SeenSegment:
    """The steps of one segment, of which the first has the number `first`: what was released at each canary's
    coordinate, without the real records' part, and whether the canary took part, [steps, canaries] each."""

    first: int
    values: np.ndarray
    took_part: np.ndarray


@dataclass(frozen=True)
class Turn:
    """`values` [numbers, canaries], each with the noise of one draw. An included canary moved them by its gain along
    one row of `patterns` [patterns, numbers]; `chances` says how likely each was, to who does not know the draws."""

    values: np.ndarray
    took_part: np.ndarray
    patterns: np.ndarray
    chances: np.ndarray


@dataclass(frozen=True)
class Group:
    """Canaries that have the same turns; `which` are their places among all."""

    which: np.ndarray
    turns: tuple[Turn, ...]

    def simulated(self, included: np.ndarray, gain: float, noise: float, draw: np.random.Generator) -> Group:
        """The same turns as another run might have shown them."""
        mine = included[self.which]

        def again(turn: Turn) -> Turn:
            taken = draw.choice(len(turn.chances), size=len(mine), p=turn.chances)
            moved = turn.patterns[taken].T * mine
            values = gain * moved + noise * draw.standard_normal(turn.values.shape)
            return replace(turn, values=values, took_part=moved.any(axis=0))

        return replace(self, turns=tuple(again(turn) for turn in self.turns))


def turns_of(segments: Sequence[SeenSegment], plan: PrivacyPlan, numbers: np.ndarray) -> list[Group]:
    """`numbers`: those of the canaries among all records, which decide whose turn it is in a block."""
    bands = plan.sampling.parts
    places = (numbers - 1) % bands  # step t draws part t modulo b, and the first step is 1
    groups = []
    for place in range(bands):
        which = np.flatnonzero(places == place)
        turns = [turn for segment in segments for turn in _turns(segment, plan, which, place)]
        groups += [Group(which, tuple(turns))] if len(which) else []
    return groups


def _turns(segment: SeenSegment, plan: PrivacyPlan, which: np.ndarray, place: int) -> Iterator[Turn]:
    values, part = whitened(segment, plan)[:, which], segment.took_part[:, which]
    steps = segment.first + np.arange(len(values))
    if isinstance(plan.sampling, RandomAllocation):
        slots = plan.sampling.slots
        for epoch in np.unique((steps - 1) // slots):
            rows = (steps - 1) // slots == epoch
            yield _allocated(values[rows], part[rows], slots)
        return
    rate = plan.sampling_rate
    patterns, chances = np.array([[0.0], [1.0]]), np.array([1 - rate, rate])
    kept = chances > 0
    columns = np.linalg.inv(_matrix(segment, plan.noise)).T if isinstance(plan.noise, BandedNoise) else None
    for step in np.flatnonzero((steps - 1) % plan.sampling.parts == place):
        seen = values[step]
        if columns is not None:
            seen = columns[step] @ values / (columns[step] @ columns[step])
        yield Turn(seen[None], part[step], patterns[kept], chances[kept])


def _allocated(values: np.ndarray, part: np.ndarray, slots: int) -> Turn:
    """Those of an epoch's steps that belong to the segment; the canary's own step may be none of them."""
    here = len(values)
    patterns, chances = np.eye(here), np.full(here, 1 / slots)
    if here < slots:
        patterns, chances = np.vstack([patterns, np.zeros(here)]), np.append(chances, 1 - here / slots)
    return Turn(values, np.logical_or.reduce(part), patterns, chances)


def _matrix(segment: SeenSegment, banded: BandedNoise) -> np.ndarray:
    """What turns the segment's draws into its noise."""
    steps = len(segment.values)
    found = np.zeros((steps, steps))
    for place in range(steps):
        for at, weight in banded.weights(segment.first + place, segment.first):
            found[place, at - segment.first] = weight
    return found


def whitened(segment: SeenSegment, plan: PrivacyPlan, of: np.ndarray | None = None) -> np.ndarray:
    """What was released (or other numbers of the same steps), such that each step's noise is one draw."""
    values = segment.values if of is None else of
    if not isinstance(plan.noise, BandedNoise):
        return values
    return np.linalg.solve(_matrix(segment, plan.noise), values)


def noise_in(segments: Sequence[SeenSegment], plan: PrivacyPlan, gain: float) -> np.ndarray:
    """The draws of noise in all steps of all segments, without what the canaries added: [steps, canaries]."""
    return np.concatenate([whitened(each, plan, each.values - gain * each.took_part) for each in segments])


def pairs_in(groups: Sequence[Group]) -> Pairs | None:
    """Turns with a canary against turns without it. All numbers of a turn are added up: the auditor knows in which
    turns a canary took part, and not by which step. Epochs of which a segment has only a part are left out."""
    turns = [turn for group in groups for turn in group.turns]
    whole = max((len(turn.values) for turn in turns), default=0)
    chosen = [turn for turn in turns if len(turn.values) == whole]
    if not chosen:
        return None
    sums = np.concatenate([turn.values.sum(axis=0) for turn in chosen])
    return pairs_of(sums, np.concatenate([turn.took_part for turn in chosen]), terms=whole)
