"""A classifier's head from one pass over its features: least squares on two clipped and noised sums.

The sums are X = Σ z zᵀ and Y = Σ y zᵀ over all records, where z is a record's features, cut to a length of at most 1,
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
RIDGE, LENGTH, BALANCED, HIDDEN = 0, 1, 2, 3
"""What the numbers in `solving` are. `HIDDEN` is the largest eigenvalue that noise alone would have."""
SHARE, DAMPED = 0.3, 0.25
"""The part that X has in the square of what a record adds, and the ridge in units of `HIDDEN`. On features of 5,000 and
50,000 pictures of CIFAR-10, at ε from 0.25 to 100, no other share and ridge was right 1.2 points more often
(`benchmarks/real_heads.py --grid`)."""
RAREST = 0.1
"""A class is taken to have at least this share of the records that it would have if all were equally common: the mean
of a rarer one would be noise blown up."""
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
        self.register_buffer(SOLVING, base.weight.new_tensor([SMALLEST_RIDGE, 0.0, 0.0, 0.0]))
        self._known: tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]] | None = None

    def settle(
        self, noise: float, ridge: float | None = None, length: float | None = None, balanced: bool = False
    ) -> None:
        """`noise` is the deviation that an element of the sums will have, divided by n. With a `length`, features are
        divided by it and cut to 1, and the head has biases; otherwise every record's features are scaled to length 1,
        and it has none. `balanced` needs a length: the head is then that of discriminant analysis, which answers as if
        all classes were equally common."""
        hidden = largest_eigenvalue(noise / math.sqrt(SHARE), self.in_features)
        ridge = max(SMALLEST_RIDGE, DAMPED * hidden) if ridge is None else ridge
        for place, value in ((RIDGE, ridge), (LENGTH, length or 0.0), (BALANCED, float(balanced)), (HIDDEN, hidden)):
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
            return math.sqrt(SHARE) * squares + math.sqrt(1 - SHARE) * products

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
    """Weight [classes, features] and bias [classes], from what descent has left of the sums."""
    ridge, length, balanced, hidden = (float(number) for number in solving)
    both, classes = -gram.double() / math.sqrt(SHARE), -cross.double() / math.sqrt(1 - SHARE)
    if balanced:
        # Linear discriminant analysis with equal priors, which the same sums suffice for: the shares of the classes,
        # their means, and the covariance around them. Scores are log-likelihoods, up to what is common to all classes.
        # z is (x, 1)/√2.
        second, sums, shares = 2 * both[:-1, :-1], math.sqrt(2) * classes[:, :-1], math.sqrt(2) * classes[:, -1]
        shares = shares.clamp(min=RAREST / len(shares))[:, None]
        means = sums / shares
        weight = means @ _inverse(second - means.T @ sums, 2 * ridge, 2 * hidden)
        bias = -0.5 * (weight * means).sum(1)
    else:
        weight, bias = _least_squares(both, classes, ridge, hidden, bool(length))
    return (weight / (length or 1.0)).to(gram.dtype), bias.to(gram.dtype)


def _least_squares(both: Tensor, classes: Tensor, ridge: float, hidden: float, biases: bool) -> tuple[Tensor, Tensor]:
    if not biases:  # the last row and column hold noise alone
        both, classes = both[:-1, :-1], classes[:, :-1]
    found = classes @ _inverse(both, ridge, hidden)
    if not biases:
        return found, found.new_zeros(len(found))
    found = found * math.sqrt(0.5)
    return found[:, :-1], found[:, -1]


def _inverse(matrix: Tensor, ridge: float, hidden: float) -> Tensor:
    """Inverts the nearest symmetric matrix without negative eigenvalues, which noise may have made, plus the ridge. The
    eigenvalues around the median that noise alone could have made, `hidden` to either side, tell nothing but their
    mean."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    alike = (values - values.median()).abs() <= hidden
    values = torch.where(alike, values[alike].mean(), values)
    return (vectors / (values.clamp(min=0.0) + ridge)) @ vectors.T


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
