"""The learning rate of each step, from whatever a program gives: a number, a function, our schedules or PyTorch's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from murmuration.train.config.optimizer import Optimizer, Schedule
from murmuration.train.optim.schedule import learning_rate
from murmuration.train.optim.torch_optimizer import MakeOptimizer, UnfitOptimizerError, learning_rate_of

Rates = Callable[[int], float]
"""From the number of a step, counted from 1."""
MakeScheduler = type[LRScheduler] | partial[Any]


def rates_of(
    given: float | Schedule | Rates | MakeScheduler | None, optimizer: Optimizer | MakeOptimizer, steps: int
) -> Rates:  # fmt: skip
    """None: the rate that a torch.optim optimizer was made with."""
    own = None if isinstance(optimizer, Optimizer) else learning_rate_of(optimizer)
    if isinstance(given, Schedule):
        return lambda step: learning_rate(given, steps, step)
    inner: Any = given.func if isinstance(given, partial) else given
    if isinstance(inner, type) and issubclass(inner, LRScheduler):
        return _of_scheduler(given, inner, 1.0 if own is None else own, steps)
    if not (given is None or isinstance(given, float | int)):
        return _of_function(given)
    rate = own if given is None else float(given)
    if rate is None:
        raise UnfitOptimizerError(
            "murmuration.Optimizer has no learning rate of its own; give schedule= a number, a function of the step, a "
            "murmuration.Schedule or a torch.optim.lr_scheduler"
        )
    return lambda step: _sound(rate, step)


def _of_function(function: Any) -> Rates:
    try:
        _sound(function(1), 1)
    except (TypeError, ValueError) as error:
        if isinstance(error, UnfitOptimizerError):
            raise
        raise UnfitOptimizerError(
            f"schedule= gives no learning rate for step 1 ({type(error).__name__}: {error}); give a number, a function "
            "of the step, a murmuration.Schedule, a class of torch.optim.lr_scheduler, or functools.partial of one "
            "with its arguments"
        ) from None
    return lambda step: _sound(function(step), step)


def _of_scheduler(make: Any, kind: type, rate: float, steps: int) -> Rates:
    """All rates at once: a scheduler counts its own steps, and a run may continue anywhere."""
    if issubclass(kind, ReduceLROnPlateau):
        raise UnfitOptimizerError(
            "ReduceLROnPlateau follows a loss, and that of private records is private; use a schedule of steps"
        )
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    found = list[float]()
    try:
        scheduler = make(stand_in)
    except (TypeError, ValueError) as error:
        raise UnfitOptimizerError(
            f"schedule=: {kind.__name__} cannot be made ({error}); give functools.partial of it with its arguments"
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the stand-in takes no steps
        for _ in range(steps):
            found.append(float(stand_in.param_groups[0]["lr"]))
            scheduler.step()
    return lambda step: _sound(found[step - 1], step)


def _sound(rate: float, step: int) -> float:
    found = float(rate)
    if not (math.isfinite(found) and found >= 0):
        raise UnfitOptimizerError(f"the learning rate of step {step} is {found}; schedule= must give numbers from 0 up")
    return found
