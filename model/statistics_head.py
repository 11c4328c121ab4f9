"""A classifier's head from one pass over its features: least squares on two clipped and noised sums.

The sums are X = Σ z zᵀ and Y = Σ y zᵀ over all records, where z is a record's features, cut to a length of at most 1,
and y says which of the classes are right. They are the gradients of a loss that is linear in two matrices,

    loss = (zᵀ·gram·z + yᵀ·cross·z) / √2,

so the private step computes, bounds, sums and noises them as it does any gradient: no record's share is longer than 1.
One step of plain descent from zero leaves -X and -Y, divided by n, in the two matrices. What follows is
post-processing: X is made symmetric and positive, and Y·(X + ridge)⁻¹ are the weights of an ordinary linear head
(Mehta et al., arXiv 2211.13403, who find that least squares needs far less budget than descent).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GRAM, CROSS, SOLVING = "gram", "cross", "solving"
RIDGE, LENGTH = 0, 1
"""What the two numbers in `solving` are."""
SMALLEST_RIDGE = 1e-6
"""Where there is no noise to be damped."""


class StatisticsHead(nn.Linear):
    """Replaces a linear head, under its names. Called with features, it answers by the weights that its sums give;
    called with labels as well, it returns the loss whose gradients are a record's share of the sums."""

    gram: nn.Parameter
    cross: nn.Parameter
    solving: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight = base.weight.requires_grad_(False)
        self.bias = base.bias.requires_grad_(False)
        width = base.in_features + 1
        self.gram = nn.Parameter(base.weight.new_zeros(width, width))
        self.cross = nn.Parameter(base.weight.new_zeros(base.out_features, width))
        self.register_buffer(SOLVING, base.weight.new_tensor([SMALLEST_RIDGE, 0.0]))
        self._known: tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]] | None = None

    def settle(self, ridge: float | None = None, length: float | None = None) -> None:
        """`length`: features are divided by it and cut to 1, and the head has biases. Otherwise every record's features
        are scaled to length 1, and it has none."""
        for place, value in ((RIDGE, ridge), (LENGTH, length)):
            if value is not None:
                self.solving[place] = value

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            weight, bias = self.solved()
            return F.linear(input, weight.to(input.dtype), bias.to(input.dtype))
        # In fp32 whatever the precision of the body: the head has no layers whose speed would matter.
        with torch.autocast(input.device.type, enabled=False):
            inputs, targets = self._inputs(input.detach().float()), self._targets(labels)
            squares = (F.linear(inputs, self.gram) * inputs).sum(1)
            products = (F.linear(inputs, self.cross) * targets).sum(1)
            return (squares + products) * math.sqrt(0.5)

    def _inputs(self, features: Tensor) -> Tensor:
        """[B, width + 1], of length at most 1: the features, and a constant for the biases if there are any."""
        given = self.solving[LENGTH]
        lengths = torch.linalg.vector_norm(features, dim=1, keepdim=True)
        scaled = features / torch.maximum(lengths, given).clamp(min=1e-20)
        constant = (given > 0).to(scaled.dtype).expand(len(scaled), 1)
        return torch.cat([scaled, constant], 1) * (1 + constant).rsqrt()

    def _targets(self, labels: Tensor) -> Tensor:
        """[B, classes], of length at most 1; a label that is no class is right about nothing."""
        if labels.dim() > 1:
            several = labels.float()
            return several / torch.linalg.vector_norm(several, dim=1, keepdim=True).clamp(min=1.0)
        return (labels[:, None] == torch.arange(self.out_features, device=labels.device)).float()

    def solved(self) -> tuple[Tensor, Tensor]:
        """Weight and bias; computed anew only if the sums have changed."""
        now = [tensor.detach() for tensor in (self.gram, self.cross, self.solving)]
        if self._known is None or not all(map(torch.equal, self._known[:3], now)):
            gram, cross, solving = (tensor.clone() for tensor in now)
            self._known = gram, cross, solving, solution(gram, cross, solving)
        return self._known[3]


@torch.no_grad()
def solution(gram: Tensor, cross: Tensor, solving: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [classes, features] and bias [classes] of least squares, from what descent has left of the sums."""
    ridge, length = (float(number) for number in solving)
    width = len(gram) - 1
    used = slice(None) if length else slice(width)  # without biases, the last row and column hold noise alone
    both = -gram.double()[used, used]
    values, vectors = torch.linalg.eigh((both + both.T) / 2)
    damped = values.clamp(min=0.0) + ridge
    found = (-cross.double()[:, used] @ vectors / damped) @ vectors.T
    if not length:
        return found.to(gram.dtype), found.new_zeros(len(found)).to(gram.dtype)
    found = found * math.sqrt(0.5)
    return (found[:, :width] / length).to(gram.dtype), found[:, width].to(gram.dtype)


def ridge_against(noise: float, width: int) -> float:
    """As large as the largest eigenvalue of symmetric noise: `noise` is its deviation in one element of the mean
    before X is made symmetric, which halves the variance outside the diagonal."""
    return max(SMALLEST_RIDGE, noise * math.sqrt(2 * width))


def solved_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An equivalent state dict with an ordinary head in place of the sums; unchanged if there are none."""
    plain = dict(state)
    for name in [name for name in state if name.endswith(f".{SOLVING}")]:
        head = name.removesuffix(f".{SOLVING}")
        parts = [plain.pop(f"{head}.{part}") for part in (GRAM, CROSS, SOLVING)]
        plain[f"{head}.weight"], plain[f"{head}.bias"] = solution(*(part.cpu() for part in parts))
    return plain
