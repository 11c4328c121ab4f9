"""One score for each canary: how much likelier the numbers of all its turns are if it was in than if it was out.

Any function of what was released makes valid guesses; this one is the best there is if the plan is true. Under the
plan, a canary that is in moves its turns along one of several patterns, whose chances are public: the score is the
logarithm of the mean likelihood ratio over these patterns. Nothing that only the key tells enters, and no coin.

The size of the noise and how it hangs together between turns are not taken from the plan, but from the numbers: their
second moments over all canaries, less what gains of fair coins add to them. Two segments that share a draw then have a
direction without noise, in which a canary that was drawn in only one of them is seen with certainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy.special import logsumexp

from murmuration.train.audit.turns import Group, Turn

MOST_PATTERNS = 256
"""Turns are judged together up to so many patterns in all; beyond that each by itself, which finds no shared draws."""
ENOUGH = 20
"""Canaries for each number of a group of turns, from which its noise is measured and not taken from the plan."""
LEAST_NOISE = 1e-2
"""The least variance in any direction, as a share of the plan's: what so many canaries cannot tell from none."""


def scores(groups: Sequence[Group], canaries: int, gain: float, noise: float) -> np.ndarray:
    """`gain`: what one participation adds; `noise`: the planned deviation of a draw."""
    found = np.zeros(canaries)
    for group in groups:
        for turns in _judged_together(group.turns):
            found[group.which] += _log_ratio(turns, gain, noise)
    return found


def _judged_together(turns: Sequence[Turn]) -> list[list[Turn]]:
    together = 1
    for turn in turns:
        together *= len(turn.chances)
        if together > MOST_PATTERNS:
            return [[turn] for turn in turns]
    return [list(turns)] if turns else []


def _log_ratio(turns: Sequence[Turn], gain: float, noise: float) -> np.ndarray:
    values = np.concatenate([turn.values for turn in turns])
    patterns = gain * np.array([np.concatenate(each) for each in product(*(turn.patterns for turn in turns))])
    chances = np.array([np.prod(each) for each in product(*(turn.chances for turn in turns))])
    weights = np.linalg.solve(_covariance(values, patterns, chances, noise), patterns.T)  # [numbers, patterns]
    exponents = weights.T @ values - 0.5 * np.sum(patterns.T * weights, axis=0)[:, None]
    return np.asarray(logsumexp(exponents, axis=0, b=chances[:, None]))


def _covariance(values: np.ndarray, patterns: np.ndarray, chances: np.ndarray, noise: float) -> np.ndarray:
    """Covariance of the noise in the turns' numbers."""
    numbers, canaries = values.shape
    planned = noise**2
    if canaries < ENOUGH * numbers:
        return planned * np.eye(numbers)
    gains = 0.5 * (patterns.T * chances) @ patterns  # of canaries, half of which are in
    sizes, directions = np.linalg.eigh(values @ values.T / canaries - gains)
    return (directions * np.maximum(sizes, LEAST_NOISE * planned)) @ directions.T
