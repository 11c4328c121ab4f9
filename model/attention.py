"""The captioner's two attention layers, and one switch between the fused and the explicit kernel.

The explicit kernel exists because under `torch.func.vmap` the fused CPU kernel has no batching rule and falls back to a
loop over samples; four plain operations batch perfectly. The encoder's attention and timm's have the same switch
under the same attribute name, so `use_fused` sets all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, fused: bool) -> Tensor:
    """Softmax attention over [B, heads, tokens, width]; `causal` hides later keys from earlier queries."""
    if fused:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(dim=-1) @ value


def split_heads(x: Tensor, heads: int) -> Tensor:
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    batch, heads, tokens, width = x.shape
    return x.transpose(1, 2).reshape(batch, tokens, heads * width)


class CausalSelfAttention(nn.Module):
    """Each token attends to itself and to earlier ones; fused projection in the order query, key, value."""

    fused_attn: bool

    def __init__(self, width: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.fused_attn = True
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split_heads(part, self.heads) for part in self.c_attn(x).chunk(3, dim=-1))
        return self.c_proj(join_heads(attend(query, key, value, causal=True, fused=self.fused_attn)))


class CrossAttention(nn.Module):
    """Text tokens attend to every image token, including the class token."""

    fused_attn: bool

    def __init__(self, width: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.fused_attn = True
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.kv_proj = nn.Linear(width, 2 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        query = split_heads(self.q_proj(x), self.heads)
        key, value = (split_heads(part, self.heads) for part in self.kv_proj(memory).chunk(2, dim=-1))
        return self.c_proj(join_heads(attend(query, key, value, causal=False, fused=self.fused_attn)))


def use_fused(module: nn.Module, fused: bool) -> None:
    """Choose the attention kernel everywhere below `module`: fused for ordinary passes, not for vmap."""
    for part in module.modules():
        if isinstance(getattr(part, "fused_attn", None), bool):
            part.fused_attn = fused  # pyright: ignore[reportArgumentType]
