"""The planner's time against a measured step, on one CPU core.

    python benchmarks/plan.py --out benchmarks/results/plan.json

The rate of the core is taken from non-private forward and backward passes of a small model; with it, the planner
forecasts whole private steps (clipping, noise, AdamW) of other models, which are then run. Process time: what else the
machine does costs little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from model.build import build  # noqa: E402
from train.clip_bookkeeping import BookKeepingClip  # noqa: E402
from train.clip_rule import ClipRule  # noqa: E402
from train.config import Config  # noqa: E402
from train.noise import NoiseMechanism  # noqa: E402
from train.optim import make_optimizer  # noqa: E402
from train.planner import counted  # noqa: E402
from train.planner_cluster import Cluster  # noqa: E402
from train.planner_time import step_time  # noqa: E402
from train.probes import synthetic_batch  # noqa: E402
from train.sums import ExactSums  # noqa: E402

MICRO_BATCH, ROWS, ROUNDS = 8, 3, 3
MODELS = {
    "calibration": ("mae", {"width": 192, "depth": 2, "heads": 6}),
    "mae": ("mae", {"width": 256, "depth": 4, "heads": 8, "mae_decoder_width": 128, "mae_decoder_heads": 8}),
    "captioner": ("captioner", {"width": 256, "depth": 4, "heads": 8, "decoder_depth": 2, "vocabulary": 4096}),
}


def config(name: str) -> Config:
    family, sizes = MODELS[name]
    phase = {
        "name": "private", "objective": "mae" if family == "mae" else "caption",
        "data": {"source": "shards", "path": "nowhere", "tokenizer": "clip", "expected_records": 10_000},
        "privacy": {"epsilon": 8.0, "expected_batch": MICRO_BATCH * ROWS, "noise_multiplier": 1.0},
        "schedule": {"peak": 1e-3}, "steps": 10,
    }  # fmt: skip
    model = {"family": family, "image_size": 224, "patch_size": 16, **sizes}
    return Config.model_validate({"train_micro_batch_size_per_gpu": MICRO_BATCH, "model": model, "phases": [phase]})


def timed(act: Callable[[], Any]) -> float:
    act()
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        act()
        found.append(time.process_time() - began)
    return statistics.median(found)


def sustained_tflops() -> float:
    whole = config("calibration")
    model = build(whole.model.resolved(), "mae")
    inputs = synthetic_batch(whole.model.resolved(), "mae", MICRO_BATCH, 0).inputs
    cost, _ = counted(whole, whole.phases[0])
    return cost.step_flops * MICRO_BATCH / timed(lambda: model(inputs).sum().backward()) / 1e12


def private_step(name: str) -> float:
    whole = config(name)
    phase, shape = whole.phases[0], whole.model.resolved()
    model, clip = build(shape, phase.objective), BookKeepingClip(ClipRule("flat", 1.0, 0.0))
    clip.prepare(model)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    sums = ExactSums({n: p.shape for n, p in named.items()}, torch.device("cpu"))
    optimizer = make_optimizer(phase.optimizer, list(model.named_parameters()), 0.0)
    noise = NoiseMechanism(b"n" * 32, 1.0, MICRO_BATCH * ROWS)
    batch = synthetic_batch(shape, phase.objective, MICRO_BATCH, 0)

    def step() -> None:
        sums.clear()
        for _ in range(ROWS):
            clip.add_clipped(model, batch.inputs, batch.present, sums)
        for number, (n, p) in enumerate(named.items()):
            drawn = torch.from_numpy(noise.draw(1, number, 0, p.numel())).view(p.shape)
            p.grad = (sums.totals[n] + drawn).div_(noise.divisor).float()
        optimizer.step()

    return timed(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tflops = sustained_tflops()
    drawing = timed(lambda: NoiseMechanism(b"n" * 32, 1.0, 1.0).draw(0, 0, 0, 1 << 20))
    cluster = Cluster(1, 16, tflops, 1.0, (1 << 20) / drawing)
    rows = []
    for name in ("mae", "captioner"):
        whole = config(name)
        cost, weights = counted(whole, whole.phases[0])
        planned = step_time(cost, weights, cluster, float(MICRO_BATCH * ROWS), MICRO_BATCH, stage=1)
        # One core does everything in turn, so the noise waits for the computation.
        forecast = planned.compute + planned.exchange + planned.noise
        measured = private_step(name)
        rows.append({"model": name, "weights": weights.trainable, "forecast_seconds": forecast,
                     "measured_seconds": measured, "measured_over_forecast": measured / forecast})  # fmt: skip
        print(rows[-1], flush=True)
    found = {
        "command": "python benchmarks/plan.py --out benchmarks/results/plan.json", "sustained_tflops": tflops,
        "micro_batch": MICRO_BATCH, "micro_batches": ROWS, "rounds": ROUNDS, "rows": rows,
    }  # fmt: skip
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
