"""Binding to shards: one reduction per step, ranks with padding alone, several flats, resuming elsewhere, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from murmuration.train.config.optimizer import Optimizer, OptimizerParams, ParameterRule
from murmuration.train.distributed.shards import Fragment
from murmuration.train.optim.base import CHUNK, OptimizerError
from murmuration.train.optim.optimizers import make_optimizer
from tests.support.optim_textbook import SHAPES, gradient, initial, off, rate, textbook, walk
from tests.support.train_helpers import fragments_of, on_ranks, slice_of

KINDS = ["AdamW", "LAMB", "SGD", "LARS"]
FASTER = {"LARS": 300.0}


def settings(kind: Any, **params: Any) -> Optimizer:
    rules = [ParameterRule(learning_rate=FASTER.get(kind, 1.0))]
    return Optimizer(type=kind, params=OptimizerParams(**({"rules": rules} | params)))


def named() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(weights) for name, weights in initial().items()}


def test_the_models_make_the_optimizer_work_in_several_chunks() -> None:
    sizes = [p.numel() for p in named().values()]
    assert max(sizes) > CHUNK["cpu"] > min(sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_without_sharding_it_is_an_ordinary_optimizer(kind: str) -> None:
    parameters = named()
    optimizer = make_optimizer(settings(kind, weight_decay=0.2), parameters.items())
    expected = textbook(kind, lambda name: FASTER.get(kind, 1.0), lambda name: 0.2)
    assert off(walk(optimizer, parameters), expected) < 1e-6


def test_a_fresh_optimizer_does_not_move_by_itself() -> None:
    p, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = make_optimizer(Optimizer(), [("p", p), ("frozen", frozen)])
    assert [q for group in optimizer.param_groups for q in group["params"]] == [p]
    p.grad = torch.ones(3)
    optimizer.step()
    assert p.detach().tolist() == [1.0] * 3


@pytest.mark.parametrize(("kind", "expected"), [("AdamW", 0), ("SGD", 0), ("LAMB", 1), ("LARS", 1)])
def test_norms_cost_one_reduction_per_step_for_all_flats_together(kind: str, expected: int) -> None:
    """Two flat tensors per rank, against the order of the parameters, with gaps; rank 2 holds padding alone."""
    parameters = named()
    total = sum(p.numel() for p in parameters.values())
    whole = torch.cat([p.detach().reshape(-1) for p in parameters.values()])

    def one(ranks: Any) -> tuple[list[tuple[Fragment, Tensor]], int]:
        low, high = (0, 0) if ranks.rank == 2 else slice_of(ranks.rank, 2, total)
        fragments = fragments_of(parameters, low, high)
        layout, flats = {}, []
        for part in (fragments[1::2], fragments[::2]):
            placed, end = [], 2
            for f in reversed(part):
                placed.append(Fragment(f.name, f.parameter, f.start, f.length, end))
                end += f.length + 3
            flat = nn.Parameter(torch.full((end,), 9.0))
            for f, old in zip(placed, reversed(part), strict=True):
                f.of(flat.detach()).copy_(old.of(whole[low:high]))
            flats.append(flat)
            layout[id(flat)] = (flat, placed)
        calls = []

        def add(sums: Tensor) -> Tensor:
            calls.append(tuple(sums.shape))
            return ranks.add(sums)

        optimizer = make_optimizer(settings(kind, weight_decay=0.2), parameters.items())
        optimizer.param_groups[0]["params"] = flats
        optimizer.bind(layout, add)
        for step in (1, 2, 3):
            for flat, placed in layout.values():
                flat.grad = torch.full_like(flat, 1e9)
                for f in placed:
                    f.of(flat.grad).copy_(gradient(step, f.name).reshape(-1)[f.start : f.start + f.length])
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.step()
        found = []
        for flat, placed in layout.values():
            outside = torch.ones(flat.numel(), dtype=torch.bool)
            for f in placed:
                outside[f.position : f.position + f.length] = False
                found.append((f, f.of(flat.detach()).clone()))
            assert bool((flat.detach()[outside] == 9.0).all()), "padding moved"
        assert all(shape == (2, len(SHAPES)) for shape in calls)
        return found, len(calls)

    found = on_ranks(3, one)
    assert [calls for _, calls in found] == [3 * expected] * 3
    joined = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
    for pieces, _ in found:
        for f, values in pieces:
            joined[f.name].view(-1)[f.start : f.start + f.length] = values
    assert off(joined, textbook(kind, lambda name: FASTER.get(kind, 1.0), lambda name: 0.2)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_state_by_name_is_all_that_a_resumed_run_needs(kind: str) -> None:
    """Three steps alone, or two, the state carried over by name, and one more in a new optimizer."""
    chosen = settings(kind, weight_decay=0.2, ema_decay=0.5)
    straight = named()
    unbroken = make_optimizer(chosen, straight.items())
    walk(unbroken, straight)
    first = named()
    before = make_optimizer(chosen, first.items())
    assert before.steps_done == 0 and not before.state_tensors(first["head.bias"])
    walk(before, first, [1, 2])
    second = copy.deepcopy(first)
    after = make_optimizer(chosen, second.items())
    after.restart(before.steps_done)
    for name, p in second.items():
        saved = before.state_tensors(first[name])
        assert set(saved) == set(after.state_tensors(p)) >= {"weights_ema"}
        for kind_of_state, tensor in after.state_tensors(p).items():
            assert not tensor.any()
            tensor.copy_(saved[kind_of_state])
    walk(after, second, [3])
    assert after.steps_done == unbroken.steps_done == 3
    for name in SHAPES:
        assert torch.equal(second[name], straight[name])
        ours, theirs = after.state_tensors(second[name]), unbroken.state_tensors(straight[name])
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    after.restart(0)
    assert after.steps_done == 0 and not after.state_tensors(second["head.bias"])


def test_tensors_that_it_does_not_know_are_refused() -> None:
    parameters = named()
    optimizer = make_optimizer(Optimizer(), parameters.items())
    flat = nn.Parameter(torch.zeros(4))
    flat.grad = torch.ones(4)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(OptimizerError, match=r"outside its layout; bind\(\) it after sharding"):
        optimizer.step()
    with pytest.raises(OptimizerError, match="contains stranger, which the optimizer was not made for"):
        optimizer.bind({id(flat): (flat, [Fragment("stranger", 0, 0, 4, 0)])}, None)
    optimizer.bind({id(flat): (flat, [Fragment("head.bias", 6, 0, 4, 0)])}, None)
    with pytest.raises(OptimizerError, match="got no noise"):
        optimizer.step(lambda: 0.0)  # pyright: ignore[reportArgumentType]
    flat.grad = None
    with pytest.raises(OptimizerError, match="has no gradient"):
        optimizer.step()
    assert not flat.detach().any()


def test_a_hook_before_the_step_sees_and_changes_the_gradient() -> None:
    """As the engine's, which brings the noise."""
    p = nn.Parameter(torch.zeros(2))
    optimizer = make_optimizer(settings("SGD", momentum=0.0), [("p", p)])
    optimizer.param_groups[0]["lr"] = 1.0
    p.grad = gradient = torch.ones(2)

    def bring_noise(*_: Any) -> None:
        gradient.fill_(3.0)

    optimizer.register_step_pre_hook(bring_noise)
    optimizer.step()
    assert p.detach().tolist() == [-3.0, -3.0]


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("AdamW", {"momentum": 0.9}, "AdamW has no momentum; it takes betas, ema_decay"),
        ("SGD", {"betas": (0.9, 0.9)}, "no betas"),
        ("LAMB", {"momentum": 0.9}, "no momentum"),
        ("AdamW", {"ema_decay": 1.0}, "less than 1"),
        ("AdamW", {"betas": (0.9, 1.0)}, r"in \[0, 1\)"),
        ("AdamW", {"rules": [{"parameters": "*", "learning_rate": 0.0}]}, "greater than 0"),
    ],
)  # fmt: skip
def test_settings_that_would_do_nothing_are_refused(kind: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Optimizer.model_validate({"type": kind, "params": params})


def test_a_rule_that_fits_nothing_is_refused() -> None:
    rules = [ParameterRule(parameters="*.bias"), ParameterRule(parameters="decoder.*", learning_rate=0.1)]
    with pytest.raises(ValueError, match=r"rules.1 \('decoder.\*'\) fits no trained parameter.*'encoder.weight'"):
        make_optimizer(settings("AdamW", rules=rules), named().items())
