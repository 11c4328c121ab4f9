"""A classifier's head from one pass over its features: least squares on two clipped and noised sums.

The sums are X = Σ z zᵀ and Y = Σ y zᵀ over all records, where z is a record's features, scaled to length 1,
and y says which of the classes are right. They are the gradients of a loss that is linear in two matrices,

    loss = √SHARE · zᵀ·gram·z + √(1 - SHARE) · yᵀ·cross·z,

so the private step computes, bounds, sums and noises them as it does any gradient: no record's share is longer than 1.
One step of plain descent from zero leaves -X and -Y, scaled and divided by n, in the two matrices. What follows is
post-processing: X is made symmetric and positive, and Y·(X + ridge)⁻¹ is the weight of an ordinary linear head
(Mehta et al., arXiv 2211.13403, study such heads).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GRAM, CROSS, SOLVING = "gram", "cross", "solving"
RIDGE, HIDDEN = 0, 1
"""What the numbers in `solving` are. `HIDDEN` is the largest eigenvalue that noise alone would have."""
SHARE, DAMPED = 0.3, 0.25
"""The part that X has in the square of what a record adds, and the ridge in units of `HIDDEN`. On features of 5,000 and
50,000 pictures of CIFAR-10, at ε from 0.25 to 100, no other share and ridge was right 1.2 points more often
(`benchmarks/real_heads.py --grid`)."""
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
        self.gram = nn.Parameter(base.weight.new_zeros(base.in_features, base.in_features))
        self.cross = nn.Parameter(base.weight.new_zeros(base.out_features, base.in_features))
        self.register_buffer(SOLVING, base.weight.new_tensor([SMALLEST_RIDGE, 0.0]))
        self._known: tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]] | None = None

    def settle(self, noise: float, ridge: float | None = None) -> None:
        """`noise` is the deviation that an element of the sums will have, divided by n."""
        hidden = largest_eigenvalue(noise / math.sqrt(SHARE), self.in_features)
        self.solving[RIDGE] = max(SMALLEST_RIDGE, DAMPED * hidden) if ridge is None else ridge
        self.solving[HIDDEN] = hidden

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            weight, bias = self.solved()
            return F.linear(input, weight.to(input.dtype), bias.to(input.dtype))
        # In fp32 whatever the precision of the body: the head has no layers whose speed would matter.
        with torch.autocast(input.device.type, enabled=False):
            features, targets = input.detach().float(), self._targets(labels)
            inputs = features / torch.linalg.vector_norm(features, dim=1, keepdim=True).clamp(min=1e-20)
            squares = (F.linear(inputs, self.gram) * inputs).sum(1)
            products = (F.linear(inputs, self.cross) * targets).sum(1)
            return math.sqrt(SHARE) * squares + math.sqrt(1 - SHARE) * products

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
    """Weight [classes, features] and bias [classes], which is zero, from what descent has left of the sums."""
    values, vectors, _ = eigen_of_sums(gram, solving)
    inverse = (vectors / (values + float(solving[RIDGE]))) @ vectors.T
    weight = -cross.double() / math.sqrt(1 - SHARE) @ inverse
    return weight.to(gram.dtype), cross.new_zeros(len(cross))


def eigen_of_sums(gram: Tensor, solving: Tensor) -> tuple[Tensor, Tensor, float]:
    """Eigenvalues and vectors of the mean of z·zᵀ, and the largest eigenvalue that noise alone would have.

    They are those of the nearest symmetric matrix without negative eigenvalues, which noise may have made. The ones
    around the median that noise alone could have made, so much to either side, tell nothing but their mean."""
    matrix, hidden = -gram.double() / math.sqrt(SHARE), float(solving[HIDDEN])
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    alike = (values - values.median()).abs() <= hidden
    return torch.where(alike, values[alike].mean(), values).clamp(min=0.0), vectors, hidden


def largest_eigenvalue(noise: float, width: int) -> float:
    """Of symmetric noise alone: `noise` is its deviation in one element of the mean before X is made symmetric, which
    halves the variance outside the diagonal."""
    return noise * math.sqrt(2 * width)


def solved_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An equivalent state dict with an ordinary head in place of the sums; unchanged if there are none."""
    plain = dict(state)
    for name in [name for name in state if name.endswith(f".{SOLVING}")]:
        head = name.removesuffix(f".{SOLVING}")
        parts = [plain.pop(f"{head}.{part}") for part in (GRAM, CROSS, SOLVING)]
        plain[f"{head}.weight"], plain[f"{head}.bias"] = solution(*(part.cpu() for part in parts))
    return plain
