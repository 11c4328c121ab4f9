"""How well one class is told from all others, as clinical studies report it: sensitivity, specificity and AUC."""

from __future__ import annotations

import math

import numpy as np

from murmuration.evaluation.measures.interval import CONFIDENCE, Estimate, share


def auc(scores: np.ndarray, has: np.ndarray) -> float:
    """The probability that a record of the class has a higher score than another; ties count half."""
    from scipy.stats import rankdata

    ranks, count = rankdata(scores), int(has.sum())
    above = ranks[has].sum() - count * (count + 1) / 2
    return float(above / (count * (len(scores) - count)))


def auc_estimate(scores: np.ndarray, has: np.ndarray) -> Estimate | None:
    """With DeLong's interval on the log-odds, so that it stays between 0 and 1. None where all records or none have the
    class.

    Where the sample is ranked without a fault, or has a single record on one side, DeLong's variance is 0 or unknown.
    Then the interval is Wilson's for as many draws as the smaller side has records.
    """
    from scipy.stats import norm, rankdata

    inside, outside = int(has.sum()), int((~has).sum())
    if not inside or not outside:
        return None
    value, ranks = auc(scores, has), rankdata(scores)
    if 0 < value < 1 and min(inside, outside) > 1:
        below = (ranks[has] - rankdata(scores[has])) / outside  # of each record, the share of others below it
        above = 1 - (ranks[~has] - rankdata(scores[~has])) / inside
        deviation = math.sqrt(below.var(ddof=1) / inside + above.var(ddof=1) / outside)
        half = float(norm.ppf((1 + CONFIDENCE) / 2)) * deviation / (value * (1 - value))
        odds = math.log(value / (1 - value))
        low, high = (1 / (1 + math.exp(-bound)) for bound in (odds - half, odds + half))
        return Estimate(value, len(scores), low, high)
    few = min(inside, outside)
    wilson = share(round(value * few), few)
    return Estimate(value, len(scores), min(wilson.low, value), max(wilson.high, value))


def sensitivity(called: np.ndarray, has: np.ndarray) -> Estimate | None:
    """The share of the class's records that are called so."""
    return share(int((called & has).sum()), int(has.sum())) if has.any() else None


def specificity(called: np.ndarray, has: np.ndarray) -> Estimate | None:
    """The share of all other records that are not called so."""
    return sensitivity(~called, ~has)


def confusion(truth: np.ndarray, called: np.ndarray, classes: int) -> np.ndarray:
    """[true class, predicted class]: numbers of records."""
    return np.bincount(truth * classes + called, minlength=classes**2).reshape(classes, classes)
