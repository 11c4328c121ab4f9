"""Membership inference: how well a record's losses and logits tell whether a model was trained on it.

Scores are higher for members. The classifier on losses and logits is a logistic regression that is fitted to one half
of the records and scores the other, and the other way round, so no record is scored by a fit that saw it.

LiRA compares a record's score with those that shadow models give it. Their spread around their mean is pooled over all
records, as its authors do where there are few shadows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from murmuration.evaluation.measures.interval import CONFIDENCE, Estimate, share
from murmuration.evaluation.measures.one_against_rest import auc

DRAWS = 1000
"""Bootstrap draws, for intervals that have no formula."""
LEAST_SHADOWS = 2
FALSE_ALARMS = 0.01


class MembershipError(ValueError):
    """The attack cannot be made; the message names the cause and the fix."""


@dataclass(frozen=True)
class Attack:
    """A score for each record, who is a member, and above which score a record is called one."""

    scores: np.ndarray
    members: np.ndarray
    threshold: np.ndarray
    """One for all, or one for each record where it was chosen on other records."""

    @property
    def called(self) -> np.ndarray:
        return self.scores > self.threshold

    def numbers(self, seed: int = 0) -> dict[str, Estimate]:
        called, members = self.called, self.members
        caught = int((called & members).sum())
        found = {"accuracy": share(int((called == members).sum()), len(members))}
        if called.any():
            found["precision"] = share(caught, int(called.sum()))
        found["recall"] = share(caught, int(members.sum()))
        found["F1"] = _bootstrapped(lambda at: f1(called[at], members[at]), members, seed)
        found["AUC"] = _bootstrapped(lambda at: auc(self.scores[at], members[at]), members, seed)
        found[f"recall at {FALSE_ALARMS:.0%} false alarms"] = _bootstrapped(
            lambda at: recall_at(self.scores[at], members[at], FALSE_ALARMS), members, seed
        )
        return found


def f1(called: np.ndarray, members: np.ndarray) -> float:
    return float(2 * (called & members).sum() / (called.sum() + members.sum()))


def recall_at(scores: np.ndarray, members: np.ndarray, false_alarms: float) -> float:
    """The share of members above the lowest threshold that at most this share of the others exceeds."""
    others = np.sort(scores[~members])[::-1]
    threshold = others[int(np.floor(false_alarms * len(others)))]
    return float((scores[members] > threshold).mean())


def by_threshold(scores: np.ndarray, members: np.ndarray) -> Attack:
    """Each half of the records gets the threshold that is most often right on the other half."""
    threshold = np.zeros(len(scores))
    for part in _halves(members):
        threshold[part] = _best_threshold(scores[~part], members[~part])
    return Attack(scores, members, threshold)


def by_classifier(features: np.ndarray, members: np.ndarray) -> Attack:
    """Log-odds of a logistic regression with a unit penalty on standardised features; called a member above 0."""
    scores = np.zeros(len(features))
    for part in _halves(members):
        seen = features[~part]
        scale = seen.std(axis=0)
        scale[scale == 0] = 1.0
        x = (features - seen.mean(axis=0)) / scale
        weights = _logistic(x[~part], members[~part])
        scores[part] = x[part] @ weights[1:] + weights[0]
    return Attack(scores, members, np.zeros(len(features)))


def lira(target: np.ndarray, shadows: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """[records] of scores from `target` [records] and `shadows` [models, records]; `inside` says which shadow was
    trained on which record.

    Log of the likelihood ratio where every record has two shadows of each kind; otherwise how far the target's score
    lies above that of the shadows without the record, in deviations.
    """
    least_in, least_out = int(inside.sum(axis=0).min()), int((~inside).sum(axis=0).min())
    if least_out < LEAST_SHADOWS:
        raise MembershipError(
            f"a record has {least_out} shadow models that were not trained on it; give at least {LEAST_SHADOWS}"
        )
    mean_out, deviation_out = _pooled(shadows, ~inside)
    away = (target - mean_out) / deviation_out
    if least_in < LEAST_SHADOWS:
        return away
    mean_in, deviation_in = _pooled(shadows, inside)
    near = (target - mean_in) / deviation_in
    return (away**2 - near**2) / 2 + np.log(deviation_out / deviation_in)


def _pooled(shadows: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, float]:
    """Each record's mean over the chosen shadows, and one deviation from these means over all records."""
    counts = chosen.sum(axis=0)
    means = np.where(chosen, shadows, 0.0).sum(axis=0) / counts
    squares = np.where(chosen, (shadows - means) ** 2, 0.0).sum()
    return means, max(float(np.sqrt(squares / (counts - 1).sum())), 1e-12)


def _halves(members: np.ndarray) -> list[np.ndarray]:
    """Two masks, each with half of the members and half of the others."""
    first = np.zeros(len(members), dtype=bool)
    for number, kind in enumerate((members, ~members)):
        places = np.flatnonzero(kind)
        if len(places) < 2:
            raise MembershipError("members and others need at least two readable records each; name more")
        first[np.random.default_rng([0, number]).permutation(places)[: len(places) // 2]] = True
    return [first, ~first]


def _best_threshold(scores: np.ndarray, members: np.ndarray) -> float:
    order = np.argsort(scores, kind="stable")
    # Right answers if everything up to a place is called another record, and the rest a member.
    left = np.concatenate([[0], np.cumsum(np.where(members[order], -1, 1))])
    right = left + members.sum()
    ordered = np.concatenate([[-np.inf], scores[order]])
    # Equal scores cannot be told apart, so only the last of them is a place to cut.
    cuts = np.append(ordered[1:] != ordered[:-1], True)
    return float(ordered[int(np.argmax(np.where(cuts, right, -1)))])


def _logistic(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Intercept and weights that minimise the summed loss + |weights|²/2."""
    from scipy.optimize import minimize

    signs = np.where(y, 1.0, -1.0)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margins = signs * (x @ weights[1:] + weights[0])
        slopes = -signs / (1 + np.exp(np.clip(margins, -500, 500)))
        gradient = np.concatenate([[slopes.sum()], slopes @ x + weights[1:]])
        return float(np.logaddexp(0, -margins).sum() + weights[1:] @ weights[1:] / 2), gradient

    options = {"gtol": 1e-8, "ftol": 0.0, "maxiter": 10_000, "maxfun": 100_000}
    return minimize(loss, np.zeros(x.shape[1] + 1), jac=True, method="L-BFGS-B", options=options).x


def _bootstrapped(value: Callable[[np.ndarray], float], members: np.ndarray, seed: int) -> Estimate:
    """Percentiles over draws of members and of others, each with replacement."""
    draw = np.random.default_rng(seed)
    inside, outside = np.flatnonzero(members), np.flatnonzero(~members)
    values = [
        value(np.concatenate([draw.choice(inside, len(inside)), draw.choice(outside, len(outside))]))
        for _ in range(DRAWS)
    ]
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value(np.arange(len(members))), len(members), float(low), float(high))
