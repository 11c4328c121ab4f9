"""How all weights of an encoder are fine-tuned, as published for masked autoencoders: rates, layer decay, groups.

AdamW; each layer's rate is a fixed part of that of the layer above it, so that early layers move least; linear warm-up,
then a half cosine to a small rest. Biases, norms and tokens do not decay.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import nn

BASE_BATCH = 256
LEAST_RATE = 1e-6
HEAD_STD = 2e-5


@dataclass(frozen=True)
class TrainingSettings:
    """What all trainings of whole encoders share."""

    epochs: int = 100
    warmup: int = 5
    """Epochs."""
    batch: int = 1024
    base_rate: float = 5e-4
    """For a batch of 256."""
    layer_decay: float = 0.65
    weight_decay: float = 0.05
    seed: int = 0

    @classmethod
    def of(cls, arguments: Namespace) -> Self:
        return cls(**{name: getattr(arguments, name) for name in cls.__dataclass_fields__})

    def rate(self, epoch: float, batch: int) -> float:
        """The rate of the uppermost layer, at a moment counted in epochs."""
        peak = self.base_rate * batch / BASE_BATCH
        if epoch < self.warmup:
            return peak * epoch / self.warmup
        part = (epoch - self.warmup) / max(1, self.epochs - self.warmup)
        return LEAST_RATE + (peak - LEAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * part))

    def order(self, records: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(records)


@dataclass(frozen=True)
class FineTuneSettings(TrainingSettings):
    """The defaults are ViP's; a set smaller than a batch is one batch, with the rate for its size."""

    drop_path: float = 0.1
    mixup: float = 0.8
    cutmix: float = 1.0
    erase: float = 0.25
    smoothing: float = 0.1
    rand_augment: str = "rand-m9-mstd0.5-inc1"

    def batch_of(self, records: int) -> int:
        """Even, because mixing pairs each picture with another one."""
        return max(2, min(self.batch, records) // 2 * 2)


def layer_of(name: str, depth: int) -> int:
    """0 for what comes before the first block, then the blocks, then what follows the last one."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return 0 if name.startswith(("cls_token", "pos_embed", "patch_embed.")) else depth + 1


def groups_of(model: nn.Module, depth: int, settings: TrainingSettings) -> list[dict[str, Any]]:
    """Parameter groups with the part `scale` of the rate and their decay."""
    found: dict[tuple[int, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            still = parameter.dim() == 1 or name in ("cls_token", "pos_embed")
            key = layer_of(name, depth), 0.0 if still else settings.weight_decay
            found.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "scale": settings.layer_decay ** (depth + 1 - layer), "weight_decay": decay}
        for (layer, decay), parameters in sorted(found.items(), key=lambda each: each[0])
    ]
