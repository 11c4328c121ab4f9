"""Makes the optimizer that a config names or a program gives, on flat shards."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from murmuration.train.config.optimizer import Optimizer
from murmuration.train.optim.adam import LAMB, AdamW
from murmuration.train.optim.base import FlatOptimizer, policies
from murmuration.train.optim.sgd import LARS, SGD
from murmuration.train.optim.torch_optimizer import MakeOptimizer, TorchOptimizer


def make_optimizer(
    settings: Optimizer | MakeOptimizer, parameters: Iterable[tuple[str, nn.Parameter]]
) -> FlatOptimizer:  # fmt: skip
    """For the trainable parameters."""
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not isinstance(settings, Optimizer):
        return TorchOptimizer(named, settings)
    kind = {"AdamW": AdamW, "LAMB": LAMB, "SGD": SGD, "LARS": LARS}[settings.type]
    return kind(named, policies(settings.params, named), settings.params)
