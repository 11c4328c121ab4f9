"""A weight for each record, by which its loss is multiplied before clipping, so no record can exceed the clip bound."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Inputs = dict[str, Tensor]
"""Model inputs by name; each has one row for each record."""
RECORD_WEIGHT = "record_weight"


def weighted(losses: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """[B] -> [B]; unchanged if records have no weights."""
    weight = inputs.get(RECORD_WEIGHT)
    return losses if weight is None else losses * weight
