"""Every engine on one small model: its draws, its rows, and a textbook in one process that knows nothing of shards."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import Poisson, threshold_for
from murmuration.data.draw.micro_batch import ROW_SHARE, MicroBatch, slots
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.model.build import build
from murmuration.model.settings import ModelSettings
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import Precision
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import ExactSums
from murmuration.train.config.optimizer import Offload, Optimizer, ZeroOptimization
from murmuration.train.core import ClippingEngine, Computation, clipping_engine
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.noise.aes import AESNoise

RECORDS, MICRO_BATCH, C, STEPS = 48, 4, 3.0, (1, 2, 3)
UNITS, MOST_ROWS = 11, 9
EMPTY_STEP = 2
HOSTILE = 11
"""A record of the first step, whose picture is not finite: it adds exactly nothing."""
LONG = 402  # as many for each of 1, 2 or 3 ranks, which a stage needs that gathers weights
NOISE_KEY = b"n" * 32
RULE = ClipRule("flat", C, 0.0)
Layout = Literal[0, 1, 2, 3, "fsdp2", "hsdp"]
LAYOUTS: tuple[Layout, ...] = (0, 1, 2, 3, "fsdp2")
RANKS_PER_COPY = 2  # of "hsdp", which needs as many ranks at least
# fp32 rounds to nearest: by at most so much of a number, on any processor.
UNIT_ROUNDOFF = 2.0**-24
# How often at most an optimizer rounds, in each step, the weights themselves (decayed, then moved) and what moves them
# (gradient, moments with their constants, root, quotients, trust ratio; some are carried from step to step).
ROUNDINGS_OF_WEIGHTS, ROUNDINGS_OF_MOVES = 4, 32
# Of a size at which three steps move the weights by far more than fp32 rounds them.
RATES = {"AdamW": 1e-2, "SGD": 0.3, "LAMB": 1e-2, "LARS": 1.0}
SHAPE = ModelSettings(
    family="captioner", image_size=16, patch_size=8, width=24, depth=1, heads=2, decoder_width=16, decoder_depth=1,
    decoder_heads=2, mae_decoder_width=8, mae_decoder_depth=1, mae_decoder_heads=2, text_length=6, vocabulary=19,
    qkv_bias=True,
).resolved()  # fmt: skip
PLAN = PrivacyPlan(
    records=RECORDS, sampling=Poisson(threshold_for(RECORDS, 17.0)), clip_norm=C, noise_multiplier=0.4, steps=9,
    delta=1e-3, epsilon_budget=1e6,
)  # fmt: skip
OPTIMIZERS = {
    "AdamW": Optimizer.model_validate({"params": {"weight_decay": 0.1}}),
    "SGD": Optimizer.model_validate({"type": "SGD", "params": {"weight_decay": 0.1}}),
    "LAMB": Optimizer.model_validate({"type": "LAMB", "params": {"weight_decay": 0.1}}),
    "LARS": Optimizer.model_validate({"type": "LARS", "params": {"weight_decay": 0.1}}),
}


def drawn(step: int):
    ids = PoissonSampler(b"s" * 32, b"d" * 32, PLAN.records, threshold_for(RECORDS, 17.0)).draw(step).ids
    return ids[:0] if step == EMPTY_STEP else ids


def rows_of(ids) -> MicroBatch:
    """Records by id, the same for whoever asks; -1 is padding, filled with what must not matter."""
    inputs: dict[str, list[Tensor]] = {"images": [], "tokens": []}
    for record in ids:
        draw = torch.Generator().manual_seed(int(record) + 77)
        inputs["images"].append(torch.randn(3, 16, 16, generator=draw) * (1 + record % 5))
        inputs["tokens"].append(torch.randint(1, 19, (6,), generator=draw))
        if record < 0 or record == HOSTILE:
            inputs["images"][-1].fill_(float("nan"))
    return MicroBatch({name: torch.stack(rows) for name, rows in inputs.items()}, torch.from_numpy(ids >= 0))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def noise(times: float = 1.0, more: float = 0.0) -> AESNoise:
    """The plan's; faults are planted by another standard deviation or divisor."""
    planned = AESNoise.of(NOISE_KEY, PLAN)
    return AESNoise(NOISE_KEY, planned.std * times, planned.divisor + more)


def brute_force(model: nn.Module, ids) -> dict[str, Tensor]:
    named = trainable(model)
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
    for record in ids:
        loss = model(rows_of(ids[ids == record]).inputs).sum()
        gradients = torch.autograd.grad(loss, list(named.values()))
        norm = float(torch.sqrt(sum((g.double() ** 2).sum() for g in gradients)))
        for name, gradient in zip(named, gradients, strict=True) if math.isfinite(norm) else ():
            total[name] += min(1.0, C / norm) * gradient.double()
    return total


def units_of(ids, sizes: list[int]) -> MicroBatch:
    """Units by number: the rows of unit u are those of the records 100·u, 100·u + 1 …, as many as its size says."""
    inputs: dict[str, list[Tensor]] = {"images": [], "tokens": [], ROW_SHARE: []}
    for unit in ids.tolist():
        size = sizes[unit] if unit >= 0 else 0
        own = rows_of(np.arange(MOST_ROWS) + 100 * max(unit, 0)).inputs
        for name, rows in own.items():
            inputs[name].append(
                torch.where((torch.arange(MOST_ROWS) < size).view(-1, *[1] * (rows.dim() - 1)), rows, 0)
            )
        inputs[ROW_SHARE].append((torch.arange(MOST_ROWS) < size).float() / max(1, size))
    return MicroBatch({name: torch.cat(rows) for name, rows in inputs.items()}, torch.from_numpy(ids >= 0))


def sum_of_units(model: nn.Module, sizes: list[int], precision: Precision, world: int) -> dict[str, Tensor]:
    named = trainable(model)
    if precision != "fp32":
        clip = BookKeepingClip(RULE, precision)
        clip.prepare(model)
        sums = ExactSums({name: p.shape for name, p in named.items()}, torch.device("cpu"))
        for row in (row for rank in range(world) for row in slots(np.arange(UNITS), rank, world, MICRO_BATCH)):
            batch = units_of(row, sizes)
            clip.add_clipped(model, batch.inputs, batch.present, sums)
        return sums.totals
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
    for unit, size in enumerate(sizes):
        mean = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
        for row in range(size):
            loss = model(rows_of(np.array([100 * unit + row])).inputs).sum()
            for name, gradient in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
                mean[name] += gradient.double() / size
        factor = min(1.0, C / length(mean))
        for name in total:
            total[name] += factor * mean[name]
    return total


def in_one_process(model: nn.Module, clip: BookKeepingClip, ids, world: int) -> dict[str, Tensor]:
    """For bf16, whose rounding belongs to the clip engine: its own sums of the same micro-batches, all in here."""
    sums = ExactSums({name: p.shape for name, p in trainable(model).items()}, torch.device("cpu"))
    for row in (row for rank in range(world) for row in slots(ids, rank, world, MICRO_BATCH)):
        batch = rows_of(row)
        clip.add_clipped(model, batch.inputs, batch.present, sums)
    return sums.totals


class Textbook:
    """Whole tensors, fp64 weights and moments, formulas as printed in the papers."""

    def __init__(self, kind: str, parameters: dict[str, nn.Parameter]) -> None:
        self.kind, self.count = kind, 0
        self.initial = {name: p.detach().double() for name, p in parameters.items()}
        self.weights = {name: w.clone() for name, w in self.initial.items()}
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.rounding = 0.0
        """How far fp32 may have led an optimizer away by now."""

    def step(self, gradients: dict[str, Tensor]) -> None:
        self.count += 1
        before = {name: weight.clone() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            weight.sub_(RATES[self.kind] * self._direction(name, weight, gradients[name]))
        moves = ROUNDINGS_OF_MOVES * distance(self.weights, before)
        self.rounding += UNIT_ROUNDOFF * (ROUNDINGS_OF_WEIGHTS * length(before) + moves)

    def _direction(self, name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        decay = 0.1 * weight
        if self.kind in ("SGD", "LARS"):
            rise = gradient + decay
            if self.kind == "LARS":
                rise = rise * _ratio(0.001 * weight.norm(), gradient.norm() + 0.1 * weight.norm())
            self.first[name] = 0.9 * self.first[name] + rise
            return self.first[name]
        self.first[name] = 0.9 * self.first[name] + 0.1 * gradient
        self.second[name] = 0.999 * self.second[name] + 0.001 * gradient**2
        first, second = self.first[name] / (1 - 0.9**self.count), self.second[name] / (1 - 0.999**self.count)
        adam = first / (second.sqrt() + 1e-8) + decay
        return adam * _ratio(weight.norm(), adam.norm()) if self.kind == "LAMB" else adam


def _ratio(weight: Tensor, update: Tensor) -> Tensor:
    return weight / update if float(weight) > 0 and float(update) > 0 else torch.ones_like(weight)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name] - other[name]).square().sum()) for name in other) ** 0.5


def length(tensors: dict[str, Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in tensors.values()) ** 0.5


class Teacher:
    """The textbook beside one engine: its gradients are taken at the engine's weights, its steps are its own."""

    def __init__(self, kind: str, precision: Precision, world: int) -> None:
        self.model, self.precision, self.world = build(SHAPE, "caption"), precision, world
        self.clip = BookKeepingClip(RULE, precision)
        self.clip.prepare(self.model)
        self.textbook = Textbook(kind, trainable(self.model))

    def step(self, step: int, weights: dict[str, Tensor]) -> None:
        named, ids = trainable(self.model), drawn(step)
        for name, p in named.items():
            p.data.copy_(weights[name])
        if self.precision == "fp32":
            total = brute_force(self.model, ids)
        else:
            total = in_one_process(self.model, self.clip, ids, self.world)
        gradients = {}
        for number, (name, p) in enumerate(named.items()):
            random = torch.from_numpy(noise().draw(step, number, 0, p.numel())).double().view(p.shape)
            gradients[name] = (total[name].double() + random) / PLAN.divisor
        self.textbook.step(gradients)

    def compare(self, weights: dict[str, Tensor]) -> dict[str, float]:
        """The distance from the textbook's weights, and how far fp32 may lead, over the distance that they moved."""
        book = self.textbook
        moved = distance(book.weights, book.initial)
        return {"drift": distance(weights, book.weights) / moved, "bound": book.rounding / moved}


def settings_of(layout: Layout, offload: Literal["torch", "deepspeed"] | None = None) -> EngineSettings:
    if layout in ("fsdp2", "hsdp"):
        return EngineSettings("fsdp2", MICRO_BATCH, shard_over=RANKS_PER_COPY if layout == "hsdp" else None)
    zero = ZeroOptimization(
        stage=layout, stage3_param_persistence_threshold=0 if layout == 3 else None,
        offload_optimizer=Offload(adam=offload) if offload is not None else None,
    )  # fmt: skip
    return EngineSettings("deepspeed", MICRO_BATCH, zero)


def engine_of(
    ranks: Ranks, engine: EngineSettings, model: nn.Module, optimizer: Optimizer, rule: ClipRule = RULE,
    precision: Precision = "fp32", compile: Literal["off", "blocks"] = "off",
) -> ClippingEngine:  # fmt: skip
    computation = Computation(precision=precision, compile=compile)
    return clipping_engine(model, rule, optimizer, engine, ranks, computation)
