"""Which of PyTorch's functions have a rule: how each is run for all records, so that a record's gradients can be had.

A rule is called as the model calls its function, with the tensors of one record. What it passes to
`ParameterTracker.on_records` is called with those of all: their first dimension is B·m, the m rows of a record
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.train.clip import kernels
from murmuration.train.clip.functions import (
    Affine,
    Convolution,
    Embedding,
    Geometry,
    GroupNorm,
    LayerNorm,
    Linear,
    MaxPool2d,
    Standardised,
    frozen_linear,
)
from murmuration.train.clip.isolated import enter, is_of_records, leave, outside
from murmuration.train.clip.norms import gram_cost
from murmuration.train.clip.per_record import ChannelsLast, PerRecordGradient, Reported, over_tokens, wide
from murmuration.train.clip.recurrent import RECURRENT_RULES
from murmuration.train.clip.rule import ClipError
from murmuration.train.clip.standardised import Standardisation
from murmuration.train.clip.tracker import ParameterTracker, TrackedTensor

# What type checkers do not know of PyTorch.
_TORCH: Any = torch
DATA, REQUIRES_GRAD = _TORCH.Tensor.data.__get__, _TORCH.Tensor.requires_grad.__get__
LEFT_ALIGNED, PAD_SEQUENCE = _TORCH._nested_tensor_from_mask_left_aligned, _TORCH._C._nn.pad_sequence

# The widest LayerNorm whose rows fit into the registers of its kernel.
WIDEST = 4096

# PyTorch's multi-head attention, written as functions that take one weight at a time.
#
# PyTorch runs it as a single function of all its weights, with records in the second dimension. The products are those
# of `torch.nn.functional.multi_head_attention_forward`.


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None,
    add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Tensor | None,
    training: bool = True, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None, static_k: Tensor | None = None,
    static_v: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """[tokens, rows, width] in and out, or without rows."""
    if query.dim() == 2:
        padding = key_padding_mask
        out, seen = multi_head_attention(
            query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), embed_dim_to_check, num_heads, in_proj_weight,
            in_proj_bias, bias_k, bias_v, add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training,
            None if padding is None else padding.unsqueeze(0), need_weights, attn_mask, use_separate_proj_weight,
            q_proj_weight, k_proj_weight, v_proj_weight, static_k, static_v, average_attn_weights, is_causal,
        )  # fmt: skip
        return out.squeeze(1), None if seen is None else seen.squeeze(0)
    odd = [bias_k, bias_v, static_k, static_v]
    if any(x is not None for x in odd) or add_zero_attn or (training and dropout_p):
        raise ClipError(
            "multi-head attention with bias_kv, add_zero_attn, static keys or dropout has no clipping rule; "
            "leave these out"
        )
    if use_separate_proj_weight:
        assert q_proj_weight is not None and k_proj_weight is not None and v_proj_weight is not None
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        assert in_proj_weight is not None
        weights = [in_proj_weight]
    parts = _projected(query, key, value, weights, in_proj_bias)
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)
    mask = _mask(q, k, attn_mask, key_padding_mask)
    if need_weights:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        attended = (scores if mask is None else scores + mask).softmax(-1)
        joined, seen = attended @ v, attended.mean(1) if average_attn_weights else attended
    else:
        causal = is_causal and mask is None
        joined, seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal), None
    out = F.linear(joined.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    return out.transpose(0, 1), seen


def _projected(
    query: Tensor, key: Tensor, value: Tensor, weights: list[Tensor], bias: Tensor | None
) -> Sequence[Tensor]:
    """Each [B, tokens, width], from [tokens, B, width]; `weights` has three weights, or one with all three stacked."""
    same = query is key and key is value
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    if same and len(weights) == 1:
        return F.linear(query, weights[0], bias).chunk(3, dim=-1)
    each = weights if len(weights) == 3 else list(weights[0].chunk(3))
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), each, biases, strict=True)]


def _mask(q: Tensor, k: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Combines both into one additive mask [B or 1, heads or 1, queries or 1, keys]."""
    both = None
    if attn_mask is not None:
        both = _additive(attn_mask, q.dtype)
        both = both.unflatten(0, (len(q), -1)) if both.dim() == 3 else both[None, None]
    if padding is not None:
        hidden = _additive(padding, q.dtype)[:, None, None, : k.shape[2]]
        both = hidden if both is None else both + hidden
    return both


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))


def linear(tracker: ParameterTracker, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _alone_of_records(input, weight, bias):
        return tracker.otherwise(F.linear, (input, weight, bias), {})
    return _product(tracker, input, weight, bias, flipped=False)


def matmul(tracker: ParameterTracker, input: Tensor, other: Tensor) -> Tensor:
    """Activations times a matrix of weights; PyTorch runs other products."""
    if not _alone_of_records(input, other) or other.dim() != 2 or tracker.source(other) is None:
        return tracker.otherwise(torch.matmul, (input, other), {})
    return _product(tracker, input, other, None, flipped=True)


def addmm(
    tracker: ParameterTracker, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """A bias and activations times weights, as in the Conv1D of GPT-2's family."""
    if not _alone_of_records(mat1, mat2, input) or beta != 1 or alpha != 1 or tracker.source(mat2) is None:
        return tracker.otherwise(torch.addmm, (input, mat1, mat2), {"beta": beta, "alpha": alpha})
    return _product(tracker, mat1, mat2, input, flipped=True)


def _alone_of_records(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether x differs between records and the weights do not."""
    return is_of_records(x) and not any(is_of_records(weight) for weight in weights)


def _product(tracker: ParameterTracker, x: Tensor, weight: Tensor, bias: Tensor | None, *, flipped: bool) -> Tensor:
    """x·weightᵀ + bias, or x·weight + bias where the weight is `flipped`."""
    source, offset = tracker.source(weight), _source(tracker, bias)
    x = _autocast(x)
    if source is None:
        matrix = weight.t() if flipped else weight
        if bias is None or offset is None:
            return tracker.on_records(lambda x: frozen_linear(x, matrix, bias), x)
        with tracker:
            return tracker.on_records(lambda x: frozen_linear(x, matrix), x) + bias
    tracker.use(source)
    if offset is not None:
        tracker.use(offset)

    def report(activation: Tensor, gradient: Tensor) -> None:
        right, left = rows(tracker, activation), rows(tracker, gradient)
        pieces: list[Reported] = [*(source.outer(right, left) if flipped else source.outer(left, right))]
        if offset is not None:
            pieces += offset.summed(left)
        tracker.report(pieces)

    value = source.value.detach().t() if flipped else source.value
    layer = Affine(value, _value(offset, bias), report)
    return tracker.on_records(lambda x: Linear.apply(tracker.anchor, x, layer), x)


def layer_norm(
    tracker: ParameterTracker, input: Tensor, normalized_shape: Any, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    scale, shift = _source(tracker, weight), _source(tracker, bias)
    if not _alone_of_records(input, weight, bias):
        return tracker.otherwise(F.layer_norm, (input, normalized_shape, weight, bias, eps), {})
    if scale is None and shift is None:
        plain = partial(F.layer_norm, normalized_shape=normalized_shape, weight=weight, bias=bias, eps=eps)
        return tracker.on_records(plain, input, rows=input.dim() > len(normalized_shape))
    shape = list(normalized_shape)
    if weight is None:
        weight = torch.ones(shape, dtype=input.dtype, device=input.device)
    for source in (scale, shift):
        if source is not None:
            tracker.use(source)

    def report(normal: Standardised, gradient: Tensor) -> None:
        pieces: list[PerRecordGradient] = []
        records = tracker.records
        # [B, *shape]: each record's gradients of both; the scale's only where it is trained.
        if normal.sums is not None:
            scales, shifts = (each.view(records, *shape) for each in normal.sums)
        else:
            scales = shifts = over_tokens(gradient.reshape(records, -1, *shape))
            if scale is not None:  # in the memory of one operand, which is freed before norms are measured
                products = (normal.x - normal.mean).mul_(normal.inverse).mul_(gradient)
                scales = products.reshape(records, -1, *shape).sum(1)
                del products
        if shift is not None:
            pieces += shift.whole(shifts)
        if scale is not None:
            pieces += scale.whole(scales)
        tracker.report(pieces)

    x = input.to(torch.promote_types(wide(input.dtype), weight.dtype))
    layer = Affine(_value(scale, weight), _value(shift, bias), report)
    fits = not tracker.recorded and x.dtype.itemsize <= 4 and math.prod(shape) <= WIDEST
    kernel = kernels.layer_norm_backward(x.device) if fits else None
    together = None if kernel is None else partial(kernel, records=tracker.records)
    rows = x.dim() > len(shape)
    return tracker.on_records(lambda x: LayerNorm.apply(tracker.anchor, x, shape, eps, layer, together), x, rows)


def group_norm(
    tracker: ParameterTracker, input: Tensor, num_groups: int, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    scale, shift = _source(tracker, weight), _source(tracker, bias)
    if not _alone_of_records(input, weight, bias):
        return tracker.otherwise(F.group_norm, (input, num_groups, weight, bias, eps), {})
    if scale is None and shift is None:
        return tracker.on_records(lambda x: F.group_norm(x, num_groups, weight, bias, eps), input)
    channels = input.shape[1]
    if weight is None:
        weight = torch.ones(channels, dtype=input.dtype, device=input.device)
    for source in (scale, shift):
        if source is not None:
            tracker.use(source)

    def report(normal: Standardised, gradient: Tensor) -> None:
        pieces: list[PerRecordGradient] = []
        # [rows, channels]: each row's gradients of both; the scale's only where it is trained.
        if normal.sums is not None:
            scales, shifts = normal.sums
        else:
            (count, _), within = gradient.shape[:2], (len(gradient), num_groups, -1)
            scales = shifts = gradient.reshape(count, channels, -1).sum(2)
            if scale is not None:
                products = (normal.x.reshape(within) - normal.mean.unsqueeze(2)).mul_(normal.inverse.unsqueeze(2))
                scales = products.mul_(gradient.reshape(within)).view(count, channels, -1).sum(2)
                del products
        if shift is not None:
            pieces += shift.whole(over_tokens(shifts.view(tracker.records, -1, channels)))
        if scale is not None:
            pieces += scale.whole(over_tokens(scales.view(tracker.records, -1, channels)))
        tracker.report(pieces)

    x = input.to(torch.promote_types(wide(input.dtype), weight.dtype))
    layer = Affine(_value(scale, weight), _value(shift, bias), report)
    fits = not tracker.recorded and x.dtype.itemsize <= 4
    together = kernels.group_norm_backward(x.device) if fits else None
    return tracker.on_records(lambda x: GroupNorm.apply(tracker.anchor, x, num_groups, eps, layer, together), x)


def rms_norm(
    tracker: ParameterTracker,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    out = F.rms_norm(input, normalized_shape, None, eps)
    with tracker:
        return out if weight is None else out * weight


def embedding(
    tracker: ParameterTracker, input: Tensor, weight: Tensor, padding_idx: int | None = None,
    max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    del norm_type, sparse
    if max_norm is not None or scale_grad_by_freq:
        raise ClipError(
            "an embedding with max_norm writes into its table the rows that records look up, and scale_grad_by_freq "
            "makes records depend on one another; leave both out"
        )
    source = tracker.source(weight)
    if source is None or not _alone_of_records(input, weight):
        return tracker.otherwise(F.embedding, (input, weight, padding_idx), {})
    tracker.use(source)

    def report(ids: Tensor, gradient: Tensor) -> None:
        tracker.report(source.outer(ids.reshape(tracker.records, -1), rows(tracker, gradient)))

    padding = padding_idx if padding_idx is None or padding_idx >= 0 else len(weight) + padding_idx
    layer = Affine(source.value, None, report)
    return tracker.on_records(lambda ids: Embedding.apply(tracker.anchor, ids, padding, layer), input)


def convolution(
    function: Callable[..., Tensor], tracker: ParameterTracker, input: Tensor, weight: Tensor,
    bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    dims = weight.dim() - 2
    source, offset = tracker.source(weight), _source(tracker, bias)
    if source is None or not _alone_of_records(input, weight, bias):
        if offset is None and _alone_of_records(input, weight, bias) and input.dim() == dims + 2:
            return tracker.on_records(lambda x: function(x, weight, bias, stride, padding, dilation, groups), input)
        if offset is None or not is_of_records(input):
            return tracker.otherwise(function, (input, weight, bias, stride, padding, dilation, groups), {})
        with tracker:
            plain = function(input, weight, None, stride, padding, dilation, groups)
            return plain + bias.view(-1, *[1] * dims)  # pyright: ignore[reportOptionalMemberAccess]
    if input.dim() == dims + 1:
        with tracker:
            return function(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    x = _autocast(input)
    stride, dilation, kernel = _each(stride, dims), _each(dilation, dims), list(weight.shape[2:])
    if padding == "same":
        # Padded to an output of the same size. Where padding is uneven, the longer side comes last, as in
        # PyTorch.
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        x = F.pad(x, [side for t in reversed(total) for side in (t // 2, t - t // 2)])
    padding = _each(0 if isinstance(padding, str) else padding, dims)
    geometry = Geometry(stride, padding, dilation, groups)
    if stride == kernel and groups == 1 and not any(padding) and set(dilation) == {1}:
        return _patches(tracker, x, weight, bias, kernel)
    tracker.use(source)
    if offset is not None:
        tracker.use(offset)

    def write(inputs: tuple[Tensor, ...], upstream: Tensor) -> Tensor:
        # Maps of one place keep strides by which kernels in fp64 take them for channels-last, and refuse them.
        given = [x.clone(memory_format=torch.contiguous_format) if x.shape[3:].numel() == 1 else x
                 for x in (inputs[0], upstream)]  # fmt: skip
        return torch.vmap(lambda one, gradient: geometry.weight_gradient(one, source.shape, gradient))(*given)

    def together(inputs: tuple[Tensor, ...], upstream: Tensor) -> Tensor:
        return geometry.weight_gradient(inputs[0].flatten(0, 1), source.shape, upstream.flatten(0, 1))

    def terms(inputs: tuple[Tensor, ...], upstream: Tensor) -> Tensor:
        found = geometry.terms(inputs[0].flatten(0, 1), source.shape[2:], upstream.flatten(0, 1))
        return found.view(tracker.records, -1).sum(1)

    def by_patches(x: Tensor, upstream: Tensor) -> Tensor:
        return geometry.from_patches(x.squeeze(1), source.shape, upstream.squeeze(1))

    def report(activation: Tensor, gradient: Tensor) -> None:
        own = gradient.unflatten(0, (tracker.records, -1))
        inputs = (activation.unflatten(0, (tracker.records, -1)),)
        # A record's image has patches, where there are no groups: operands are [B, m, channels, …].
        x, on_gpu = inputs[0], inputs[0].device.type in kernels.DEVICES
        has_patches = x.shape[1] == 1 and geometry.groups == 1 and len(geometry.stride) == 2
        cost = gram_cost(own.shape[3:].numel(), source.shape[0], source.shape[1:].numel())
        if has_patches and not on_gpu and cost < source.shape.numel():
            # At so few places, as in the later stages of a ResNet, products of patches are cheaper than a gradient that
            # is written out, and patches take about as much memory.
            left = own.squeeze(1).flatten(2).transpose(1, 2)
            if (name := tracker.used_once(source)) is not None:
                patches = geometry.patches_channels_last(x.squeeze(1), source.shape)
                pieces = [ChannelsLast(name, left, patches, source.shape)]
            else:
                pieces = source.outer(left, geometry.patches(x.squeeze(1), source.shape))
        else:
            # A written gradient is itself a product with patches where matrix units take halves, for which libraries of
            # convolutions would round what they return.
            halves = has_patches and on_gpu and x.dtype == own.dtype and x.dtype.itemsize == 2
            pieces = source.written(
                inputs, own, write, together, terms, row_dimension=2, write_halves=by_patches if halves else None
            )
        if offset is not None:
            pieces += offset.whole(own.flatten(3).sum((1, 3), dtype=wide(own.dtype)))
        tracker.report(pieces)

    layer = Affine(source.value, _value(offset, bias), report)
    return tracker.on_records(lambda x: Convolution.apply(tracker.anchor, x, geometry, layer), x)


def _patches(tracker: ParameterTracker, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: list[int]) -> Tensor:
    """A patch embedding: the patches do not overlap, so one product suffices."""
    grid = [size // k for size, k in zip(x.shape[2:], kernel, strict=True)]
    for dim, (cells, k) in enumerate(zip(grid, kernel, strict=True)):
        x = x.narrow(2 + dim, 0, cells * k)
    cut = x.reshape(*x.shape[:2], *[n for pair in zip(grid, kernel, strict=True) for n in pair])
    dims = len(kernel)
    patches = cut.permute(0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)).flatten(1 + dims)
    with tracker:
        out = F.linear(patches.flatten(1, dims), weight.flatten(1), bias)
    return out.transpose(1, 2).unflatten(2, grid)


def batch_norm(
    tracker: ParameterTracker, input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """On a weight: timm's way to standardise its rows."""
    made = tracker.otherwise(
        F.batch_norm, (input, running_mean, running_var, weight, bias, training, momentum, eps), {}
    )
    if is_of_records(made):
        return made
    source, gain = tracker.source(input), _source(tracker, weight)
    by_its_own = training and running_mean is None and running_var is None and bias is None
    if source is None or not by_its_own or input.dim() != 3 or len(input) != 1 or source.view != "same":
        return made
    ((name, leaf),) = source.leaves.items()
    if leaf.shape[0] == input.shape[1] and (gain is None or name not in gain.leaves):
        with torch.no_grad(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            by = Standardisation.of(input.detach(), None if weight is None else weight.detach(), eps)
        tracker.standardised(made, name, by, gain)
    return made


def attention(tracker: ParameterTracker, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    with tracker:
        return multi_head_attention(*args, **kwargs)


def dot_product_attention(
    tracker: ParameterTracker, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Fused, of all records at once. A mask that is trained (a table of relative positions) becomes one for each."""
    settings = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if attn_mask is not None and tracker.source(attn_mask) is not None:
        attn_mask = tracker.copy_of(attn_mask)
    given = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    if dropout_p or not any(map(is_of_records, given)) or any(tracker.source(x) is not None for x in given):
        return tracker.otherwise(F.scaled_dot_product_attention, (query, key, value, attn_mask), settings)
    leading = query.shape[:-3]

    def whole(x: Tensor) -> Tensor:
        """[B·rows, heads, queries, width] of […, heads, queries, width]"""
        missing = query.dim() - x.dim()
        x = leave(x, tracker.records)
        x = x[(slice(None), *[None] * missing)]
        return x.expand(-1, *leading, *x.shape[-3:]).flatten(0, -4)

    if query.dim() < 3:
        return tracker.otherwise(F.scaled_dot_product_attention, (query, key, value, attn_mask), settings)
    with outside():
        mask = None if attn_mask is None else whole(attn_mask)
        out = F.scaled_dot_product_attention(whole(query), whole(key), whole(value), mask, **settings)
        return enter(out.unflatten(0, (tracker.records, *leading)))


def max_pool2d(
    tracker: ParameterTracker, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    if return_indices or input.device.type != "cpu" or input.dim() != 4 or not _alone_of_records(input):
        settings = {"padding": padding, "dilation": dilation, "ceil_mode": ceil_mode, "return_indices": return_indices}
        return tracker.otherwise(F.max_pool2d, (input, kernel_size, stride), settings)
    stride = kernel_size if stride is None or stride in ([], ()) else stride
    sides = (_each(side, 2) for side in (kernel_size, stride, padding, dilation))
    return tracker.on_records(lambda x: MaxPool2d.apply(x, *sides, ceil_mode), input)


def cross_entropy(
    tracker: ParameterTracker, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """PyTorch has no kernel of it for vmap. Where nothing is summed over rows, those of all records are as good."""
    own = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    legacy = size_average is not None or reduce is not None
    learnt = any(tracker.source(x) is not None for x in (input, target) + (() if weight is None else (weight,)))
    if legacy or learnt or reduction != "none" or input.dim() < 2 or not _alone_of_records(input, weight):
        own |= {"size_average": size_average, "reduce": reduce}
        return tracker.otherwise(F.cross_entropy, (input, target), own)
    targets = leave(target, tracker.records).flatten(0, 1)
    return tracker.on_records(lambda x: F.cross_entropy(x, targets, **own), input)


def left_aligned(tracker: ParameterTracker, *given: Any) -> bool:
    """Whether nn.TransformerEncoder may pack its rows, which it asks in evaluation mode and is a branch on data. It is
    always right not to."""
    return not any(map(is_of_records, given)) and tracker.otherwise(LEFT_ALIGNED, given, {})


def laid_out(
    function: Callable[..., Tensor], tracker: ParameterTracker, tensor: Tensor, *args: Any, **settings: Any
) -> Tensor:
    """Of a record's picture, vmap sees a dimension too many for channels to lie last. It is the same picture."""
    if is_of_records(tensor) and "memory_format" in settings:
        settings["memory_format"] = torch.contiguous_format
    return tracker.otherwise(function, (tensor, *args), settings)


def data(tracker: ParameterTracker, tensor: Tensor) -> Tensor:
    """PyTorch refuses `.data` within vmap. To read, it is what `detach` gives: the same numbers, without history."""
    return tensor.detach() if is_of_records(tensor) else tracker.otherwise(DATA, (tensor,), {})


def requires_grad(tracker: ParameterTracker, tensor: Tensor) -> bool:
    """Within vmap a record's tensor answers that it needs no gradient, and a module that asks goes another way."""
    if not is_of_records(tensor):
        return tracker.otherwise(REQUIRES_GRAD, (tensor,), {})
    return leave(tensor, tracker.records).requires_grad


def requires_grad_(tracker: ParameterTracker, tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """PyTorch refuses it within vmap, also of a constant, such as the zero that a sum of losses begins with."""
    if is_of_records(tensor) or isinstance(tensor, nn.Parameter):
        return tracker.otherwise(torch.Tensor.requires_grad_, (tensor, requires_grad), {})
    with outside():
        return tensor.requires_grad_(requires_grad)


def pad_sequence(
    tracker: ParameterTracker, sequences: list[Tensor], batch_first: bool = False, padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:  # fmt: skip
    """PyTorch has no kernel of it for vmap. The lengths are those of shapes, and so the same for all records."""
    if not any(map(is_of_records, sequences)) or any(tracker.source(x) is not None for x in sequences):
        settings = {"batch_first": batch_first, "padding_value": padding_value, "padding_side": padding_side}
        return tracker.otherwise(PAD_SEQUENCE, (sequences,), settings)
    longest = max(len(x) for x in sequences)

    def padded(x: Tensor) -> Tensor:
        missing = longest - len(x)
        ends = (0, missing) if padding_side == "right" else (missing, 0)
        return F.pad(x, (0, 0) * (x.dim() - 1) + ends, value=padding_value)

    return torch.stack([padded(x) for x in sequences], 0 if batch_first else 1)


def rows(tracker: ParameterTracker, x: Tensor) -> Tensor:
    """[B·m, …, d] -> [B, T, d]"""
    return x.reshape(tracker.records, -1, x.shape[-1])


def _source(tracker: ParameterTracker, tensor: Tensor | None) -> TrackedTensor | None:
    return None if tensor is None else tracker.source(tensor)


def _value(source: TrackedTensor | None, tensor: Any) -> Any:
    return tensor if source is None else source.value


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value) * (dims // len(value))


def _autocast(x: Tensor) -> Tensor:
    """Casts as autocast would inside the function that is replaced."""
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
    F.conv1d: partial(convolution, F.conv1d),
    F.conv2d: partial(convolution, F.conv2d),
    F.conv3d: partial(convolution, F.conv3d),
    F.batch_norm: batch_norm,
    F.max_pool2d: max_pool2d,
    torch.max_pool2d: max_pool2d,
    F.cross_entropy: cross_entropy,
    **{each: partial(laid_out, each) for each in (torch.Tensor.to, torch.Tensor.contiguous, torch.Tensor.clone)},
    LEFT_ALIGNED: left_aligned,
    DATA: data,
    REQUIRES_GRAD: requires_grad,
    torch.Tensor.requires_grad_: requires_grad_,
    PAD_SEQUENCE: pad_sequence,
    F.multi_head_attention_forward: attention,
    F.scaled_dot_product_attention: dot_product_attention,
    **RECURRENT_RULES,
}
