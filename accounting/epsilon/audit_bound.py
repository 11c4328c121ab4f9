"""From right and wrong guesses about canaries to a lower bound on epsilon (Steinke, Nasr and Jagielski 2023).

m records are each put in or left out by a fair coin; an auditor sees one run and guesses some of the coins. If the
run is (epsilon, delta)-DP for one record in or out, then v right ones of r guesses are at most as likely as in
randomised response, up to a term in m·delta (their Theorem 5.2). An epsilon under which v is too unlikely is refuted.
A bound from below refutes claims; it never proves one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.stats import binom

from murmuration.accounting.errors import RunError

CONFIDENCE = 0.95
# How many coins to guess, as shares of m. Fixed before any score is seen; each one costs confidence.
SHARES = (0.05, 0.1, 0.2, 0.4)
LARGEST_EPSILON = 64.0


class AuditError(RunError, ValueError):
    """The numbers do not describe an audit; the message says which and what to change."""


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """At most how likely `correct` or more right guesses are under any (epsilon, delta)-DP algorithm."""
    if not 0 <= correct <= guesses <= canaries:
        raise AuditError(
            f"correct <= guesses <= canaries must hold, but they are {correct}, {guesses} and {canaries}; count again"
        )
    if not (math.isfinite(epsilon) and epsilon >= 0 and 0 <= delta < 1):
        raise AuditError(
            f"epsilon = {epsilon} and delta = {delta} are no privacy claim; use epsilon >= 0, delta in [0, 1)"
        )
    accuracy = 1 / (1 + math.exp(-epsilon))
    beta = float(binom.sf(correct - 1, guesses, accuracy))
    if delta == 0 or correct == 0:
        return min(1.0, beta)
    # delta may buy i more right guesses with probability at most 2·m·delta / i, for the worst i.
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    alpha = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def epsilon_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """Largest epsilon below which everything is refuted; 0 if nothing is. Rounded down by the last bisection."""
    level = _level(confidence)
    if p_value(canaries, guesses, correct, 0.0, delta) > level:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(canaries, guesses, correct, high, delta) <= level:
        low, high = high, high * 2
        if high > LARGEST_EPSILON:
            return low
    for _ in range(40):
        middle = (low + high) / 2
        refuted = p_value(canaries, guesses, correct, middle, delta) <= level
        low, high = (middle, high) if refuted else (low, middle)
    return low


def least_correct(canaries: int, guesses: int, epsilon: float, delta: float, confidence: float = CONFIDENCE) -> int:
    """Right guesses that refute (epsilon, delta); `guesses` + 1 if no number of them does."""
    level = _level(confidence)
    low, high = -1, guesses + 1
    while high - low > 1:
        middle = (low + high) // 2
        refuted = p_value(canaries, guesses, middle, epsilon, delta) <= level
        low, high = (low, middle) if refuted else (middle, high)
    return high


@dataclass(frozen=True)
class Guesses:
    """r coins guessed, v of them rightly, and what that refutes at the shared confidence."""

    guesses: int
    correct: int
    epsilon: float


@dataclass(frozen=True)
class AuditBound:
    """The bound holds at `confidence` although the best of several numbers of guesses was taken (Bonferroni)."""

    canaries: int
    included: int
    delta: float
    confidence: float
    tried: tuple[Guesses, ...]

    @property
    def best(self) -> Guesses:
        return max(self.tried, key=lambda each: each.epsilon)

    @property
    def epsilon(self) -> float:
        return self.best.epsilon

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "best": asdict(self.best)}


def numbers_of_guesses(canaries: int, shares: Sequence[float] = SHARES) -> list[int]:
    if canaries < 2:
        raise AuditError(f"an audit with {canaries} canaries can refute nothing; use at least 2, better 2000")
    return sorted({min(canaries, max(2, round(share * canaries))) for share in shares})


def correct_guesses(order: np.ndarray, included: np.ndarray, guesses: int) -> int:
    """Right ones when the highest scores are guessed to be in and as many of the lowest to be out."""
    lowest, highest = guesses // 2, guesses - guesses // 2
    return int(included[order[len(order) - highest :]].sum()) + int((~included[order[:lowest]]).sum())


def audit_bound(
    scores: np.ndarray, included: np.ndarray, delta: float, confidence: float = CONFIDENCE,
    shares: Sequence[float] = SHARES,
) -> AuditBound:  # fmt: skip
    """`scores` must not depend on `included` but through the run; a higher score speaks for a canary that was in."""
    included = np.asarray(included, dtype=bool)
    if scores.shape != included.shape or scores.ndim != 1:
        raise AuditError(f"{scores.shape} scores for {included.shape} coins; give one score per canary")
    if not np.isfinite(scores).all():
        raise AuditError("a score is not finite, so the run diverged; lower the learning rate")
    choices = numbers_of_guesses(len(scores), shares)
    each = shared_confidence(confidence, len(choices))
    order = np.argsort(scores, kind="stable")
    tried = []
    for guesses in choices:
        correct = correct_guesses(order, included, guesses)
        bound = epsilon_bound(len(scores), guesses, correct, delta, each)
        tried.append(Guesses(guesses, correct, bound))
    return AuditBound(len(scores), int(included.sum()), delta, confidence, tuple(tried))


def shared_confidence(confidence: float, choices: int) -> float:
    """Of each of several bounds, so that all of them hold together at `confidence`."""
    return 1 - _level(confidence) / choices


def refuting_share(
    canaries: int, participations: Sequence[float], std: float, claim: float, delta: float, *,
    confidence: float = CONFIDENCE, shares: Sequence[float] = SHARES, audits: int = 400, seed: int = 0,
) -> float:  # fmt: skip
    """Share of simulated audits that refute `claim`, for Gaussian scores: the power at a fault, or the false alarms.

    An included canary's score gains k with probability participations[k] (a q = 1 run of T steps: k = T alone);
    `std` is the deviation of the noise in a score, in units of one participation.
    """
    draw = np.random.default_rng(seed)
    choices = numbers_of_guesses(canaries, shares)
    each = shared_confidence(confidence, len(choices))
    needed = [least_correct(canaries, guesses, claim, delta, each) for guesses in choices]
    counts = np.arange(len(participations))
    refuted = 0
    for _ in range(audits):
        included = draw.random(canaries) < 0.5
        gain = draw.choice(counts, size=canaries, p=np.asarray(participations))
        order = np.argsort(np.where(included, gain, 0) + std * draw.standard_normal(canaries))
        found = (correct_guesses(order, included, guesses) for guesses in choices)
        refuted += any(correct >= least for correct, least in zip(found, needed, strict=True))
    return refuted / audits


def _level(confidence: float) -> float:
    if not 0.5 <= confidence < 1:
        raise AuditError(f"a confidence of {confidence} is no use; choose one in [0.5, 1), such as 0.95")
    return 1 - confidence
