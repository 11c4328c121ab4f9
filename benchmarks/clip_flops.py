"""A lower bound on the cost of the clipped sum, counted from the shapes of one record's forward pass.

Non-private: every product once forward, once for its input's gradient (where that is needed) and once for its weight's
gradient (where that is trained); attention once forward and 2.5 times backward. Private, by Gram matrices: in addition,
2·T²·(p + d) for T tokens and a weight [p, d] (T = 1: a closed form without T² terms).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from clip_models import Inputs
from torch import nn
from torch.overrides import TorchFunctionMode

TILE = 64


@dataclass(frozen=True)
class Product:
    """`tokens` rows times a weight of [inner, outer]."""

    tokens: int
    inner: int
    outer: int
    trained: bool
    passes_on: bool

    @property
    def forward(self) -> float:
        return 2.0 * self.tokens * self.inner * self.outer

    @property
    def nonprivate(self) -> float:
        return self.forward * (1 + self.trained + self.passes_on)

    def gram(self, triangular: bool) -> float:
        if not self.trained or self.tokens == 1:
            return 0.0
        tiles = math.ceil(self.tokens / TILE)
        share = (tiles + 1) / (2 * tiles) if triangular else 1.0
        return share * 2.0 * self.tokens**2 * (self.inner + self.outer)


@dataclass(frozen=True)
class Cost:
    """FLOPs per record. `forward` is F, `attention` A and `gram` K of the usual formulas."""

    forward: float
    attention: float
    nonprivate: float
    gram: float
    gram_triangular: float

    @property
    def bound(self) -> float:
        return 1 + self.gram_triangular / self.nonprivate

    @property
    def bound_full_gram(self) -> float:
        return 1 + self.gram / self.nonprivate


class _Shapes(TorchFunctionMode):
    """Notes the shapes of linear maps, convolutions and attentions as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []
        self.attention = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (F.linear, torch.conv2d, F.conv2d):
            x, weight = args[0], args[1]
            outer = weight.shape[0]
            self.products.append(
                Product(out.numel() // outer, weight[0].numel(), outer, weight.requires_grad, x.requires_grad)
            )
        elif func is F.scaled_dot_product_attention:
            query, key = args[0], args[1]
            self.attention += 4.0 * query.numel() * key.shape[-2]
        return out


def cost_of(model: nn.Module, one: Inputs) -> Cost:
    """`one` contains a single record; the model uses fused attention."""
    assert all(len(tensor) == 1 for tensor in one.values())
    with _Shapes() as shapes:
        model(one)
    products = shapes.products
    return Cost(
        forward=sum(p.forward for p in products),
        attention=shapes.attention,
        nonprivate=sum(p.nonprivate for p in products) + 3.5 * shapes.attention,
        gram=sum(p.gram(False) for p in products),
        gram_triangular=sum(p.gram(True) for p in products),
    )
