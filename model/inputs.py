"""What a batch has beside what the model sees: a record's weight in the loss, and the key of what is dropped for it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Inputs = dict[str, Tensor]
"""Model inputs by name; each has one row for each record."""
DROP_KEY = "drop_key"
"""The key of a row's masks (`drop.py`)."""
RECORD_WEIGHT = "record_weight"


def weighted(losses: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """[B] -> [B], multiplied before clipping, so no record can exceed the bound; unchanged if records have no
    weights."""
    weight = inputs.get(RECORD_WEIGHT)
    return losses if weight is None else losses * weight
