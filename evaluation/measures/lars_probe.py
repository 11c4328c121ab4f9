"""ViP's linear probe: BatchNorm without affine parameters, then a linear layer that LARS trains.

LARS as published for masked autoencoders: momentum 0.9 over gradients scaled by 0.001·‖w‖/‖g‖ per matrix, biases
unscaled, no weight decay, linear warm-up and a half cosine. Batches are drawn anew each epoch from a seed; records left
after the last whole batch wait for another epoch. `train/optim/sgd.py` has the same rule for sharded parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.evaluation.measures.rows import Rows

EPSILON = 1e-6
MOMENTUM, TRUST = 0.9, 0.001
BASE_BATCH = 256
INITIAL_STD = 0.01
MOST_TIMES = 50.0


@dataclass(frozen=True)
class LarsSettings:
    """The defaults are the published ones; a set smaller than a batch is one batch, with the rate for its size."""

    epochs: int = 90
    warmup: int = 10
    batch: int = 16384
    base_rate: float = 0.1
    """For a batch of 256."""
    seed: int = 0
    longer: bool = False
    """Whether a set smaller than a batch is trained on until as many records were seen as whole batches have, in
    MOST_TIMES as many epochs at most: else its few steps, at the rate for its size, hardly move the weights."""

    def of(self, records: int) -> LarsSettings:
        """As so many records are trained on."""
        times = min(max(1.0, self.batch / records), MOST_TIMES) if self.longer else 1.0
        return replace(self, epochs=math.ceil(self.epochs * times), warmup=round(self.warmup * times))

    def batch_of(self, records: int) -> int:
        return min(self.batch, records)

    def rate(self, epoch: float, batch: int) -> float:
        """At a moment of the training, counted in epochs."""
        peak = self.base_rate * batch / BASE_BATCH
        if epoch < self.warmup:
            return peak * epoch / self.warmup
        part = (epoch - self.warmup) / max(1, self.epochs - self.warmup)
        return peak * 0.5 * (1.0 + math.cos(math.pi * part))

    def order(self, records: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(records)


class LarsProbe(nn.Module):
    def __init__(self, width: int, classes: int, seed: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=False, eps=EPSILON)
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(INITIAL_STD * torch.randn(classes, width, generator=draw))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(self.norm(features), self.weight, self.bias)

    def scores(self, features: Tensor) -> Tensor:
        return self(features.to(self.weight.device))


def fit_lars(
    views: list[Rows], classes: int, device: torch.device, settings: LarsSettings, tell: Callable[[int, int], object]
) -> LarsProbe:
    """`views` hold the same records in the same order, differently cropped; each epoch takes the next one."""
    records = len(views[0])
    batch = settings.batch_of(records)
    if batch < 2:
        raise ValueError("BatchNorm needs at least two records to train on; name more")
    settings, steps = settings.of(records), records // batch
    probe = LarsProbe(views[0].width, classes, settings.seed).to(device).train()
    velocity = [torch.zeros_like(parameter) for parameter in probe.parameters()]
    tell(0, settings.epochs * steps)
    with torch.enable_grad():
        for epoch in range(settings.epochs):
            order = settings.order(records, epoch)
            for step in range(steps):
                features, labels = views[epoch % len(views)].take(order[step * batch : (step + 1) * batch])
                loss = F.cross_entropy(probe(features.to(device)), labels.to(device))
                gradients = torch.autograd.grad(loss, list(probe.parameters()))
                _move(probe, gradients, velocity, settings.rate(epoch + step / steps, batch))
                tell(epoch * steps + step + 1, settings.epochs * steps)
    return probe.eval()


@torch.no_grad()
def _move(probe: nn.Module, gradients: tuple[Tensor, ...], velocity: list[Tensor], rate: float) -> None:
    for parameter, gradient, moving in zip(probe.parameters(), gradients, velocity, strict=True):
        if parameter.dim() > 1:
            weights, length = parameter.norm(), gradient.norm()
            gradient = gradient * torch.where((weights > 0) & (length > 0), TRUST * weights / length, 1.0)
        moving.mul_(MOMENTUM).add_(gradient)
        parameter.sub_(moving, alpha=rate)
