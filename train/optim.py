"""Optimizers on the flat shards, and learning rates as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from train.config import Optimizer, Schedule


def make_optimizer(settings: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    trainable = [p for p in parameters if p.requires_grad]
    params = settings.params
    return torch.optim.AdamW(
        trainable, lr=0.0, betas=params.betas, eps=params.eps, weight_decay=params.weight_decay, foreach=True
    )


def learning_rate(schedule: Schedule, steps: int, step: int) -> float:
    """Of the given step, counted from 1: linear warm-up that already moves, then the shape down to its end."""
    end = schedule.end or steps
    warmup = min(1.0, step / schedule.warmup) if schedule.warmup else 1.0
    done = min(1.0, max(0, step - 1 - schedule.warmup) / max(1, end - schedule.warmup))
    shape = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[schedule.shape]
    return schedule.peak * warmup * shape
