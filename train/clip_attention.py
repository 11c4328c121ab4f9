"""PyTorch's own multi-head attention, written in functions that take weights one at a time.

PyTorch runs it as a single function of all its weights, with records in the second dimension. The products are those
of `torch.nn.functional.multi_head_attention_forward`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from train.clip_rule import ClipError


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None,
    add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Tensor | None,
    training: bool = True, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None, static_k: Tensor | None = None,
    static_v: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """[tokens, B, width] in and out."""
    del embed_dim_to_check
    if query.dim() != 3:
        raise ClipError("multi-head attention without a batch dimension cannot be clipped by record; add one")
    odd = [bias_k, bias_v, static_k, static_v]
    if any(x is not None for x in odd) or add_zero_attn or (training and dropout_p):
        raise ClipError(
            "multi-head attention with bias_kv, add_zero_attn, static keys or dropout has no clipping rule; "
            "leave these out"
        )
    same = query is key and key is value
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    if use_separate_proj_weight:
        assert q_proj_weight is not None and k_proj_weight is not None and v_proj_weight is not None
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        assert in_proj_weight is not None
        weights = [in_proj_weight]
    if same and len(weights) == 1:
        parts = F.linear(query, weights[0], in_proj_bias).chunk(3, dim=-1)
    else:
        each = weights if len(weights) == 3 else list(weights[0].chunk(3))
        biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))
        parts = [F.linear(x, w, b) for x, w, b in zip((query, key, value), each, biases, strict=True)]
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


def _mask(q: Tensor, k: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """One additive mask [B or 1, heads or 1, queries or 1, keys] of both."""
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
