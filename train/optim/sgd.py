"""SGD with momentum, and LARS: momentum over gradients scaled per parameter (You et al., arXiv 1708.03888)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from murmuration.train.config.optimizer import OptimizerParams
from murmuration.train.optim.base import Flat, FlatOptimizer, Policy, Stretch


class SGD(FlatOptimizer):
    """The velocity is momentum·velocity + gradient + decay·weights."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], policies: Mapping[str, Policy], params: OptimizerParams
    ) -> None:
        self.params = params
        self.moments = ("momentum_buffer",) if params.momentum else ()
        super().__init__(parameters, policies, params.ema_decay, params.gradient_norm)

    def update(self, flats: Sequence[Flat]) -> None:
        for flat in flats:
            for stretch in flat.stretches:
                self._move(flat, stretch, 1.0)

    def _move(self, flat: Flat, stretch: Stretch, ratio: float | Tensor) -> None:
        rate, decay = flat.learning_rate * stretch.policy.learning_rate, stretch.policy.weight_decay
        for weights, gradient, moments in flat.chunks(stretch):
            direction = torch.add(gradient, weights, alpha=decay).mul_(ratio)
            for velocity in moments:
                direction = velocity.mul_(self.params.momentum).add_(direction)
            weights.sub_(direction, alpha=rate)


LARS_ETA = 0.001
"""The trust coefficient."""


class LARS(SGD):
    """The ratio is eta·|w| / (|g| + decay·|w| + eps) over whole parameters, or 1 where a norm is 0."""

    by_parameter = True

    def update(self, flats: Sequence[Flat]) -> None:
        weights, gradients = self.norms(flats, _weights_and_gradients)
        for flat in flats:
            for stretch in flat.stretches:
                ratio: float | Tensor = 1.0
                if stretch.policy.trust_ratio:
                    ratio = self._ratio(weights[stretch.number], gradients[stretch.number], stretch.policy.weight_decay)
                self._move(flat, stretch, ratio)

    def _ratio(self, weights: Tensor, gradient: Tensor, decay: float) -> Tensor:
        ratio = LARS_ETA * weights / (gradient + decay * weights + self.params.eps)
        return torch.where((weights > 0) & (gradient > 0), ratio, 1.0)


def _weights_and_gradients(flat: Flat, stretch: Stretch) -> Iterator[tuple[Tensor, Tensor]]:
    for weights, gradient, _ in flat.chunks(stretch):
        yield weights, gradient
