"""Which of PyTorch's functions use weights, and how each is run so that per-record gradients can be had.

Rows of a record lie together: an activation leads with B, or with B·m where every record has m rows in sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train.clip_attention import multi_head_attention
from train.clip_layers import Affine, Convolution, Embedding, Geometry, LayerNorm, Linear
from train.clip_pieces import Piece, wide
from train.clip_rule import ClipError
from train.clip_sources import Source
from train.clip_watch import Watch


def linear(watch: Watch, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not watch.varies(input):
        return watch.computed(F.linear, (input, weight, bias), {})
    return _product(watch, input, weight, bias, flipped=False)


def matmul(watch: Watch, input: Tensor, other: Tensor) -> Tensor:
    """Activations times a matrix of weights; other products with weights are left to the fallback."""
    if watch.varies(input) and other.dim() == 2 and watch.source(other) is not None and input.dim() > 1:
        return _product(watch, input, other, None, flipped=True)
    if not watch.varies(input) and not watch.varies(other):
        return watch.computed(torch.matmul, (input, other), {})
    return watch.fallback(torch.matmul, (input, other), {})


def addmm(watch: Watch, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """A bias and activations times weights, as in the Conv1D of GPT-2's family."""
    if not watch.varies(mat1):
        return watch.computed(torch.addmm, (input, mat1, mat2), {"beta": beta, "alpha": alpha})
    if watch.varies(input) or beta != 1 or alpha != 1 or watch.source(mat2) is None:
        return watch.fallback(torch.addmm, (input, mat1, mat2), {"beta": beta, "alpha": alpha})
    return _product(watch, mat1, mat2, input, flipped=True)


def _product(watch: Watch, x: Tensor, weight: Tensor, bias: Tensor | None, *, flipped: bool) -> Tensor:
    """x·weightᵀ + bias, or x·weight + bias where the weight is `flipped`."""
    source = watch.source(weight)
    offset = None if bias is None else watch.source(bias)
    x = _autocast(x)
    if source is None:  # only the bias is trained
        plain = x @ weight.to(x.dtype) if flipped else F.linear(x, weight.to(x.dtype))
        return plain if bias is None else watch.elementwise(torch.add, (plain, bias), {})
    watch.times(len(x), watch.names(source))
    watch.use(source)
    if offset is not None:
        watch.use(offset)

    def report(activation: Tensor, gradient: Tensor) -> None:
        right, left = rows(watch, activation), rows(watch, gradient)
        pieces: list[Piece] = source.outer(right, left) if flipped else source.outer(left, right)
        if offset is not None:
            pieces += offset.whole(over_tokens(left))
        watch.report(pieces)

    value = source.value.detach().t() if flipped else source.value
    return Linear.apply(watch.anchor, x, Affine(value, _value(offset, bias), report))


def layer_norm(
    watch: Watch, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if not watch.varies(input):
        return watch.computed(F.layer_norm, (input, normalized_shape, weight, bias, eps), {})
    scale, shift = _source(watch, weight), _source(watch, bias)
    shape = list(normalized_shape)
    if weight is None:
        weight = torch.ones(shape, dtype=input.dtype, device=input.device)
    for source in (scale, shift):
        if source is not None:
            watch.use(source)

    def report(normal: Tensor, gradient: Tensor) -> None:
        pieces: list[Piece] = []
        parts = gradient.reshape(watch.records, -1, *shape)
        if shift is not None:
            pieces += shift.whole(over_tokens(parts))
        if scale is not None:
            pieces += scale.whole(normal.mul_(gradient).reshape(watch.records, -1, *shape).sum(1))
        watch.report(pieces)

    x = input.to(torch.promote_types(wide(input.dtype), weight.dtype))
    return LayerNorm.apply(watch.anchor, x, shape, eps, Affine(_value(scale, weight), _value(shift, bias), report))


def group_norm(
    watch: Watch, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Without its scale and shift, which are then free parameters of the channels."""
    out = F.group_norm(input, num_groups, None, None, eps)
    along = (1, -1, *[1] * (input.dim() - 2))
    with watch:
        out = out if weight is None else out * weight.view(along)
        return out if bias is None else out + bias.view(along)


def rms_norm(
    watch: Watch, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    out = F.rms_norm(input, normalized_shape, None, eps)
    with watch:
        return out if weight is None else out * weight


def embedding(
    watch: Watch, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    del norm_type, sparse
    source = watch.source(weight)
    assert source is not None
    if not watch.varies(input):
        return watch.computed(F.embedding, (input, weight, padding_idx), {})
    if max_norm is not None or scale_grad_by_freq:
        raise ClipError(
            f"{watch.names(source)} is an embedding with max_norm or scale_grad_by_freq, which makes records depend "
            "on one another; leave these options out"
        )
    watch.times(len(input), watch.names(source))
    watch.use(source)

    def report(ids: Tensor, gradient: Tensor) -> None:
        watch.report(source.outer(ids.reshape(watch.records, -1), rows(watch, gradient)))

    padding = padding_idx if padding_idx is None or padding_idx >= 0 else len(weight) + padding_idx
    return Embedding.apply(watch.anchor, input, padding, Affine(source.value, None, report))


def convolution(
    watch: Watch, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    dims = weight.dim() - 2
    source, offset = watch.source(weight), _source(watch, bias)
    x = _autocast(input)
    stride, dilation, kernel = _each(stride, dims), _each(dilation, dims), list(weight.shape[2:])
    if isinstance(padding, str) and padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        # Uneven padding: the longer side comes last, as PyTorch has it.
        x = F.pad(x, [side for t in reversed(total) for side in (t // 2, t - t // 2)])
    padding = [0] * dims if isinstance(padding, str) else _each(padding, dims)
    geometry = Geometry(stride, padding, dilation, groups)
    if source is None:
        plain = geometry.forward(x, weight.to(x.dtype), None)
        with watch:
            return plain if bias is None else plain + bias.view(1, -1, *[1] * dims)
    watch.times(len(x), watch.names(source))
    if stride == kernel and groups == 1 and not any(padding) and set(dilation) == {1}:
        return _patches(watch, x, weight, bias, kernel)
    watch.use(source)
    if offset is not None:
        watch.use(offset)

    def write(inputs: tuple[Tensor, ...], upstream: Tensor) -> Tensor:
        return torch.vmap(lambda one, gradient: geometry.weight_gradient(one, source.shape, gradient))(
            inputs[0], upstream
        )

    def together(inputs: tuple[Tensor, ...], upstream: Tensor) -> Tensor:
        return geometry.weight_gradient(inputs[0].flatten(0, 1), source.shape, upstream.flatten(0, 1))

    def terms(inputs: tuple[Tensor, ...], upstream: Tensor) -> Tensor:
        found = geometry.terms(inputs[0].flatten(0, 1), source.shape[2:], upstream.flatten(0, 1))
        return found.view(watch.records, -1).sum(1)

    def report(activation: Tensor, gradient: Tensor) -> None:
        own = gradient.unflatten(0, (watch.records, -1))
        pieces = source.written((activation.unflatten(0, (watch.records, -1)),), own, write, together, terms)
        if offset is not None:
            pieces += offset.whole(own.flatten(3).sum((1, 3), dtype=wide(own.dtype)))
        watch.report(pieces)

    return Convolution.apply(watch.anchor, x, geometry, Affine(source.value, _value(offset, bias), report))


def _patches(watch: Watch, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: list[int]) -> Tensor:
    """A patch embedding: pieces that do not overlap, so that one product does it."""
    grid = [size // k for size, k in zip(x.shape[2:], kernel, strict=True)]
    for dim, (cells, k) in enumerate(zip(grid, kernel, strict=True)):
        x = x.narrow(2 + dim, 0, cells * k)
    cut = x.reshape(*x.shape[:2], *[n for pair in zip(grid, kernel, strict=True) for n in pair])
    dims = len(kernel)
    patches = cut.permute(0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)).flatten(1 + dims)
    with watch:
        out = F.linear(patches.flatten(1, dims), weight.flatten(1), bias)
    return out.transpose(1, 2).unflatten(2, grid)


def batch_norm(watch: Watch, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if watch.varies(input):
        raise ClipError("batch normalisation makes records depend on one another; use layer or group normalisation")
    return watch.computed(F.batch_norm, (input, *args), kwargs)


def attention(watch: Watch, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    with watch:
        return multi_head_attention(*args, **kwargs)


def rows(watch: Watch, x: Tensor) -> Tensor:
    """[B·m, …, d] -> [B, T, d]"""
    return x.reshape(watch.records, -1, x.shape[-1])


def over_tokens(x: Tensor) -> Tensor:
    """[B, T, …] -> [B, …], added up in fp32 or better; one token is its own sum."""
    return x.squeeze(1) if x.shape[1] == 1 else x.sum(1, dtype=wide(x.dtype))


def _source(watch: Watch, tensor: Tensor | None) -> Source | None:
    return None if tensor is None else watch.source(tensor)


def _value(source: Source | None, tensor: Any) -> Any:
    return tensor if source is None else source.value


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))


def _autocast(x: Tensor) -> Tensor:
    """As autocast would do inside the function that is replaced."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.is_floating_point() else x


LAYER_RULES = {
    F.linear: linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.mm: matmul,
    torch.Tensor.mm: matmul,
    torch.addmm: addmm,
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.rms_norm: rms_norm,
    F.embedding: embedding,
    F.conv1d: convolution,
    F.conv2d: convolution,
    F.conv3d: convolution,
    F.batch_norm: batch_norm,
    F.multi_head_attention_forward: attention,
}
