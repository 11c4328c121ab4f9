"""Optimizers and schedules of torch.optim in the library: they move as they do alone, or are refused."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from murmuration import Optimizer, Schedule
from murmuration.train.optim.rates import rates_of
from murmuration.train.optim.torch_optimizer import TorchOptimizer, UnfitOptimizerError, described
from murmuration.train.self_test.self_test import SelfTestError
from tests.support.own_module import RATE, Regression, run, training

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "AMSGrad": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "SGD": partial(optim.SGD, lr=0.05),
    "Nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(optim.Adagrad, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "Rprop": partial(optim.Rprop, lr=0.01),
}


def falling(step: int) -> float:
    return 0.05 / step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_move_as_the_optimizer_moves_them_by_the_noised_mean_gradients(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first gradient is also the one by which plain SGD moves the weights at the same keys."""
    make, noised = OPTIMIZERS[name], list[list[Tensor]]()
    with training(tmp_path / "run", optimizer=make, schedule=falling) as found:
        found.prove()
        inner = TorchOptimizer.update

        def watched(self: TorchOptimizer, flats: Any) -> None:
            noised.append([flat.gradient.clone() for flat in flats])
            inner(self, flats)

        monkeypatch.setattr(TorchOptimizer, "update", watched)
        for step in found.steps():
            found.step(step)
        weights = found.weights()
    hand = Regression()
    before = copy.deepcopy(hand.state_dict())
    theirs = make(list(hand.parameters()))
    for step, gradients in enumerate(noised, 1):
        for parameter, gradient in zip(hand.parameters(), gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        for group in theirs.param_groups:
            group["lr"] = falling(step)
        theirs.step()
    assert len(noised) == 6
    for key, expected in hand.state_dict().items():
        assert torch.equal(weights[key], expected) and not torch.equal(expected, before[key]), key
    plain = run(tmp_path / "plain", 1)
    for (key, start), gradient in zip(before.items(), noised[0], strict=True):
        assert torch.allclose((start - plain[key]) / RATE, gradient.view_as(start), rtol=1e-4, atol=1e-5), key


# Of each kind of state one: moments and their maxima, velocity, products of rates, sums, signs with steps of their own.
@pytest.mark.parametrize("name", ["AMSGrad", "Nesterov", "NAdam", "Adagrad", "Rprop"])
def test_a_torch_optimizer_goes_on_bit_by_bit(tmp_path: Path, name: str) -> None:
    settings = {"optimizer": OPTIMIZERS[name], "noise_multiplier": 1.0}
    whole = run(tmp_path / "whole", 5, **settings)
    for steps in (1, 2, 2):
        parts = run(tmp_path / "parts", steps, **settings)
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


class Whitened(optim.Optimizer):
    """Moves a parameter by its gradient over that's norm, for which it must see all of it."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each -= group["lr"] * each.grad / each.grad.norm().clamp(min=1e-12)


def test_an_optimizer_that_looks_at_whole_parameters_sees_them_on_one_process(tmp_path: Path) -> None:
    with training(tmp_path, optimizer=Whitened, schedule=0.01) as found:
        before = {name: tensor.clone() for name, tensor in found.weights().items()}
        found.prove()
        found.step(1)
        for name, after in found.weights().items():
            assert float((after - before[name]).norm()) == pytest.approx(0.01, rel=1e-4)


def test_an_optimizer_that_moves_at_another_rate_than_it_is_given_is_refused(tmp_path: Path) -> None:
    """ASGD moves at the rate of the step before."""
    with (
        training(tmp_path, optimizer=partial(optim.ASGD, lr=0.01)) as found,
        pytest.raises(SelfTestError, match="the optimizer moves at learning rate 0"),
    ):
        found.prove()


class Grouped(optim.SGD):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__([{"params": params}, {"params": [nn.Parameter(torch.zeros(1))]}], lr=0.1)


class Sketching(optim.SGD):
    """Keeps something of another shape than the weights."""

    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            self.state[each]["row"] = each.grad.sum(0)


class Counting(optim.SGD):
    """Counts its own calls, and moves by the number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self._calls = 0

    def step(self, closure: Any = None) -> None:
        self._calls += 1
        for each in self.param_groups[0]["params"]:
            each.data -= self._calls * each.grad


class CountingInItsGroup(torch.optim.SGD):
    """Counts its steps where no state of a parameter is."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


class Slow(torch.optim.SGD):
    """Begins to keep something at its second step."""

    def step(self, closure: Any = None) -> Any:
        (weights,) = self.param_groups[0]["params"]
        state = self.state[weights]
        if "seen" in state:
            state["late"] = torch.zeros_like(weights)
        state["seen"] = torch.zeros_like(weights)
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (Counting, "Counting keeps _calls, which a checkpoint of shards cannot hold"),
        (CountingInItsGroup, "keeps count"),
        (Slow, "keeps late"),
        (optim.Muon, "only supports 2D"),
        (optim.LBFGS, "step.. needs no closure, but failed"),
        (optim.SparseAdam, "failed"),
        ("AdamW", "'str' object is not callable"),
        (lambda _: 3, "it is a int"),
        (lambda: None, "called with a list of parameters"),
        (Grouped, "groups of parameters"),
        (Sketching, "Sketching keeps row, which a checkpoint of shards cannot hold"),
        (optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), "called with a list of parameters"),
    ],
)
def test_optimizers_that_cannot_work_here_are_refused(tmp_path: Path, optimizer: Any, said: str) -> None:
    with pytest.raises(UnfitOptimizerError, match=said):
        training(tmp_path / "run", optimizer=optimizer)


def test_settings_of_an_optimizers_group_are_part_of_what_it_is() -> None:
    def make(momentum: float) -> Any:
        return lambda weights: torch.optim.SGD([{"params": weights, "momentum": momentum}], lr=0.1)

    assert described(make(0.1)) != described(make(0.9)) == described(make(0.9))


# Schedules.


@pytest.mark.parametrize(
    "make",
    [
        partial(lr_scheduler.CosineAnnealingLR, T_max=12),
        partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=12),
        partial(lr_scheduler.StepLR, step_size=3),
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch),
        partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=5),
    ],
    ids=lambda make: make.func.__name__,
)
def test_a_schedulers_rates_are_those_that_torch_gives_in_a_loop_of_its_own(make: Any) -> None:
    found = rates_of(make, partial(optim.SGD, lr=0.2, momentum=0.9), 12)
    theirs = optim.SGD(nn.Linear(1, 1).parameters(), lr=0.2, momentum=0.9)
    scheduler, expected = make(theirs), list[float]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12):
            expected.append(theirs.param_groups[0]["lr"])
            theirs.step()
            scheduler.step()
    assert [found(step) for step in range(1, 13)] == expected and len(set(expected)) > 2


def test_numbers_functions_and_our_schedules() -> None:
    sgd = partial(optim.SGD, lr=0.2)
    assert [rates_of(None, sgd, 9)(step) for step in (1, 9)] == [0.2, 0.2], "the optimizer's own"
    assert [rates_of(1, sgd, 9)(step) for step in (1, 9)] == [1.0, 1.0]
    assert [rates_of(falling, sgd, 9)(step) for step in (1, 5)] == [0.05, 0.01]
    ours = rates_of(Schedule(peak=0.4, warmup=2, shape="linear"), sgd, 10)
    assert [round(ours(step), 6) for step in (1, 2, 3, 7)] == [0.2, 0.4, 0.4, 0.2]


@pytest.mark.parametrize(
    ("schedule", "optimizer", "said"),
    [
        (lr_scheduler.ReduceLROnPlateau, optim.SGD, "that of private records is private"),
        (partial(lr_scheduler.ReduceLROnPlateau, patience=3), optim.SGD, "that of private records is private"),
        (math.nan, optim.SGD, "learning rate of step 1 is nan"),
        (-0.1, optim.SGD, "learning rate of step 1 is -0.1"),
        (lambda step: math.inf, optim.SGD, "learning rate of step 1 is inf"),
        (None, Optimizer(type="SGD"), "no learning rate of its own"),
        (Schedule(peak=0.1, warmup_epochs=2), optim.SGD, "give warmup instead of warmup_epochs"),
        ("cosine", optim.SGD, "schedule= must be"),
        (lambda optimizer: lr_scheduler.StepLR(optimizer, 2), optim.SGD, "schedule="),
        (lr_scheduler.CosineAnnealingLR, optim.SGD, "CosineAnnealingLR.* failed"),
        (lr_scheduler.ConstantLR(optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)), optim.SGD, "schedule= must be"),
    ],
)
def test_schedules_that_give_no_rates_are_refused(schedule: Any, optimizer: Any, said: str) -> None:
    with pytest.raises(UnfitOptimizerError, match=said):
        rates_of(schedule, optimizer, 5)(1)


def test_a_step_at_no_number_moves_nothing_and_may_be_made_again(tmp_path: Path) -> None:
    with training(tmp_path, schedule=lambda step: math.nan if step == 2 else RATE) as found:
        found.prove()
        found.step(1)
        with pytest.raises(UnfitOptimizerError, match="step 2 is nan"):
            found.step(2)
        with pytest.raises(UnfitOptimizerError, match="step 2 is nan"):
            found.step(2, math.nan)
        assert found.done == 1
        found.step(2, RATE)
