"""The coordinate check under noise: how far a few private steps move what a vision transformer computes, at several
widths, told apart by the tensors that moved and by what moved them, signal or noise.

A step's clipped sum and its noise reach the optimizer together. Here they are also kept apart, and both are followed
through the optimizer's moments with the denominators of the real step, so that the two parts of a weight's movement add
up to the movement itself; a step where they do not is an error. Then one part of one class of tensors is taken back
from the trained weights, and what that changes in features and logits of other pictures is measured.
"""

from __future__ import annotations

import io
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from murmuration.accounting.plan import PrivacyPlan, threshold_for  # noqa: E402
from murmuration.data.draw.micro_batch import MicroBatch  # noqa: E402
from murmuration.data.synthetic.index import SyntheticIndex  # noqa: E402
from murmuration.data.synthetic.shapes import class_names  # noqa: E402
from murmuration.model.build import build  # noqa: E402
from murmuration.model.classifier import TransformerClassifier  # noqa: E402
from murmuration.model.settings import ModelSettings  # noqa: E402
from murmuration.train.clip.rule import ClipRule  # noqa: E402
from murmuration.train.config.optimizer import Optimizer  # noqa: E402
from murmuration.train.distributed.shards import Fragment  # noqa: E402
from murmuration.train.engines.base import Engine  # noqa: E402
from murmuration.train.engines.choose import EngineSettings  # noqa: E402
from murmuration.train.engines.local import start_ranks  # noqa: E402
from murmuration.train.noise.aes import AESNoise  # noqa: E402
from murmuration.train.noise.update import NoisyUpdate, Update  # noqa: E402
from murmuration.train.private import Computation, clipping_engine  # noqa: E402

SIDE, PATCH, HEAD_WIDTH, BASE = 32, 16, 16, 64
PARTS = ("signal", "noise")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Check:
    """σC/B is so large that noise fills the second moment, as in most private steps on few records."""

    rate: float = 3e-3
    batch: int = 8
    sigma: float = 1.0
    still: int = 6
    """Steps at rate 0 that come first: a second moment of one draw would divide by numbers near 0."""
    steps: int = 3
    looked_at: int = 32


def class_of(name: str) -> str:
    if name in ("cls_token", "pos_embed") or name.endswith(".bias") or "norm" in name:
        return "vectors"
    return {"patch_embed.proj.weight": "input", "head.weight": "output"}.get(name, "hidden")


def model_of(width: int, seed: int = 0, depth: int = 2, head_scale: float = 0.0) -> TransformerClassifier:
    """Heads grow in number, and each stays as wide as it is."""
    settings = ModelSettings(
        family="classifier", size="custom", image_size=SIDE, patch_size=PATCH, width=width, depth=depth,
        heads=width // HEAD_WIDTH, classes=len(class_names()), init_seed=seed, head_scale=head_scale,
    )  # fmt: skip
    model = build(settings, "classify")
    assert isinstance(model, TransformerClassifier)
    return model


@lru_cache(maxsize=4)
def pictures(seed: int, count: int) -> tuple[Tensor, Tensor]:
    index = SyntheticIndex("shapes", count, seed, SIDE)
    read = [index.read(record) for record in range(count)]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(members["bmp"]))) for members in read])
    labels = torch.tensor([json.loads(members["json"])["label"] for members in read])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(127.5).sub(1.0), labels


class Parted:
    """Passes a sum through the real update, and keeps signal and noise of the mean gradient by parameter."""

    def __init__(self, inner: Update, divisor: float) -> None:
        self.inner, self.divisor = inner, divisor
        self.parts: dict[str, Weights] = {part: {} for part in PARTS}

    @property
    def elements(self) -> int:
        return self.inner.elements

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        sums = {each.name: each.of(flat).float() for each in fragments}
        self.inner.finish(flat, fragments)
        for each in fragments:
            signal = sums[each.name] / self.divisor
            self.parts["signal"][each.name] = signal
            self.parts["noise"][each.name] = each.of(flat).float() - signal


@dataclass
class Follower:
    """The movement of each weight so far, in its parts."""

    optimizer: Optimizer
    moved: dict[str, Weights] = field(default_factory=lambda: {part: {} for part in PARTS})
    _first: dict[str, Weights] = field(default_factory=lambda: {part: {} for part in PARTS})

    def step(self, engine: Engine, parts: dict[str, Weights], before: Weights, after: Weights) -> None:
        state = {shard.fragments[0].name: shard.state for shard in engine.shards()}
        number = engine.optimizer_step()
        for name, start in before.items():
            directions = [self._direction(part, name, parts[part][name], state[name], number) for part in PARTS]
            whole, change = directions[0] + directions[1], (after[name] - start).flatten()
            scale = float(whole @ change) / float(whole @ whole)  # the rate, with all its factors
            if float((change - scale * whole).norm()) > 1e-3 * float(change.norm()):
                raise RuntimeError(f"{name} moved otherwise than by its two parts")
            for part, direction in zip(PARTS, directions, strict=True):
                self.moved[part][name] = self.moved[part].get(name, torch.zeros_like(whole)) + scale * direction

    def _direction(self, part: str, name: str, gradient: Tensor, state: Weights, number: int) -> Tensor:
        params, first = self.optimizer.params, self._first[part]
        if self.optimizer.type == "SGD":
            first[name] = params.momentum * first.get(name, torch.zeros_like(gradient)) + gradient
            return first[name]
        one, two = params.betas
        first[name] = one * first.get(name, torch.zeros_like(gradient)) + (1 - one) * gradient
        second = state["exp_avg_sq"].flatten() / (1 - two**number)
        return first[name] / (second.sqrt() + params.eps)


def trained(width: int, optimizer: Optimizer, check: Check, seed: int) -> tuple[TransformerClassifier, Follower]:
    """A few real private steps, under a key that is no secret: the pictures are made by rule."""
    model = model_of(width, seed, head_scale=1.0 if optimizer.type == "LAMB" else 0.0)
    plan = PrivacyPlan(
        records=10 * check.batch, threshold=threshold_for(10 * check.batch, check.batch), clip_norm=1.0,
        noise_multiplier=check.sigma, steps=check.still + check.steps, delta=1e-3, epsilon_budget=8.0,
    )  # fmt: skip
    rule, noise = ClipRule.of(plan, "flat", 0.01, check.batch), AESNoise.of(bytes([seed]) * 32, plan)
    engine = clipping_engine(
        model, rule, optimizer, plan.noise_std / plan.divisor, EngineSettings(micro_batch=check.batch), start_ranks(),
        Computation(),
    ).engine  # fmt: skip
    images, labels = pictures(1 + seed, check.batch * plan.steps)
    follower = Follower(optimizer)
    for step in range(1, plan.steps + 1):
        own = slice((step - 1) * check.batch, step * check.batch)
        inputs = {"images": images[own], "labels": labels[own]}
        engine.accumulate(MicroBatch(inputs, torch.ones(check.batch, dtype=torch.bool)), rule)
        update = Parted(NoisyUpdate(noise, step), plan.divisor)
        before = weights_of(model)
        engine.update(update, check.rate if step > check.still else 0.0)
        follower.step(engine, update.parts, before, weights_of(model))
    return model, follower


def weights_of(model: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def changes(width: int, optimizer: Optimizer, check: Check, seed: int) -> dict[str, float]:
    """Root mean square over coordinates and pictures of what each part changed: `hidden noise features`, and so on."""
    torch.set_num_threads(1)
    with torch.enable_grad():
        model, follower = trained(width, optimizer, check, seed)
    images, _ = pictures(0, check.looked_at)
    features = model.features(images)
    logits, found = model.head(features), dict[str, float]()
    for kind in ("input", "hidden", "output", "vectors"):
        for part in PARTS:
            without = dict(weights_of(model))
            for name in (name for name in without if class_of(name) == kind):
                moved = follower.moved[part][name].view_as(without[name])
                without[name] = without[name] - moved
            for what, now in (("features", features), ("logits", logits)):
                then = torch.func.functional_call(
                    _Seen(model, what), {f"model.{n}": w for n, w in without.items()}, images
                )
                if kind != "output" or what == "logits":
                    found[f"{kind} {part} {what}"] = float((now - then).square().mean().sqrt())
    return found


class _Seen(nn.Module):
    def __init__(self, model: TransformerClassifier, what: str) -> None:
        super().__init__()
        self.model, self.what = model, what

    def forward(self, images: Tensor) -> Tensor:
        return self.model.features(images) if self.what == "features" else self.model.logits(images)


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """The power of the width with which a change grows."""
    return statistics.linear_regression([math.log(w) for w in widths], [math.log(v) for v in values]).slope


def summary(widths: Sequence[int], told: Sequence[Sequence[dict[str, float]]]) -> dict[str, Any]:
    """By what changed: the mean over seeds at each width, and its slope; `told` by width and seed."""
    means = {name: [statistics.mean(row[name] for row in rows) for rows in told] for name in told[0][0]}
    return {name: {"changes": values, "slope": slope(widths, values)} for name, values in means.items()}
