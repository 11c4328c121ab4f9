"""Passes a finished sum to the sharded engine: as the gradient of a scalar, once per logical step.

The engine's own hooks on the parameters fire as after any backward pass, so it reduces and shards the sum as it would
an ordinary gradient. There is one tap per module that owns parameters, so that an engine that shards the parameters
themselves (ZeRO-3) need not gather those of more than one module at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class ModuleInjector(nn.Module):
    """A scalar zero whose gradient with respect to each of its parameters is that parameter's total, in fp32."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        # In a tuple, so that they are not registered a second time: they belong to the model's own modules.
        self._taken = tuple(parameters.items())

    @property
    def taken(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._taken]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._taken)

    def forward(self, totals: Mapping[str, Tensor]) -> Tensor:
        return _Deferred.apply([totals[name] for name, _ in self._taken], *self.taken)


class GradientInjector(nn.Module):
    """All taps of a model, in the order of its modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        owners: dict[str, dict[str, nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                owners.setdefault(name.rpartition(".")[0], {})[name] = parameter
        self.taps = nn.ModuleList(ModuleInjector(parameters) for parameters in owners.values())

    def forward(self, totals: Mapping[str, Tensor], turn: int | None = None) -> Tensor:
        """`turn`: of the modules, the one whose totals alone are handed over; they take turns."""
        if turn is not None:
            return self.tap_of(turn)(totals)
        return torch.stack([tap(totals) for tap in self.taps]).sum()

    def tap_of(self, turn: int) -> ModuleInjector:
        return self.taps[turn % len(self.taps)]  # pyright: ignore[reportReturnType]


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, totals: list[Tensor], *parameters: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.totals = totals
        return totals[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad_output: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        del grad_output  # engines scale the loss by their idea of a batch size; a sum is not scaled
        return None, *(total.to(torch.float32) for total in ctx.totals)
