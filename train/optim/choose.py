"""Makes the optimizer that a phase's config names, on flat shards."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from murmuration.train.config.optimizer import Optimizer
from murmuration.train.optim.adam import LAMB, AdamW
from murmuration.train.optim.base import FlatOptimizer, OptimizerError, policies
from murmuration.train.optim.sgd import LARS, SGD
from murmuration.train.optim.width import WidthFactors


def make_optimizer(
    settings: Optimizer, parameters: Iterable[tuple[str, nn.Parameter]], gradient_noise: float,
    widths: WidthFactors | None = None,
) -> FlatOptimizer:  # fmt: skip
    """For the trainable parameters. `gradient_noise`: the plan's sigma·C/(q·n), 0 in a phase without noise.
    `widths`: of the model, which alone knows them."""
    if (settings.width_transfer is None) != (widths is None):
        raise OptimizerError("optimizer.width_transfer needs the factors of the model's widths, and nothing else does")
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    params, chosen = settings.params, policies(settings.params, named, widths)
    if settings.type == "AdamW":
        return AdamW(named, chosen, params, gradient_noise)
    if settings.type == "LAMB":
        return LAMB(named, chosen, params, gradient_noise)
    return (SGD if settings.type == "SGD" else LARS)(named, chosen, params)


def width_factors(settings: Optimizer, model: nn.Module) -> dict[str, float]:
    """By trained parameter, what its rate is multiplied by because of its width; empty if rates are not transferred.
    Refuses what has no factor; the model need not have data."""
    if (widths := WidthFactors.of(settings, model)) is None:
        return {}
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    chosen = policies(settings.params, named, widths)
    return {name: widths.of_parameter(name, policy.trust_ratio) for name, policy in chosen.items()}
