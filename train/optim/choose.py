"""Makes the optimizer that a phase's config names, on flat shards."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from murmuration.train.config.optimizer import Optimizer
from murmuration.train.optim.adam import LAMB, AdamW
from murmuration.train.optim.base import FlatOptimizer, policies
from murmuration.train.optim.sgd import LARS, SGD


def make_optimizer(
    settings: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]], gradient_noise: float
) -> FlatOptimizer:  # fmt: skip
    """For the trainable parameters. `gradient_noise`: the plan's sigma·C/(q·n), 0 in a phase without noise."""
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    params, chosen = settings.params, policies(settings.params, named)
    if settings.type == "AdamW":
        return AdamW(named, chosen, params, gradient_noise)
    if settings.type == "LAMB":
        return LAMB(named, chosen, params, gradient_noise)
    return (SGD if settings.type == "SGD" else LARS)(named, chosen, params)
