"""What a clipped micro-batch costs a processor by its size: the measurement behind `train/planner/rows.py`.

    OMP_NUM_THREADS=1 python benchmarks/micro_batch.py

Sizes take turns; the line through their least seconds of the processor gives what a micro-batch costs whatever its size
and what a record adds. The rule for "auto" takes the former to be that of 2 MiB of activations and a quarter of the
weights' bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from against_opacus import network, of_opacus_example

from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import ExactSums, trainable_shapes
from murmuration.train.core import Computation, kept_of_record
from murmuration.train.distributed.process import reuse_freed_memory
from murmuration.train.planner.rows import FIXED, OF_WEIGHTS
from murmuration.train.self_test.probes import SyntheticRecords

SIZES, TURNS, RULE = (16, 32, 64, 128, 256), 7, ClipRule("flat", 1.0, 0.0)


class Losses(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.inner(inputs["x"]), inputs["y"], reduction="none")


class Tokens(nn.Module):
    """A transformer on patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 192, 4, 4)
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(192, 3, 768, 0.0, batch_first=True) for _ in range(4)))
        self.head = nn.Linear(192, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, 1, 1), nn.GroupNorm(8, after), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear, 768 features": (lambda: nn.Linear(768, 10), (768,)),
    "digits of 8 × 8": (network, (1, 8, 8)),
    "Opacus' MNIST example": (of_opacus_example, (1, 28, 28)),
    "convolutions, 32 × 32": (convolutions, (3, 32, 32)),
    "transformer, 49 tokens": (Tokens, (1, 28, 28)),
}


def main() -> None:
    torch.set_num_threads(1)
    reuse_freed_memory()
    print("| model | weights | KiB of a record | fixed ms | ms of a record | fixed, in records | by the rule |")
    print("|---|---|---|---|---|---|---|")
    for name, (make, shape) in MODELS.items():
        torch.manual_seed(0)
        model = Losses(make())
        like = SyntheticRecords.like({"x": torch.zeros(1, *shape), "y": torch.arange(10)})
        record = kept_of_record(model, RULE, Computation(), like)
        clip, sums = BookKeepingClip(RULE), ExactSums(trainable_shapes(model), torch.device("cpu"))
        clip.prepare(model)
        batches = {size: like.batch(size, seed=0) for size in SIZES}
        least = dict.fromkeys(SIZES, float("inf"))
        for _ in range(TURNS):
            for size, batch in batches.items():
                begun = time.process_time()
                clip.add_clipped(model, batch.inputs, batch.present, sums)
                least[size] = min(least[size], time.process_time() - begun)
        each, fixed = np.polyfit(SIZES, [1e3 * seconds for seconds in least.values()], 1)
        weights = sum(shape.numel() for shape in trainable_shapes(model).values())
        rule = (FIXED + OF_WEIGHTS * 4 * weights) / record
        numbers = f"{weights:,} | {record / 1024:.0f} | {fixed:.1f} | {each:.3f} | {fixed / each:.1f} | {rule:.1f}"
        print(f"| {name} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
