"""A small module of one's own on tensors in memory, for tests of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import murmuration
from murmuration.train.config.optimizer import Optimizer, OptimizerParams

RECORDS, SEED, RATE = 60, 7, 0.05
X = torch.randn(RECORDS, 5, generator=torch.Generator().manual_seed(1))
Y = X[:, 0] - 0.5 * X[:, 1]


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return (self.layers(inputs["x"]).squeeze(1) - inputs["y"]).square()


def read(numbers: np.ndarray) -> dict[str, Tensor]:
    return {"x": X[numbers], "y": Y[numbers]}


def synthetic(size: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, 5, generator=draw), "y": torch.randn(size, generator=draw)}


def training(folder: Path, model: nn.Module | None = None, reader: Any = read, **changes: Any) -> Any:
    settings: dict[str, Any] = dict(
        synthetic=synthetic, records=RECORDS, dataset="toy", run_dir=folder, expected_batch=20, steps=6, epsilon=20,
        micro_batch=8, optimizer=Optimizer(type="SGD", params=OptimizerParams(momentum=0.0)), debug_seed=SEED,
    )  # fmt: skip
    return murmuration.PrivateTraining(model or Regression(), reader, **(settings | changes))


def run(folder: Path, steps: int, **changes: Any) -> dict[str, Tensor]:
    """So many steps more, saved; the weights."""
    with training(folder, **changes) as found:
        found.prove()
        for step in list(found.steps())[:steps]:
            found.step(step, RATE)
        found.save()
        return {name: tensor.clone() for name, tensor in found.weights().items()}
