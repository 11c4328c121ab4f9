"""The optimizers that a config names, on flat shards.

Adam: Kingma and Ba (arXiv 1412.6980); AdamW: Loshchilov and Hutter (1711.05101); LAMB: You et al. (1904.00962),
algorithm 2; LARS: You et al. (1708.03888), momentum over gradients scaled per parameter. Everything here acts on a
gradient that already has its noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from murmuration.train.config.optimizer import Optimizer, OptimizerParams, ParameterRule
from murmuration.train.optim.base import Flat, FlatOptimizer, Policy, Stretch


def make_optimizer(settings: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]) -> FlatOptimizer:
    """For the trainable parameters."""
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    kind = {"AdamW": AdamW, "LAMB": LAMB, "SGD": SGD, "LARS": LARS}[settings.type]
    return kind(named, policies(settings.params, named), settings.params)


# The config's rules become a policy for each parameter, by its name, before sharding hides it.


def policies(params: OptimizerParams, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Policy]:
    """A rule that matches no parameter is refused: it must be a typing error."""
    named = list(parameters)
    for number, rule in enumerate(params.rules):
        if not any(fnmatchcase(name, rule.parameters) for name, _ in named):
            raise ValueError(
                f"optimizer.params.rules.{number} ({rule.parameters!r}) fits no trained parameter; names look like "
                f"{named[0][0]!r}"
            )
    return {
        name: _policy(params, [rule for rule in params.rules if fnmatchcase(name, rule.parameters)])
        for name, _ in named
    }


def _policy(params: OptimizerParams, rules: list[ParameterRule]) -> Policy:
    factor = 1.0
    for rule in rules:
        factor *= rule.learning_rate
    decays, adapts = all(rule.weight_decay for rule in rules), all(rule.trust_ratio for rule in rules)
    return Policy(factor, params.weight_decay if decays else 0.0, adapts)


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, float], None]
"""Takes weights, gradient, both moments, step, learning rate, weight decay; another implementation of one step of
AdamW, in place."""


class AdamW(FlatOptimizer):
    """A `kernel` may take the place of its arithmetic."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], policies: Mapping[str, Policy], params: OptimizerParams
    ) -> None:
        self.params = params
        self.kernel: Kernel | None = None
        super().__init__(parameters, policies, params.ema_decay, params.gradient_norm)

    def update(self, flats: Sequence[Flat]) -> None:
        for flat in flats:
            for stretch in flat.stretches:
                rate, decay = flat.learning_rate * stretch.policy.learning_rate, stretch.policy.weight_decay
                for weights, gradient, (first, second) in flat.chunks(stretch):
                    if self.kernel is not None:
                        self.kernel(weights, gradient, first, second, flat.step, rate, decay)
                        continue
                    self._observe(gradient, first, second)
                    direction = self._direction(first, second, flat.step)
                    weights.mul_(1.0 - rate * decay).sub_(direction, alpha=rate)

    def _observe(self, gradient: Tensor, first: Tensor, second: Tensor) -> None:
        one, two = self.params.betas
        first.lerp_(gradient, 1.0 - one)
        second.mul_(two).addcmul_(gradient, gradient, value=1.0 - two)

    def _direction(self, first: Tensor, second: Tensor, step: int) -> Tensor:
        one, two = (1.0 - beta**step for beta in self.params.betas)
        denominator = second.sqrt().div_(math.sqrt(two)).add_(self.params.eps)
        return torch.div(first, denominator).div_(one)


class LAMB(AdamW):
    """A parameter moves along Adam's direction plus its decay, by phi(norm of weights) / (norm of the direction).

    The ratio is 1 where either norm is 0: a parameter that starts at zero takes Adam's step (Mehta et al.'s last
    layer). The paper's phi is the identity here. Norms are of whole parameters, over all ranks.
    """

    by_parameter = True

    def update(self, flats: Sequence[Flat]) -> None:
        weights, direction = self.norms(flats, self._observed)
        ratios = torch.where((weights > 0) & (direction > 0), weights / direction, 1.0)
        for flat in flats:
            for stretch in flat.stretches:
                rate = flat.learning_rate * stretch.policy.learning_rate
                ratio = ratios[stretch.number] if stretch.policy.trust_ratio else 1.0
                for weights, _, (first, second) in flat.chunks(stretch):
                    weights.sub_(self._lamb_direction(weights, first, second, flat, stretch).mul_(ratio), alpha=rate)

    def _observed(self, flat: Flat, stretch: Stretch) -> Iterator[tuple[Tensor, Tensor]]:
        for weights, gradient, (first, second) in flat.chunks(stretch):
            self._observe(gradient, first, second)
            yield weights, self._lamb_direction(weights, first, second, flat, stretch)

    def _lamb_direction(self, weights: Tensor, first: Tensor, second: Tensor, flat: Flat, stretch: Stretch) -> Tensor:
        return self._direction(first, second, flat.step).add_(weights, alpha=stretch.policy.weight_decay)


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
                    weight, gradient = weights[stretch.number], gradients[stretch.number]
                    pulled = gradient + stretch.policy.weight_decay * weight + self.params.eps
                    ratio = torch.where((weight > 0) & (gradient > 0), LARS_ETA * weight / pulled, 1.0)
                self._move(flat, stretch, ratio)


def _weights_and_gradients(flat: Flat, stretch: Stretch) -> Iterator[tuple[Tensor, Tensor]]:
    for weights, gradient, _ in flat.chunks(stretch):
        yield weights, gradient
