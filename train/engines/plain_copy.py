"""An unsharded copy of a model that an engine shards, for comparing with plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from murmuration.train.noise.update import UpdateError


class PlainCopy:
    """Made before the engine touches the model, without the weights, which are filled in when it is needed."""

    def __init__(self, model: nn.Module) -> None:
        # The memo maps each weight to an empty placeholder: nothing is copied, and shared weights stay shared.
        memo = {id(p): nn.Parameter(p.detach().new_empty(0), p.requires_grad) for p in model.parameters()}
        self._empty: nn.Module | None = None
        try:
            self._empty = copy.deepcopy(model, memo)  # pyright: ignore[reportArgumentType]
        except Exception as error:  # a module of the user's own may contain anything
            self._why = f"{type(error).__name__}: {error}".splitlines()[0][:200]

    def filled(self, weights: Mapping[str, Tensor], modes: Mapping[str, bool], device: torch.device) -> nn.Module:
        """A new model, which is freed with the last reference to it."""
        if self._empty is None:
            raise UpdateError(
                f"the model cannot be copied ({self._why}), so no gradient can be compared where weights are sharded; "
                "let copy.deepcopy() copy it, or use an engine that keeps weights whole"
            )
        model = copy.deepcopy(self._empty).to(device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.data = weights[name].to(device, parameter.dtype)
            for name, buffer in model.named_buffers():
                if name in weights:
                    buffer.copy_(weights[name])
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)
        return model
