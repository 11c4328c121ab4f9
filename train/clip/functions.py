"""Layers that compute as usual but, in the backward pass, return only the input gradient.

The operands of their parameter gradients (activations, output gradients) are reported as pieces instead. The anchor is
a leaf that makes every such layer part of the graph, even where its input needs no gradient; no gradient flows into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from murmuration.train.clip.kernels import NormBackward
from murmuration.train.clip.sums import products


@dataclass(frozen=True)
class Affine:
    """The parameters of one use of a layer, outside autograd, and the callback for their pieces.

    `report` takes the operands of the pieces: (activation, output gradient) in the layer's own layout.
    """

    weight: Tensor
    bias: Tensor | None
    report: Callable[[Any, Tensor], None]

    def of_type(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Both as they are now: where weights are sharded, their data is elsewhere between the passes."""
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def tell(self, activation: Tensor | Standardised, gradient: Tensor) -> None:
        """Reports both operands. Handling them is not a use of a parameter, so the tracker need not see it."""
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            self.report(activation, gradient)


def changeable(out: Tensor) -> Tensor:
    """The same values, of which autograd does not think as a view: PyTorch makes some results as views of what nobody
    else sees, and refuses that a model changes a view in place that a custom function returned."""
    return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out  # pyright: ignore[reportCallIssue]


# Elements that a processor's matrix unit multiplies at a time in bf16.
TILE = 32


def whole_tiles(operand: Tensor, dimension: int) -> Tensor:
    """Zeros behind the end of a dimension over which a product in half precision sums, up to a whole number of tiles;
    only on processors.

    Their matrix units (AMX) read a whole tile, beyond the end of a row too, and multiply what they find there by 0. It
    is the next row, which may be another record's; and where that is not finite, 0 times it is not, either: a record
    would cost the one before it its place in the sum.
    """
    missing = -operand.shape[dimension] % TILE
    if not missing or operand.device.type != "cpu" or operand.dtype != torch.bfloat16:
        return operand
    return F.pad(operand, (0, missing) if dimension == -1 else (0, 0, 0, missing))


def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear by autograd alone, of weights that are not trained; in whole tiles, which its own gradient then has,
    too."""
    kind = x.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    outputs, inputs = weight.shape if weight.dim() == 2 else (TILE, TILE)
    if kind != "cpu" or half != torch.bfloat16 or (outputs % TILE == 0 and inputs % TILE == 0):
        return F.linear(x, weight, bias)
    rows = whole_tiles(whole_tiles(weight.to(half), -1), -2)
    shift = bias if bias is None else F.pad(bias.to(half), (0, len(rows) - outputs))
    found = F.linear(whole_tiles(x.to(half), -1), rows, shift)
    return found[..., :outputs]


class Linear(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, layer: Affine) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del anchor
        ctx.layer = layer
        ctx.save_for_backward(x)
        bias = layer.bias
        weight = whole_tiles(layer.weight.to(x.dtype), -1)
        return changeable(F.linear(whole_tiles(x, -1), weight, bias if bias is None else bias.to(x.dtype)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        below = None
        if ctx.needs_input_grad[1]:
            below = whole_tiles(gradient, -1) @ whole_tiles(ctx.layer.weight.to(gradient.dtype), -2)
        ctx.layer.tell(x, gradient)
        return None, below, None


class Standardised(NamedTuple):
    """(x - mean) · inverse, not yet computed."""

    x: Tensor
    mean: Tensor
    inverse: Tensor
    sums: Sequence[Tensor] | None = None
    """Each record's gradients of scale and shift, where one kernel computes all."""


class LayerNorm(Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, anchor: Tensor, x: Tensor, shape: list[int], eps: float, layer: Affine,
        together: NormBackward | None,
    ) -> Tensor:  # fmt: skip
        del anchor
        out, mean, inverse = torch.native_layer_norm(x, shape, *layer.of_type(x.dtype), eps)
        ctx.layer, ctx.shape, ctx.together = layer, shape, together
        ctx.save_for_backward(x, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, mean, inverse = ctx.saved_tensors
        layer = ctx.layer
        below, sums = None, None
        if ctx.together is not None:
            wanted = ctx.needs_input_grad[1]
            below, *sums = ctx.together(x, gradient, mean, inverse, layer.weight, wanted=wanted)
        elif ctx.needs_input_grad[1]:
            below = torch.ops.aten.native_layer_norm_backward(
                gradient, x, ctx.shape, mean, inverse, *layer.of_type(x.dtype), [True, False, False]
            )[0]
        layer.tell(Standardised(x, mean, inverse, sums), gradient)
        return None, below, None, None, None, None


class GroupNorm(Function):
    """x is [rows, channels, …]. Mean and inverse are those of each row's groups, [rows, groups]."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, anchor: Tensor, x: Tensor, groups: int, eps: float, layer: Affine, together: NormBackward | None
    ) -> Tensor:  # fmt: skip
        del anchor
        x, (rows, channels), positions = x.contiguous(), x.shape[:2], x.shape[2:].numel()
        out, mean, inverse = torch.native_group_norm(x, *layer.of_type(x.dtype), rows, channels, positions, groups, eps)
        ctx.layer, ctx.extent, ctx.together = layer, (rows, channels, positions, groups), together
        ctx.save_for_backward(x, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, mean, inverse = ctx.saved_tensors
        layer, gradient = ctx.layer, gradient.contiguous()
        below, sums = None, None
        if ctx.together is not None:
            wanted = ctx.needs_input_grad[1]
            below, *sums = ctx.together(x, gradient, mean, inverse, layer.weight, wanted=wanted)
        elif ctx.needs_input_grad[1]:
            below = torch.ops.aten.native_group_norm_backward(
                gradient, x, mean, inverse, layer.of_type(x.dtype)[0], *ctx.extent, [True, False, False]
            )[0]
        layer.tell(Standardised(x, mean, inverse, sums), gradient)
        return None, below, None, None, None, None


class Embedding(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, padding: int | None, layer: Affine) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del anchor
        ctx.layer, ctx.padding = layer, padding
        ctx.save_for_backward(ids)
        return F.embedding(ids, layer.weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            gradient = torch.where((ids == ctx.padding).unsqueeze(-1), torch.zeros_like(gradient), gradient)
        ctx.layer.tell(ids, gradient)
        return None, None, None, None


@dataclass(frozen=True)
class Geometry:
    """Settings of a convolution in any number of dimensions, except transposed convolutions."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        straight = [0] * len(self.stride)
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, straight, self.groups
        )

    def below(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        return self._backward(x, weight, gradient, [True, False, False])[0]

    def weight_gradient(self, x: Tensor, shape: torch.Size, gradient: Tensor) -> Tensor:
        """The weight gradient, summed over the given records."""
        return self._backward(x, x.new_empty(shape), gradient, [False, True, False])[1]

    def patches(self, x: Tensor, shape: torch.Size) -> Tensor:
        """[N, places, inputs of one]: what the kernel sees at each place; for images, and without groups."""
        cut = F.unfold(x, shape[2:], tuple(self.dilation), tuple(self.padding), tuple(self.stride))
        return cut.transpose(1, 2)

    def patches_channels_last(self, x: Tensor, shape: torch.Size) -> Tensor:
        """The same with the inputs of one in the order [*kernel, channels]: whole runs of channels are copied, in a
        tenth of the time on a processor."""
        padded = F.pad(x, [side for side in reversed(self.padding) for _ in range(2)])
        cut = padded.permute(0, 2, 3, 1).contiguous()
        for dim, (size, stride, dilation) in enumerate(zip(shape[2:], self.stride, self.dilation, strict=True), 1):
            cut = cut.unfold(dim, (size - 1) * dilation + 1, stride)[..., ::dilation]
        return cut.permute(0, 1, 2, 4, 5, 3).reshape(len(x), -1, shape[1:].numel())

    def from_patches(self, x: Tensor, shape: torch.Size, gradient: Tensor) -> Tensor:
        """[N, *shape]: each record's weight gradient as a product with its patches, which adds up in fp32 whatever x is
        in."""
        return products(gradient.flatten(2).transpose(1, 2), self.patches(x, shape)).view(-1, *shape)

    def terms(self, x: Tensor, kernel: torch.Size, gradient: Tensor) -> Tensor:
        """[N] in fp64: |input patch|² · |output gradient|², summed over all positions."""
        energy = x.double().square().sum(1, keepdim=True)
        straight = [0] * len(self.stride)
        ones = energy.new_ones(1, 1, *kernel)
        seen = torch.convolution(energy, ones, None, self.stride, self.padding, self.dilation, False, straight, 1)
        return (seen * gradient.double().square().sum(1, keepdim=True)).flatten(1).sum(1)

    def _backward(self, x: Tensor, weight: Tensor, gradient: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
        straight = [0] * len(self.stride)
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, None, self.stride, self.padding, self.dilation, False, straight, self.groups, wanted
        )


class Convolution(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, geometry: Geometry, layer: Affine) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del anchor
        ctx.layer, ctx.geometry = layer, geometry
        ctx.save_for_backward(x)
        bias = layer.bias
        return geometry.forward(x, layer.weight.to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        weight = ctx.layer.weight.to(gradient.dtype)
        below = ctx.geometry.below(x, weight, gradient) if ctx.needs_input_grad[1] else None
        ctx.layer.tell(x, gradient)
        return None, below, None, None


class MaxPool2d(Function):
    """With channels last, in which PyTorch's kernel for processors takes a third of the time; the rest of the model
    goes on as it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        last = x.contiguous(memory_format=torch.channels_last)
        out, places = torch.ops.aten.max_pool2d_with_indices(last, *settings)
        ctx.settings = settings
        ctx.save_for_backward(x, places.contiguous())
        return out.contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, places = ctx.saved_tensors
        below = torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, *ctx.settings, places)
        return below, *(None for _ in ctx.settings)


class PerRecord(Function):
    """Expands a free parameter to one copy per record, [B, *shape], without memory for the copies."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, records: int, report: Callable[[Tensor], None]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del anchor
        ctx.report = report
        return value.clone().unsqueeze(0).expand(records, *value.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.report(gradient)
        return None, None, None, None
