"""A weight for each record: its loss counts so many times. It acts before clipping, so no record adds more for it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

RECORD_WEIGHT = "record_weight"


def weighted(losses: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """[B] -> [B]; as they are where records have no weights."""
    weight = inputs.get(RECORD_WEIGHT)
    return losses if weight is None else losses * weight
