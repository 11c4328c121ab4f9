"""Turns right and wrong guesses about canaries into a lower bound on epsilon (Steinke, Nasr and Jagielski 2023).

m records are each put in or left out by a fair coin; an auditor sees one run and guesses some of the coins. If the
run is (epsilon, delta)-DP for one record in or out, then v right guesses out of r are at most as likely as in
randomised response, up to a term in m·delta (their Theorem 5.2). An epsilon under which v is too unlikely is refuted.
A lower bound refutes claims; it never proves one.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import binom

from murmuration.accounting.errors import RunError

CONFIDENCE = 0.95
# The share of audits that accuse an honest run. The reported bound has a confidence of its own.
ACCUSED = 1e-6
# How many coins to guess, as shares of m. Fixed before any score is seen; each one costs confidence.
SHARES = (0.05, 0.1, 0.2, 0.4)
LARGEST_EPSILON = 64.0


class AuditError(RunError, ValueError):
    """The numbers do not describe an audit; the message says which and what to change."""


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Upper bound on the probability of `correct` or more right guesses under any (epsilon, delta)-DP algorithm."""
    if not 0 <= correct <= guesses <= canaries:
        raise AuditError(
            f"correct <= guesses <= canaries must hold, but they are {correct}, {guesses} and {canaries}; count again"
        )
    if not (math.isfinite(epsilon) and epsilon >= 0 and 0 <= delta < 1):
        raise AuditError(
            f"epsilon = {epsilon} and delta = {delta} are not a privacy claim; use epsilon >= 0, delta in [0, 1)"
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
    level = level_of(confidence)
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


def numbers_of_guesses(canaries: int) -> list[int]:
    if canaries < 2:
        raise AuditError(f"an audit with {canaries} canaries can refute nothing; use at least 2, better 2000")
    return sorted({min(canaries, max(2, round(share * canaries))) for share in SHARES})


def correct_guesses(order: np.ndarray, included: np.ndarray, guesses: int) -> int:
    """How many guesses are right if the highest scores are guessed to be in and as many of the lowest to be out."""
    lowest, highest = guesses // 2, guesses - guesses // 2
    return int(included[order[len(order) - highest :]].sum()) + int((~included[order[:lowest]]).sum())


def level_of(confidence: float) -> float:
    """The probability of error that a confidence leaves."""
    if not 0.5 <= confidence < 1:
        raise AuditError(f"a confidence of {confidence} is no use; choose one in [0.5, 1), such as 0.95")
    return 1 - confidence
