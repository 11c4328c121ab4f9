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
from murmuration.train.optim.torch_optimizer import MakeOptimizer, UnfitOptimizerError, learning_rate_of

# Learning rates as a pure function of the step.
#
# ViP (arXiv 2306.08842): shape cosine, shape_from first-step, warmup 1000: peak · min(t/1000, half-cosine of
# (t-1)/T). DP-Cap (2403.02506): shape cosine, warmup 2000, end 10000, first_step 0; its code's first update has rate
# 0; with first_step 1 the warm-up is one step ahead and wastes none. Mehta et al. (2205.02973): linear (LAMB), cosine
# (momentum).


Rates = Callable[[int], float]
"""From the number of a step, counted from 1."""
MakeScheduler = type[LRScheduler] | partial[Any]


def learning_rate(schedule: Schedule, steps: int, step: int) -> float:
    """The learning rate of the given step, counted from 1, in a phase of `steps` steps."""
    passed = step - 1
    warm = min(1.0, (passed + schedule.first_step) / schedule.warmup) if schedule.warmup else 1.0
    rising = schedule.start + (schedule.peak - schedule.start) * warm
    return min(rising, _falling(schedule, steps, passed))


def _falling(schedule: Schedule, steps: int, passed: int) -> float:
    begin = schedule.warmup if schedule.shape_from == "warmup" else 0
    end = schedule.end or steps
    done = min(1.0, max(0, passed - begin) / max(1, end - begin))
    if schedule.shape == "constant":
        return schedule.peak
    if schedule.shape == "inverse-sqrt":
        knee = max(1, schedule.warmup)
        return schedule.peak * math.sqrt(knee / max(knee, passed + 1))
    left = 1.0 - done if schedule.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.floor + (schedule.peak - schedule.floor) * left


def rates_of(
    given: float | Schedule | Rates | MakeScheduler | None, optimizer: Optimizer | MakeOptimizer, steps: int
) -> Rates:  # fmt: skip
    """None: the rate that a torch.optim optimizer was made with.

    >>> rates = rates_of(partial(torch.optim.lr_scheduler.LinearLR, total_iters=2), partial(torch.optim.SGD, lr=3.0), 9)
    >>> [round(rates(step), 6) for step in (1, 2, 3, 9)]
    [1.0, 2.0, 3.0, 3.0]
    """
    own = None if isinstance(optimizer, Optimizer) else learning_rate_of(optimizer)
    if isinstance(given, Schedule):
        if given.warmup_epochs is not None:
            raise UnfitOptimizerError("a program's schedule counts steps; give warmup instead of warmup_epochs")
        return lambda step: learning_rate(given, steps, step)
    inner: Any = given.func if isinstance(given, partial) else given
    if isinstance(inner, type) and issubclass(inner, LRScheduler):
        return _of_scheduler(given, inner, 1.0 if own is None else own, steps)
    if given is not None and not isinstance(given, float | int):
        if not callable(given) or isinstance(given, type | LRScheduler):
            raise UnfitOptimizerError(
                "schedule= must be a number, a function of the step, a murmuration.Schedule, or a class of "
                f"torch.optim.lr_scheduler (with functools.partial), but is {given!r}"
            )
        try:
            sound(given(1), 1)
        except (TypeError, ValueError) as error:
            if isinstance(error, UnfitOptimizerError):
                raise
            raise UnfitOptimizerError(
                f"schedule= gives no learning rate for step 1 ({type(error).__name__}: {error}); give a number, a "
                "function of the step, a murmuration.Schedule, a class of torch.optim.lr_scheduler, or "
                "functools.partial of one with its arguments"
            ) from None
        return lambda step: sound(given(step), step)
    rate = own if given is None else float(given)
    if rate is None:
        raise UnfitOptimizerError(
            "murmuration.Optimizer has no learning rate of its own; give schedule= a number, a function of the step, a "
            "murmuration.Schedule or a torch.optim.lr_scheduler"
        )
    return lambda step: sound(rate, step)


def _of_scheduler(make: Any, kind: type, rate: float, steps: int) -> Rates:
    """All rates at once: a scheduler counts its own steps, and a run may continue anywhere."""
    if issubclass(kind, ReduceLROnPlateau):
        raise UnfitOptimizerError(
            "ReduceLROnPlateau follows a loss, and that of private records is private; use a schedule of steps"
        )
    stand_in, found = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate), list[float]()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the stand-in takes no steps
            scheduler = make(stand_in)
            for _ in range(steps):
                found.append(float(stand_in.param_groups[0]["lr"]))
                scheduler.step()
    except (TypeError, ValueError) as error:
        raise UnfitOptimizerError(
            f"schedule=: {kind.__name__} failed for {steps} steps ({error}); give its settings with functools.partial"
        ) from None
    return lambda step: sound(found[step - 1], step)


def sound(rate: float, step: int) -> float:
    """The rate, refused if no optimizer could use it."""
    found = float(rate)
    if not (math.isfinite(found) and found >= 0):
        raise UnfitOptimizerError(f"the learning rate of step {step} is {found}; schedule= must give numbers from 0 up")
    return found
