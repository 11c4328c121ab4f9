"""At which place a record's own class comes among all classes, by their scores."""

from __future__ import annotations

from torch import Tensor

MOST = 5
"""Places that are counted: top-1 to top-5."""


def hits(scores: Tensor, labels: Tensor, most: int) -> Tensor:
    """[most]: how many records have their class at each of the first places; the lower number comes first on ties."""
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]
    return (order == labels[:, None]).sum(dim=0)
