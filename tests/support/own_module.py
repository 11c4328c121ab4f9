"""A small module of one's own on tensors in memory, for tests of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import murmuration
from murmuration import BandedNoise, Clip, Optimizer, OptimizerParams, Privacy, Settings

RECORDS, SEED, RATE = 60, 7, 0.05
WIDE = 1200
"""So many weights give the self-test its draws in two empty steps; of few it takes over a hundred."""
X = torch.randn(RECORDS, 5, generator=torch.Generator().manual_seed(1))
Y = X[:, 0] - 0.5 * X[:, 1]


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(5, WIDE), nn.Tanh(), nn.Linear(WIDE, 1))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return (self.layers(inputs["x"]).squeeze(1) - inputs["y"]).square()


def read(numbers: np.ndarray) -> dict[str, Tensor]:
    return {"x": X[numbers], "y": Y[numbers]}


def synthetic(size: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, 5, generator=draw), "y": torch.randn(size, generator=draw)}


OF_CLIP = {"clip_norm": "norm", "clip": "kind"}
OF_TRAINING = {"synthetic", "example", "records", "optimizer", "schedule", "loss", "start", "units", "ranks"}


def settings_of(folder: Path, **changes: Any) -> tuple[Settings, dict[str, Any]]:
    """Settings with these keys, of whichever section, and the rest, which is the training's own."""
    asked: dict[str, Any] = dict(
        synthetic=synthetic, records=RECORDS, dataset="toy", run_dir=folder, expected_batch=20, steps=6, epsilon=20,
        micro_batch=8, optimizer=Optimizer(type="SGD", params=OptimizerParams(momentum=0.0)), debug_seed=SEED,
        schedule=RATE,
    )  # fmt: skip
    asked |= changes
    rest = {name: asked.pop(name) for name in sorted(OF_TRAINING & asked.keys())}
    whole = {"clip": asked.pop("clip")} if isinstance(asked.get("clip"), Clip) else {}
    clip = {theirs: asked.pop(name) for name, theirs in OF_CLIP.items() if name in asked}
    privacy = {name: asked.pop(name) for name in Privacy.model_fields.keys() & asked.keys()} | whole
    if (bands := asked.pop("bands", None)) is not None:
        privacy["noise"] = BandedNoise(kind="banded", bands=bands)
    given = Privacy(**({"clip": Clip(**clip)} if clip else {}), **privacy)
    return Settings(privacy=given, **asked), rest


def training(folder: Path, model: nn.Module | None = None, reader: Any = read, **changes: Any) -> Any:
    settings, rest = settings_of(folder, **changes)
    return murmuration.PrivateTraining(model or Regression(), reader, settings, **rest)


def run(folder: Path, steps: int, **changes: Any) -> dict[str, Tensor]:
    """So many steps more, saved; the weights."""
    with training(folder, **changes) as found:
        found.prove()
        for step in list(found.steps())[:steps]:
            found.step(step, RATE)
        found.save()
        return {name: tensor.clone() for name, tensor in found.weights().items()}
