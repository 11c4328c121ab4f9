"""Slots with several rows: views of a record, or records of a unit, whose losses are clipped as one.

The rows of a slot follow one another. So to the layers' rules they are further tokens of one gradient, and a model that
computes one loss per row needs no change: its losses are added up by slot, and what is clipped is the gradient of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from murmuration.data.draw.micro_batch import ROW_SHARE
from murmuration.train.clip.rule import ClipError

Losses = Callable[[dict[str, Tensor]], Tensor]


def slot_losses(model: Losses, inputs: Mapping[str, Tensor], slots: int) -> Tensor:
    """One loss for each slot: the sum over its rows of share · loss. A row of share 0 has no gradient, even if its own
    loss is not finite; one of any other share makes the loss of its slot what it is itself."""
    rest = dict(inputs)
    share = rest.pop(ROW_SHARE, None)
    losses = model(rest)
    if share is None:
        return losses
    if losses.shape != share.shape:
        raise ClipError(f"the model returned losses of shape {list(losses.shape)} for {len(share)} rows; give one each")
    return torch.where(share > 0, losses * share, 0.0).view(slots, -1).sum(1)


def slot_mean(values: Tensor, inputs: Mapping[str, Tensor], slots: int) -> Tensor:
    """fp64 [B]: the mean of a slot's rows, each with its share; 0 where no row has one."""
    if ROW_SHARE not in inputs:
        return values.double()
    share = inputs[ROW_SHARE].to(values.device).double()
    total = share.view(slots, -1).sum(1)
    return torch.where(share > 0, values * share, 0.0).view(slots, -1).sum(1) / torch.where(total > 0, total, 1.0)


def rows_of(inputs: Mapping[str, Tensor], slots: int) -> int:
    return len(inputs[ROW_SHARE]) // max(1, slots) if ROW_SHARE in inputs else 1


def of_slots(inputs: Mapping[str, Tensor], chosen: Tensor, slots: int) -> dict[str, Tensor]:
    """All rows of the chosen slots, given by number or as a mask."""
    if ROW_SHARE not in inputs:
        return {name: x[chosen] for name, x in inputs.items()}
    return {name: x.unflatten(0, (slots, -1))[chosen].flatten(0, 1) for name, x in inputs.items()}
