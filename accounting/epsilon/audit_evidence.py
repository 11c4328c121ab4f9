"""Everything that one audited run shows, and the strongest bound on epsilon that it proves.

Several bounds examine the same run, and the best of them is reported, which costs confidence: the allowed error is
divided evenly among everything that was examined (Bonferroni). What counts are the numbers examined, not the methods:
methods that read the same count of right guesses each refute beyond some count, so the union of their errors is the
error of the one that refutes first. A lower bound refutes claims; it never proves one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np

from murmuration.accounting.epsilon.accountant import epsilon_below, plain_sigma
from murmuration.accounting.epsilon.audit_bound import (
    ACCUSED,
    CONFIDENCE,
    LARGEST_EPSILON,
    AuditError,
    correct_guesses,
    epsilon_bound,
    level_of,
    numbers_of_guesses,
    p_value,
)
from murmuration.accounting.epsilon.audit_curve import curve_p_value, is_refuted
from murmuration.accounting.epsilon.audit_pairs import Pairs
from murmuration.accounting.epsilon.trade_off import TradeOff, of_events, of_point
from murmuration.accounting.event import Event

# Deltas below the claim's matter for judging improbable numbers of right guesses.
CURVE_DELTA = 1e-10
LEAST_SCALE, MOST_SCALE = 2.0**-5, 2.0**5

GAUSSIAN = "the noise is Gaussian of some size, sampled and composed as planned"
INDEPENDENT = f"{GAUSSIAN}, independent between canaries and steps"


@dataclass(frozen=True)
class Claim:
    """What the run's ledger charges."""

    events: tuple[Event, ...]
    epsilon: float
    delta: float

    def scaled(self, scale: float) -> tuple[Event, ...]:
        """The same steps with `scale` times the noise."""
        return tuple(replace(event, sigma=event.sigma * scale) for event in self.events)

    def curve(self, scale: float = 1.0) -> TradeOff:
        return of_events(self.scaled(scale), min(self.delta, CURVE_DELTA))

    @cached_property
    def claimed_curve(self) -> TradeOff:
        return self.curve()

    def epsilon_at(self, scale: float) -> float:
        """Never more than the true epsilon of those events."""
        return epsilon_below(self.scaled(scale), self.delta) or 0.0

    @property
    def sigma(self) -> float:
        """The noise multiplier of a step, the smallest if they differ."""
        return min(event.sigma for event in self.events)


@dataclass(frozen=True)
class Count:
    """How many coins were guessed, and how many of them correctly."""

    guesses: int
    correct: int


@dataclass(frozen=True)
class Bound:
    """`assumes` is empty where the bound holds for every algorithm."""

    method: str
    epsilon: float
    assumes: str = ""
    guesses: int | None = None
    correct: int | None = None


@dataclass(frozen=True)
class AuditBound:
    """All bounds hold together at `confidence`, so the best of them does."""

    canaries: int
    included: int
    delta: float
    confidence: float
    looks: int
    tried: tuple[Bound, ...]

    @property
    def proven(self) -> Bound:
        """The best bound that holds for every algorithm."""
        return max((each for each in self.tried if not each.assumes), key=lambda each: each.epsilon)

    @property
    def best(self) -> Bound:
        """The best bound of all, with what it assumes; one that assumes nothing if none is better."""
        return max(self.tried, key=lambda each: (each.epsilon, not each.assumes))

    @property
    def epsilon(self) -> float:
        return self.best.epsilon

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "best": asdict(self.best), "proven": asdict(self.proven)}


@dataclass(frozen=True)
class Evidence:
    canaries: int
    included: int
    counts: tuple[Count, ...]
    pairs: Pairs | None = None

    @property
    def looks(self) -> int:
        return len(self.counts) + (self.pairs is not None)

    def bound(self, claim: Claim, confidence: float = CONFIDENCE) -> AuditBound:
        """`claim` gives delta, and the family of runs that differ from it only in the size of the noise."""
        each = level_of(confidence) / self.looks
        tried = []
        for guesses, correct in ((count.guesses, count.correct) for count in self.counts):
            steinke = epsilon_bound(self.canaries, guesses, correct, claim.delta, 1 - each)
            curve = _epsilon_by_curve(self.canaries, guesses, correct, claim.delta, each)
            tried.append(Bound("one-run (ε, δ)", steinke, "", guesses, correct))
            tried.append(Bound("one-run f-DP", curve, "", guesses, correct))
        tried.append(self._by_family(claim, each))
        if self.pairs is not None:
            mu = self.pairs.mu_bound(each)
            found = claim.epsilon_at(1 / (mu * claim.sigma)) if mu > 0 else 0.0
            tried.append(Bound("white-box Gaussian pairs", found, INDEPENDENT))
        return AuditBound(self.canaries, self.included, claim.delta, confidence, self.looks, tuple(tried))

    def p_value(self, claim: Claim) -> float:
        """Upper bound on the probability of evidence this strong against the claim, if the claim is true."""
        found = [_count_p_value(self.canaries, count, claim) for count in self.counts]
        if self.pairs is not None:
            found.append(self.pairs.p_value(1 / claim.sigma))
        return min(1.0, min(found) * self.looks)

    def _by_family(self, claim: Claim, level: float) -> Bound:
        """Searches the least noise that is refuted, in multiples of the planned one: the run has less than that."""

        def refuting(scale: float) -> Count | None:
            curve = claim.curve(scale)
            tests = (c for c in self.counts if is_refuted(self.canaries, c.guesses, c.correct, curve, level))
            return next(tests, None)

        name = "one-run f-DP, Gaussian"
        by = refuting(MOST_SCALE)
        if by is None:
            return Bound(name, 0.0, GAUSSIAN)
        stands, refuted = math.log(LEAST_SCALE), math.log(MOST_SCALE)
        # Composing sampled steps takes seconds each time; a coarser search only makes the bound lower.
        for _ in range(30 if plain_sigma(claim.events) is not None else 8):
            middle = (stands + refuted) / 2
            found = refuting(math.exp(middle))
            stands, refuted, by = (stands, middle, found) if found else (middle, refuted, by)
        return Bound(name, claim.epsilon_at(math.exp(refuted)), GAUSSIAN, by.guesses, by.correct)


def collect(scores: np.ndarray, included: np.ndarray, pairs: Pairs | None = None) -> Evidence:
    """`scores` must depend on `included` only through the run; a higher score suggests that the canary was in."""
    included = np.asarray(included, dtype=bool)
    if scores.shape != included.shape or scores.ndim != 1:
        raise AuditError(f"{scores.shape} scores for {included.shape} coins; give one score per canary")
    if not np.isfinite(scores).all():
        raise AuditError("a score is not finite, so the run diverged; lower the learning rate")
    order = np.argsort(scores, kind="stable")
    choices = numbers_of_guesses(len(scores))
    counts = tuple(Count(guesses, correct_guesses(order, included, guesses)) for guesses in choices)
    return Evidence(len(scores), int(included.sum()), counts, pairs)


Scored = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""The scores that a run might have given canaries, some of which are included."""


def refuting_share(canaries: int, scored: Scored, claim: Claim, *, level: float = ACCUSED, audits: int = 400) -> float:
    """Share of simulated audits whose guesses refute `claim`: the power to find a fault, or the share of false alarms.
    `level` is that of each count."""
    draw = np.random.default_rng(0)
    choices = numbers_of_guesses(canaries)
    needed = [least_correct(canaries, guesses, claim, level) for guesses in choices]
    refuted = 0
    for _ in range(audits):
        included = draw.random(canaries) < 0.5
        order = np.argsort(scored(included, draw))
        found = (correct_guesses(order, included, guesses) for guesses in choices)
        refuted += any(correct >= least for correct, least in zip(found, needed, strict=True))
    return refuted / audits


def least_correct(canaries: int, guesses: int, claim: Claim, level: float) -> int:
    """The least number of right guesses that refutes the claim; `guesses` + 1 if none does."""
    return _first(guesses, lambda correct: _count_p_value(canaries, Count(guesses, correct), claim) <= level)


def _first(last: int, test: Callable[[int], bool]) -> int:
    low, high = -1, last + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if test(middle) else (middle, high)
    return high


def _count_p_value(canaries: int, count: Count, claim: Claim) -> float:
    """The smaller of two upper bounds on the same tail."""
    by_point = p_value(canaries, count.guesses, count.correct, claim.epsilon, claim.delta)
    return min(by_point, curve_p_value(canaries, count.guesses, count.correct, claim.claimed_curve))


def _epsilon_by_curve(canaries: int, guesses: int, correct: int, delta: float, level: float) -> float:
    """The largest epsilon that is refuted together with `delta`, for every algorithm; 0 if none is."""

    def refuted(value: float) -> bool:
        return is_refuted(canaries, guesses, correct, of_point(value, delta), level)

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, LARGEST_EPSILON
    if refuted(high):
        return high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
