"""At which place a record's own class comes among all classes, by their scores: top-1, top-5, and ReaL.

By ReaL a picture may show several classes, and the first answer is right if it is any of those that people found in it.
Pictures in which they found none are not scored.
"""

from __future__ import annotations

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
