"""The pre-norm transformer block of the encoder and of the pixel decoder: timm's, name for name and bit for bit.

timm's own class is not used, because importing it imports torchvision and with it PyTorch's compiler, which takes
longer than everything else that a dry run does. Whatever timm can do to a block and no model here asks for is left out.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from murmuration.model.attention import attend, join_heads
from murmuration.model.drop import KeyedDropout, KeyedDropPath, RowKeys
from murmuration.model.sizes import Stack

MLP_RATIO = 4
norm_layer = partial(nn.LayerNorm, eps=1e-6)


class Attention(nn.Module):
    """Every token attends to all; one projection gives query, key and value."""

    fused_attn: bool

    def __init__(self, width: int, heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.fused_attn = True
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)
        self.proj_drop: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parted = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parted.unbind(0)
        mixed = join_heads(attend(query, key, value, causal=False, fused=self.fused_attn))
        return self.proj_drop(self.proj(mixed))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.act = nn.GELU()
        self.drop1: nn.Module = nn.Identity()
        self.fc2 = nn.Linear(MLP_RATIO * width, width)
        self.drop2: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class Block(nn.Module):
    """Attention, then two dense layers, each behind a norm and beside an identity. What is dropped is keyed by record;
    at a rate of 0 nothing is."""

    def __init__(
        self, stack: Stack, qkv_bias: bool, row_keys: RowKeys, dropout: float = 0.0, path: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1 = norm_layer(stack.width)
        self.attn = Attention(stack.width, stack.heads, qkv_bias)
        self.drop_path1: nn.Module = KeyedDropPath(path, row_keys) if path else nn.Identity()
        self.norm2 = norm_layer(stack.width)
        self.mlp = Mlp(stack.width)
        self.drop_path2: nn.Module = KeyedDropPath(path, row_keys) if path else nn.Identity()
        if dropout:
            self.attn.proj_drop = KeyedDropout(dropout, row_keys)
            self.mlp.drop1, self.mlp.drop2 = KeyedDropout(dropout, row_keys), KeyedDropout(dropout, row_keys)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))
