"""The loss of each record, from a forward pass that was given no other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from murmuration.data.draw.micro_batch import ROW_SHARE
from murmuration.train.clip.isolated import enter, entered, leave
from murmuration.train.clip.layers import LAYER_RULES
from murmuration.train.clip.rule import ClipError
from murmuration.train.clip.tracker import ParameterTracker

# Slots with several rows: views of a record, or records of a unit, whose losses are clipped as one.
#
# The rows of a slot follow one another. So to the layers' rules they are further tokens of one gradient, and a model
# that computes one loss per row needs no change: its losses are added up by slot, and what is clipped is the gradient
# of that.

Losses = Callable[[dict[str, Tensor]], Tensor]


Model = Callable[[dict[str, Tensor]], Tensor]
Values = Callable[[Model, Mapping[str, Tensor], int], Tensor]
"""Takes a model, inputs and a number of slots; returns a number for each slot."""
_passes_lock = threading.Lock()
_passes = 0
"""Passes that are under way in this process."""
_stance: AbstractContextManager[object] | None = None


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


def losses_of(
    model: Model, inputs: Mapping[str, Tensor], slots: int, tracker: ParameterTracker | None = None
) -> Tensor:  # fmt: skip
    """[slots], of inputs whose first dimension has the rows of all records, those of one record together.

    Without a tracker, nothing is kept for the clip engine, and autograd sees the weights as usual.
    """

    def loss(record: dict[str, Tensor]) -> Tensor:
        found = slot_losses(model, record, 1)
        if found.shape != (1,):
            rows = len(next(iter(record.values())))
            raise ClipError(
                f"the model returned losses of shape {list(found.shape)} for a record with {rows} "
                f"{'row' if rows == 1 else 'rows'}; forward() is given one record at a time, and must return one loss "
                "for each row"
            )
        return found.squeeze(0)

    return isolated(loss, inputs, slots, tracker, model)


def isolated(
    run: Model, inputs: Mapping[str, Tensor], slots: int, tracker: ParameterTracker | None = None, model: Any = None
) -> Tensor:  # fmt: skip
    """[slots, …]: what `run` returns of each record by itself. `model`: whose modules a refusal names."""
    device = next(iter(inputs.values())).device
    plain = tracker or ParameterTracker({}, slots, device, None, LAYER_RULES)
    with uncompiled(), plain, entered(slots):
        record = {name: enter(tensor.unflatten(0, (slots, -1)), plain) for name, tensor in inputs.items()}
        try:
            found = leave(run(record), slots)
            plain.require_none_caught()
            return found
        except ClipError:
            raise
        except Exception as error:
            from murmuration.train.clip.refusal import refused  # sentences for the few models that cannot run

            sentence = refused(error, model)
            if sentence is None:
                raise
            raise sentence from error


@torch.no_grad()
def incomputable(model: Model, inputs: Mapping[str, Tensor], present: Tensor, values: Values = losses_of) -> Tensor:
    """Which records the model raises for, each by itself (a label out of range, an index behind a table's end), or
    finds no finite value of."""
    odd = torch.zeros_like(present)
    for slot in present.nonzero():
        try:
            odd[slot] = not values(model, of_slots(inputs, slot, len(present)), 1).isfinite().all()
        except (IndexError, RuntimeError):
            odd[slot] = True
    return odd


def blanked(inputs: Mapping[str, Tensor], odd: Tensor) -> dict[str, Tensor]:
    """With zeros in the slots of these records, as in those that hold none."""
    rest = {}
    for name, tensor in inputs.items():
        by_slot = tensor.unflatten(0, (len(odd), -1)).clone()
        by_slot[odd] = 0
        rest[name] = by_slot.flatten(0, 1)
    return rest


@contextmanager
def uncompiled() -> Iterator[None]:
    """Disables compiled code, which calls no function that could be watched; the model runs as written instead.

    PyTorch's stance is one for all threads, and each that leaves it restores what it found. So the first pass takes it
    and the last one gives it back; otherwise one thread's end would let compiled code into another's pass.
    """
    global _passes, _stance
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and importing it would take seconds
        yield
        return
    with _passes_lock:
        if not _passes:
            _stance = torch.compiler.set_stance("force_eager")
        _passes += 1
    try:
        yield
    finally:
        with _passes_lock:
            _passes -= 1
            if not _passes and _stance is not None:
                _stance.__exit__(None, None, None)
                _stance = None
