"""A small module of one's own on tensors in memory, for tests of the library."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

import murmuration
from murmuration import BandedNoise, Clip, Optimizer, OptimizerParams, Privacy, Settings
from murmuration.train.clip.rule import rounding_allowance

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


def run(folder: Path, count: int, /, **changes: Any) -> dict[str, Tensor]:
    """So many steps more, saved; the weights."""
    with training(folder, **changes) as found:
        found.prove()
        for step in list(found.steps())[:count]:
            found.step(step, RATE)
        found.save()
        return {name: tensor.clone() for name, tensor in found.weights().items()}


def random_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, WIDE), nn.Tanh(), nn.Linear(WIDE, 1))


def squares(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x).squeeze(1) - y).square()


def own(folder: Path, model: Any = random_net, **changes: Any) -> Any:
    """On a TensorDataset of tuples, with keys from the operating system. A given σ need not be calibrated."""
    given: dict[str, Any] = dict(
        reader=TensorDataset(X, Y), records=None, synthetic=None, example=(X[0], Y[0]), loss=squares, debug_seed=None,
        optimizer=partial(optim.SGD, lr=RATE), schedule=None, noise_multiplier=1.0,
    )  # fmt: skip
    return training(folder, model, **(given | changes))


def finished(folder: Path, **changes: Any) -> dict[str, Any]:
    """The certificate of a whole run, which verifies."""
    with own(folder, **changes) as found:
        for _ in found:
            pass
        verdict = found.finish()  # which verifies it from the ledger alone
    assert verdict.certified == verdict.epsilon and verdict.committed == found.plan.steps
    return json.loads((folder / "certificate.json").read_text())


def first_step_by_hand(
    found: Any, rows: int, loss: Callable[[nn.Module, int], Tensor], bad: tuple[int, ...] = ()
) -> int:
    """Makes the first step of a `Regression`, and holds the weights against draw, clipped gradients, noise and SGD by
    their definitions. `loss` is that of one record or unit, `rows` are those of a micro-batch. How many are clipped."""
    found.prove()
    before, plan, model = {name: each.clone() for name, each in found.weights().items()}, found.plan, Regression()
    ids, noise = found.phase.core.sampler().draw(1).ids, found.phase.core.noise("noise")
    # The step's key is gone when it returns.
    draws = [noise.draw(1, index, 0, each.numel(), np.float64) for index, each in enumerate(before.values())]
    found.step(1, RATE)
    model.load_state_dict(before)
    bound, clipped = plan.clip_norm / (1 + rounding_allowance(rows)), 0
    total = [torch.zeros_like(each, dtype=torch.float64) for each in before.values()]
    for number in set(ids.tolist()) - {*bad}:
        gradients = [each.double() for each in torch.autograd.grad(loss(model, number), list(model.parameters()))]
        norm = float(torch.cat([each.flatten() for each in gradients]).norm())
        clipped += norm > bound
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += gradient * min(1.0, bound / norm)
    after = found.weights()
    for (name, start), sum_, draw in zip(before.items(), total, draws, strict=True):
        expected = start.double() - RATE * (sum_ + torch.from_numpy(draw).view(sum_.shape)) / plan.divisor
        assert torch.allclose(after[name].double(), expected, rtol=1e-5, atol=1e-6), name
    return clipped
