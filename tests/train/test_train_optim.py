"""Optimizers on shards equal the textbook's on whole parameters, and torch's and timm's where they mean the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.optim.lamb import Lamb
from timm.optim.lars import Lars
from torch import nn

from murmuration.train.config.optimizer import Optimizer, OptimizerParams, ParameterRule
from murmuration.train.optim.base import OptimizerError
from murmuration.train.optim.optimizers import make_optimizer
from tests.support.optim_textbook import SHAPES, gradient, initial, off, on_shards, rate, textbook, walk

CLOSE = 1e-6


def settings(kind: Any, **params: Any) -> Optimizer:
    return Optimizer(type=kind, params=OptimizerParams(**params))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}), ("AdamW", {"betas": (0.8, 0.95), "eps": 1e-3}),
    ("LAMB", {"eps": 1e-6}), ("LAMB", {"betas": (0.5, 0.9)}),
    ("SGD", {}), ("SGD", {"momentum": 0.0}), ("SGD", {"momentum": 0.7}),
    ("LARS", {}), ("LARS", {"eps": 1e-1, "momentum": 0.0}),
]  # fmt: skip
FASTER = {"LARS": 300.0}
"""Factor on the rate, so that weights move far enough to compare."""
IDS = [f"{kind} {params}" for kind, params in CASES]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("kind", "params"), CASES, ids=IDS)
def test_shards_follow_the_textbook(kind: str, params: dict[str, Any], world: int) -> None:
    factor = FASTER.get(kind, 1.0)
    found, _ = on_shards(settings(kind, weight_decay=0.3, rules=[ParameterRule(learning_rate=factor)], **params), world)
    assert off(found, textbook(kind, lambda name: factor, lambda name: 0.3, **params)) < CLOSE


RULES = [
    {"parameters": "encoder.*", "learning_rate": 0.1},  # Mehta et al.'s alpha on the backbone
    {"parameters": "*.bias", "weight_decay": False, "trust_ratio": False},
    {"parameters": "*.norm.*", "weight_decay": False, "trust_ratio": False},
    {"parameters": "pos_*", "weight_decay": False, "learning_rate": 0.5},
    {"parameters": "*.big", "learning_rate": 0.2},
]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["AdamW", "LAMB", "SGD", "LARS"])
def test_rules_reach_their_parameters_alone(kind: str, world: int) -> None:
    faster = FASTER.get(kind, 1.0)
    rules = [ParameterRule(**rule) for rule in [*RULES, {"learning_rate": faster}]]
    found, _ = on_shards(settings(kind, weight_decay=0.3, rules=rules), world)
    factors = {"encoder.big": 0.1 * 0.2, "pos_embed": 0.5} | {
        name: 0.1 for name in ("encoder.weight", "encoder.norm.weight", "encoder.bias")
    }
    flat = {"encoder.norm.weight", "encoder.bias", "head.bias"}
    still = {*flat, "pos_embed"}
    expected = textbook(
        kind, factor=lambda name: faster * factors.get(name, 1.0), decay=lambda name: 0.0 if name in still else 0.3,
        adapts=lambda name: name not in flat,
    )  # fmt: skip
    assert off(found, expected) < CLOSE
    for name in SHAPES:  # none hides behind a larger one
        assert off(found, expected, (name,)) < CLOSE, name


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (settings("AdamW", weight_decay=0.1, betas=(0.9, 0.95)),
         lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95), weight_decay=0.1)),
        (settings("SGD", momentum=0.9, weight_decay=0.1),
         lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1)),
        (settings("SGD", momentum=0.0), lambda p: torch.optim.SGD(p)),
        (settings("LAMB", eps=1e-6, weight_decay=0.1),
         lambda p: Lamb(p, eps=1e-6, weight_decay=0.1, max_grad_norm=None, always_adapt=True)),
        (settings("LARS", weight_decay=0.1, rules=[ParameterRule(learning_rate=20)]),
         lambda p: Lars(p, momentum=0.9, weight_decay=0.1, trust_coeff=0.02, always_adapt=True)),
    ],
    ids=["AdamW", "momentum", "SGD", "LAMB", "LARS"],
)  # fmt: skip
def test_torch_and_timm_move_alike(mine: Optimizer, theirs: Any) -> None:
    parameters = {name: nn.Parameter(weights) for name, weights in initial().items()}
    optimizer = theirs(list(parameters.values()))
    found, _ = on_shards(mine, 2)
    assert off(found, walk(optimizer, parameters)) < 1e-5


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_long_gradient_is_scaled_down_as_torch_does_over_all_shards(kind: str, world: int) -> None:
    """Steps 1 to 3 have other norms, of which the bound meets some."""
    norms = [torch.cat([gradient(step, name).flatten() for name in SHAPES]).norm() for step in (1, 2, 3)]
    most = float(sorted(norms)[1]) * 1.001
    parameters = {name: nn.Parameter(weights) for name, weights in initial().items()}
    weights = list(parameters.values())
    theirs = torch.optim.AdamW(weights, weight_decay=0.0) if kind == "AdamW" else torch.optim.SGD(weights, momentum=0.9)
    ours = {name: nn.Parameter(weights) for name, weights in initial().items()}
    alone = make_optimizer(settings(kind, gradient_norm=most), ours.items())
    for step in (1, 2, 3):
        for name in SHAPES:
            parameters[name].grad, ours[name].grad = gradient(step, name), gradient(step, name)
        torch.nn.utils.clip_grad_norm_(weights, most)
        theirs.param_groups[0]["lr"] = alone.param_groups[0]["lr"] = rate(step)
        theirs.step(), alone.step()
    expected = {name: p.detach() for name, p in parameters.items()}
    assert off({name: p.detach() for name, p in ours.items()}, expected) < 1e-5, "whole parameters on every rank"
    assert off(on_shards(settings(kind, gradient_norm=most), world)[0], expected) < 1e-5
    assert off(on_shards(settings(kind), world)[0], expected) > 1e-3, "the bound meets something"


def test_lamb_from_zero_weights_takes_adams_first_step() -> None:
    """Mehta et al.: a zero last layer has trust ratio 1, and its first step is that of a sign."""
    start = {name: weights * 0 for name, weights in initial().items()}
    lamb, _ = on_shards(settings("LAMB"), 2, steps=1, start=start)
    adam, _ = on_shards(settings("AdamW"), 2, steps=1, start=start)
    for name in SHAPES:
        assert torch.allclose(lamb[name], adam[name], rtol=1e-6, atol=0)
        plain = gradient(1, name).abs() > 1e-4  # the others feel eps
        assert torch.allclose(lamb[name][plain], -rate(1) * gradient(1, name).sign()[plain], rtol=2e-4)


@pytest.mark.parametrize("kind", ["AdamW", "LAMB", "SGD", "LARS"])
@pytest.mark.parametrize("world", [1, 3])
def test_the_moving_average_follows_the_weights(kind: str, world: int) -> None:
    seen = [initial(), *(on_shards(settings(kind), world, steps=steps)[0] for steps in (1, 2, 3))]
    _, average = on_shards(settings(kind, ema_decay=0.8), world)
    for name in SHAPES:
        expected = seen[0][name].double()
        for weights in seen[1:]:
            expected = 0.8 * expected + 0.2 * weights[name].double()
        assert torch.allclose(average[name].double(), expected, atol=1e-7)


@pytest.mark.parametrize("kind", ["AdamW", "LAMB", "SGD", "LARS"])
def test_a_run_is_bitwise_repeatable_at_a_fixed_world_size(kind: str) -> None:
    first, second = (on_shards(settings(kind, weight_decay=0.1), 3)[0] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in SHAPES)


def two_flats() -> tuple[Any, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = make_optimizer(settings("LAMB"), zip("ab", parameters, strict=True))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, parameters


def test_norms_whose_squares_fp32_cannot_hold_are_norms_all_the_same() -> None:
    optimizer, parameters = two_flats()
    flats = [optimizer._flat(parameter, 0.1) for parameter in parameters]
    pieces = iter([(torch.tensor([3e-30]), torch.tensor([3e30, 4e30])), (torch.tensor([1.0]), torch.tensor([2.0]))])
    found = optimizer.norms(flats, lambda flat, stretch: iter([next(pieces)]))
    assert found.flatten().tolist() == pytest.approx([3e-30, 1.0, 5e30, 2.0], rel=1e-6)


def test_flat_tensors_that_made_different_numbers_of_steps_are_refused() -> None:
    optimizer, parameters = two_flats()
    assert optimizer.steps_done == 1
    optimizer.state[parameters[1]]["step"] += 1
    with pytest.raises(OptimizerError, match="disagree about the number of steps"):
        optimizer.steps_done  # noqa: B018
