"""Mean average precision: how well the scores of each class rank the records that have it above those that have not.

A class's average precision is the mean, over the records that have it, of the share of right records among all that
score at least as high. The mean is over classes that some record has: of the others nothing can be said.
"""

from __future__ import annotations

import numpy as np


def average_precision(scores: np.ndarray, right: np.ndarray) -> float | None:
    """For one class: its scores [n] and whether records have it [n]; None if no record has. Records with equal scores
    come at once, so that their order does not matter."""
    found = int(right.sum())
    if not found:
        return None
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(right[order])
    last = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # of each run of equal scores
    gained = np.diff(hits[last], prepend=0)
    return float((gained * hits[last] / (last + 1)).sum() / found)


def mean_average_precision(scores: np.ndarray, right: np.ndarray) -> float | None:
    """The mean over classes; `scores` and `right` [n, classes]; None if no record has any class."""
    each = [average_precision(scores[:, number], right[:, number]) for number in range(scores.shape[1])]
    known = [value for value in each if value is not None]
    return float(np.mean(known)) if known else None
