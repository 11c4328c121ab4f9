"""Layers that a private phase cannot have, named at a glance with the place and the fix.

What lets records meet is refused by the first pass (`train/clip/isolated.py`), whatever its name. This is for models
that are named in a config: it answers before there is data, and before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

_NOT_KEYED = "and its draw is not keyed by sample; set it to 0, or use the layers of model.drop"


class CouplingError(ValueError):
    """A module lets samples influence one another, or draws randomness without a key."""


def refuse_coupling(module: nn.Module) -> None:
    """Raise CouplingError for the first layer that mixes samples, keeps running statistics or drops without keys."""
    for path, part in module.named_modules():
        if reason := _reason(part):
            raise CouplingError(f"{path or '(the model itself)'} ({type(part).__name__}) {reason}.")


def keeps_statistics(part: nn.Module) -> bool:
    """Whether it normalises by statistics over records that it stores: in evaluation mode a fixed map of one record."""
    return any(name.startswith("running_") and isinstance(stored, Tensor) for name, stored in part._buffers.items())


def _reason(part: nn.Module) -> str | None:
    if keeps_statistics(part) and not part.training:
        return None
    if isinstance(part, _InstanceNorm):
        if part.track_running_stats:
            return "keeps running statistics over samples; set track_running_stats=False"
        return None
    # SyncBatchNorm, the lazy ones and timm's BatchNormAct all derive from _BatchNorm; foreign copies
    # are recognised by their name or by their buffers.
    if isinstance(part, _BatchNorm) or "BatchNorm" in type(part).__name__:
        return "normalises with statistics of the whole batch; use LayerNorm or GroupNorm"
    if keeps_statistics(part):
        return "keeps running statistics over samples; use LayerNorm or GroupNorm"
    if isinstance(part, _DropoutNd) and part.p > 0:
        return f"drops units with p={part.p}, {_NOT_KEYED}"
    if isinstance(part, nn.MultiheadAttention) and part.dropout > 0:
        return f"drops attention with p={part.dropout}, {_NOT_KEYED}"
    if isinstance(part, nn.RNNBase) and part.dropout > 0:
        return f"drops units with p={part.dropout}, {_NOT_KEYED}"
    rate = getattr(part, "drop_prob", 0.0)
    if isinstance(rate, float) and rate > 0:
        return f"drops whole paths with p={rate}, {_NOT_KEYED}"
    return None


@contextmanager
def zeros_filled(module: nn.Module) -> Iterator[None]:
    """Fill all-zero matrices with fixed numbers for the duration, and restore their own bits afterwards.

    A classifier's head and a LoRA's second matrix start at zero, which would hide all layers before them. Sharded
    parameters, of which only a part is present, are left as they are.
    """
    kept: dict[nn.Parameter, Tensor] = {}
    for p in module.parameters():
        plain = p.detach()
        # Engines shard a parameter by emptying it, changing its type or freeing its memory.
        whole = type(plain) is Tensor and 0 < plain.nbytes <= plain.untyped_storage().nbytes()
        if p.dim() > 1 and whole and not bool(p.any()):
            kept[p] = plain.clone()
    with torch.no_grad():
        for parameter in kept:
            values = torch.arange(1.0, parameter.numel() + 1, device=parameter.device).sin() * 0.5
            parameter.copy_(values.view(parameter.shape))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept.items():
                parameter.copy_(value)
