"""From the config's rules to what holds for each parameter: by its name and shape, before sharding hides both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from train.optim_settings import OptimizerParams, ParameterRule


@dataclass(frozen=True)
class Policy:
    """Factor on the learning rate, weight decay, and whether a trust ratio acts."""

    learning_rate: float
    weight_decay: float
    trust_ratio: bool


def policies(params: OptimizerParams, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Policy]:
    """A rule that fits no parameter is refused: it is a slip of the pen."""
    named = list(parameters)
    for number, rule in enumerate(params.rules):
        if not any(_fits(rule, name, parameter) for name, parameter in named):
            raise ValueError(
                f"optimizer.params.rules.{number} ({rule.parameters!r}) fits no trained parameter; the names look like "
                f"{named[0][0]!r}"
            )
    return {name: _policy(params, [r for r in params.rules if _fits(r, name, p)]) for name, p in named}


def _policy(params: OptimizerParams, rules: list[ParameterRule]) -> Policy:
    factor = 1.0
    for rule in rules:
        factor *= rule.learning_rate
    decays, adapts = all(rule.weight_decay for rule in rules), all(rule.trust_ratio for rule in rules)
    return Policy(factor, params.weight_decay if decays else 0.0, adapts)


def _fits(rule: ParameterRule, name: str, parameter: nn.Parameter) -> bool:
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 may have emptied the parameter itself
    few = rule.at_most_dimensions is None or len(shape) <= rule.at_most_dimensions
    return few and fnmatchcase(name, rule.parameters)
