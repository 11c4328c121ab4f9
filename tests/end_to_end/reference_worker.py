"""Run by several ranks: the reduced clipped sum against brute force, and the trajectory against plain PyTorch.

The brute force below loops over batches of one and takes nothing from train/ but what is under test.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.model.build import Objective, build
from murmuration.model.settings import ModelSettings, Shape
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.optimizer import Optimizer, OptimizerParams, ZeroOptimization
from murmuration.train.core import Computation, clipping_engine
from murmuration.train.distributed.shards import Fragment
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.engines.deepspeed_zero import start_ranks
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.update import NoisyUpdate, PlainUpdate
from tests.support.answering import answer

MICRO_BATCHES, MICRO_BATCH, DIVISOR, RATE = 3, 6, 24.0, 1e-2
# Norms of these losses are of order 1 to 20: C lies among them, so that some records are clipped and some not.
C = 6.0
OPTIMIZER = Optimizer(params=OptimizerParams(weight_decay=0.01))
SHAPE = ModelSettings(
    family="captioner", image_size=32, patch_size=8, width=64, depth=2, heads=4, decoder_depth=2, mae_decoder_width=32,
    mae_decoder_depth=1, mae_decoder_heads=4, text_length=12, vocabulary=64, qkv_bias=True,
).resolved()  # fmt: skip


DROPPING = replace(SHAPE, dropout=0.2, drop_path=0.4)
MODELS: dict[str, tuple[Shape, Objective]] = {
    "mae": (SHAPE, "mae"), "caption": (SHAPE, "caption"), "dropping": (DROPPING, "caption"),
}  # fmt: skip


def records(objective: str, step: int, count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 + step)
    inputs = {"images": torch.randn(count, 3, 32, 32, generator=draw)}
    if objective == "mae":
        inputs["mask_noise"] = torch.rand(count, SHAPE.patches, generator=draw)
    else:
        inputs["tokens"] = torch.randint(1, 64, (count, 12), generator=draw)
    present = torch.rand(count, generator=draw) > 0.2
    if objective == "dropping":
        inputs["drop_key"] = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=draw)
    inputs["images"][3] *= 1e3
    inputs["images"][4, 0, 0, 0] = float("nan")
    present[3:5] = True
    return inputs, present


def brute_force(model: nn.Module, inputs: dict[str, torch.Tensor], present: torch.Tensor, kind: str):
    """Sum of clipped gradients in fp64, one record at a time."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in zip(names, parameters, strict=True)}
    clipped = 0
    for row in range(len(present)):
        if not present[row]:
            continue
        loss = model({name: tensor[row : row + 1] for name, tensor in inputs.items()}).sum()
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in gradients))
        if not torch.isfinite(norm) or not torch.isfinite(loss):
            continue
        factor = min(1.0, C / float(norm)) if kind == "flat" else C / (float(norm) + 0.01)
        clipped += factor < 1
        for name, gradient in zip(names, gradients, strict=True):
            total[name] += factor * gradient.double()
    return total, clipped


class Captured(PlainUpdate):
    """Keeps the reduced sum as the optimizer's hook sees it."""

    def __init__(self) -> None:
        super().__init__(batch=1)
        self.pieces: list[tuple[Fragment, torch.Tensor]] = []

    def finish(self, flat, fragments) -> None:
        super().finish(flat, fragments)
        self.pieces += [(fragment, fragment.of(flat).clone()) for fragment in fragments]


def main() -> None:
    ranks = start_ranks()
    noise = AESNoise(b"n" * 32, 0.5, DIVISOR)
    results = []
    for objective, built in MODELS.items():
        for stage in (0, 1, 2) if objective == "caption" else (1,):
            for kind in ("flat", "automatic") if (objective, stage) == ("caption", 1) else ("flat",):
                reference, model = build(*built), build(*built)
                rule = ClipRule(kind, C, 0.0, 0.01)
                settings = EngineSettings("deepspeed", MICRO_BATCH, ZeroOptimization(stage=stage))
                engine = clipping_engine(model, rule, OPTIMIZER, settings, ranks, Computation("reference")).engine
                initial = [p.detach().double().clone() for _, p in trainable(reference)]
                textbook = torch.optim.AdamW([p for _, p in trainable(reference)], lr=RATE, weight_decay=0.01)
                error, clipped = first_step(engine, reference, objective, kind, ranks)
                engine.set_optimizer_step(0)
                for step in (1, 2):
                    inputs, present = accumulate(engine, objective, step, ranks)
                    engine.update(NoisyUpdate(noise, step), RATE)
                    total, _ = brute_force(reference, inputs, present, kind)
                    for index, (name, p) in enumerate(trainable(reference)):
                        drawn = torch.from_numpy(noise.draw(step, index, 0, p.numel())).view_as(p)
                        p.grad = ((total[name] + drawn.double()) / DIVISOR).float()
                    textbook.step()
                drift, moved = 0.0, 0.0
                whole = engine.whole_weights()
                for (name, q), start in zip(trainable(reference), initial, strict=True):
                    drift += float((whole[name].detach().double() - q.detach().double()).square().sum())
                    moved += float((q.detach().double() - start).square().sum())
                drift = (drift / moved) ** 0.5
                results.append(
                    {"objective": objective, "stage": stage, "clip": kind, "sum_error": error, "drift": drift,
                     "clipped": clipped, "world": ranks.world}
                )  # fmt: skip
                engine.close()
    answer(ranks, results)


def trainable(model: nn.Module):
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def accumulate(engine, objective: str, step: int, ranks):
    """Three micro-batches on each rank, of the same records that the brute force loops over."""
    inputs, present = records(objective, step, MICRO_BATCHES * MICRO_BATCH * ranks.world)
    for number in range(MICRO_BATCHES):
        start = (ranks.rank * MICRO_BATCHES + number) * MICRO_BATCH
        rows = slice(start, start + MICRO_BATCH)
        engine.accumulate(MicroBatch({name: t[rows] for name, t in inputs.items()}, present[rows]))
    return inputs, present


def first_step(engine, reference: nn.Module, objective: str, kind: str, ranks) -> tuple[float, int]:
    inputs, present = accumulate(engine, objective, 0, ranks)
    captured = Captured()
    engine.update(captured, 0.0)
    total, clipped = brute_force(reference, inputs, present, kind)
    pieces = [(f.name, f.start, f.length, values.double()) for f, values in captured.pieces]
    squares, whole = 0.0, sum(float((t**2).sum()) for t in total.values())
    seen = 0
    every = ranks.gather(pieces)
    distinct = every[:1] if engine._zero.stage == 0 else every  # replicas at stage 0
    for name, start, length, values in (piece for pieces in distinct for piece in pieces):
        squares += float(((values - total[name].reshape(-1)[start : start + length]) ** 2).sum())
        seen += length
    assert seen == sum(t.numel() for t in total.values()), "some elements were seen twice or never"
    return (squares / whole) ** 0.5, clipped


if __name__ == "__main__":
    main()
