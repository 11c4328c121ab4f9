"""At which place a record's own class comes among all classes, by their scores: top-1, top-5, and ReaL.

By ReaL a picture may show several classes, and the first answer is right if it is any of those that people found in it.
Pictures in which they found none are not scored.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from murmuration.train.measures.shares import MOST


def hits(scores: Tensor, labels: Tensor, most: int) -> Tensor:
    """[most]: how many records have their class at each of the first places; the lower number comes first on ties."""
    return (_first(scores, most) == labels[:, None]).sum(dim=0)


def _first(scores: Tensor, most: int) -> Tensor:
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :most]


class Tally:
    """Counts of right answers. Counts add up over batches and ranks, where shares would not."""

    def __init__(self, classes: int) -> None:
        self._most = min(MOST, classes)
        self._counts = torch.zeros(self._most + 3, dtype=torch.int64)

    def add(self, scores: Tensor, labels: Tensor, right: Tensor | None = None) -> None:
        """Adds records: their scores and which classes are right [B, classes], and their own classes [B]."""
        places = hits(scores, labels, self._most)
        others = places.new_tensor([len(labels), 0, 0])
        if right is not None:
            others[1] = right.gather(1, _first(scores, 1)).sum()
            others[2] = right.any(dim=1).sum()
        self._counts += torch.cat([places, others]).cpu()

    def counts(self) -> list[int]:
        """Records with their class at each of the first places; records; records whose first answer is right, and
        records with right classes."""
        return self._counts.tolist()


# Mean average precision: how well the scores of each class rank the records that have it above those that have not.
#
# A class's average precision is the mean, over the records that have it, of the share of right records among all that
# score at least as high. The mean is over classes that some record has: of the others nothing can be said.


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
