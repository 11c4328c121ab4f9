"""Utility parity: one model, one data set, the same q, σ, C and learning rate, trained by Opacus and by this trainer.

    python benchmarks/utility.py --seeds 4 --out benchmarks/results/utility.json

Opacus runs as its users run it: GradSampleModule, DPOptimizer around torch's AdamW, its own Poisson sampler and its own
noise, each with its own seed. This trainer runs through `launch/train.py`, with keys from the operating system. A seed
also sets the initial weights. Both then get the same zero-shot questions about the same held-out pictures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

RECORDS, HELD_OUT, BATCH, STEPS, SIGMA, CLIP, PEAK, WARMUP = 3000, 400, 300.0, 60, 0.6, 0.1, 4e-3, 8
AXES = {
    "colour": ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"],
    "shape": ["circle", "square", "triangle", "star"],
}
BETAS, DECAY = (0.9, 0.95), 0.005


def config(data: Path, run_dir: Path, seed: int, steps: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 64,
        "zero_optimization": {"stage": 1},
        "model": {
            "family": "captioner", "size": "custom", "image_size": 32, "patch_size": 8, "width": 64, "depth": 2,
            "heads": 4, "decoder_width": 64, "decoder_depth": 1, "decoder_heads": 4, "text_length": 16,
            "vocabulary": 64, "qkv_bias": True, "init_seed": seed,
        },
        "phases": [{
            "name": "private", "objective": "caption",
            "data": {"source": "shards", "path": str(data / "private"), "tokenizer": str(data / "tokenizer.json")},
            "privacy": {
                "epsilon": 1000.0, "expected_batch": BATCH, "clip": {"kind": "flat", "norm": CLIP},
                "noise_multiplier": SIGMA,
            },
            "optimizer": {"type": "AdamW", "params": {"betas": list(BETAS), "weight_decay": DECAY}},
            "schedule": {"peak": PEAK, "warmup": WARMUP, "shape": "constant"},
            "steps": steps,
            "evaluation": {
                "public": True,
                "path": str(data / "held_out"), "records": HELD_OUT,
                "zero_shot": {"prompt": "a photo of a", "axes": AXES},
            },
        }],
        "run": {"checkpoint_every": steps, "log_every": steps, "dir": str(run_dir)},
    }  # fmt: skip


def prepare(folder: Path) -> None:
    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), "demo", "--out", str(folder)]
    counts = ["--private", str(RECORDS), "--held-out", str(HELD_OUT), "--textures", "1"]
    subprocess.run([*command, *counts], check=True, capture_output=True)


def by_this_trainer(data: Path, folder: Path, seed: int, steps: int) -> dict[str, float]:
    path, run_dir = folder / f"ours-{seed}.json", folder / f"ours-{seed}"
    path.write_text(json.dumps(config(data, run_dir, seed, steps)))
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(path)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"training failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    found: dict[str, float] = {}
    for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines():
        found |= {k: v for k, v in json.loads(line).items() if k.startswith(("public_loss", "zero_shot_", "epsilon"))}
    return found


def by_opacus(data: Path, folder: Path, seed: int, steps: int) -> dict[str, float]:
    """The whole Poisson batch at once: no virtual steps, so that only Opacus's own code matters."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    from murmuration.model.build import build
    from murmuration.train.config.root import Config
    from murmuration.train.optim.rates import learning_rate

    settings = Config.model_validate(config(data, folder, seed, steps))
    shape, phase = settings.model.resolved(), settings.phases[0]
    model = build(shape, "caption")
    assert phase.data.tokenizer is not None
    inputs = read(data / "private", RECORDS, phase.data.tokenizer, shape.text_length, shape.image_size)
    hooked = GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.AdamW(
            [p for p in hooked.parameters() if p.requires_grad], lr=PEAK, betas=BETAS, weight_decay=DECAY
        ),
        noise_multiplier=SIGMA, max_grad_norm=CLIP, expected_batch_size=round(BATCH), loss_reduction="mean",
        generator=torch.Generator().manual_seed(1000 + seed),
    )  # fmt: skip
    sampler = UniformWithReplacementSampler(
        num_samples=RECORDS, sample_rate=BATCH / RECORDS, steps=steps,
        generator=torch.Generator().manual_seed(2000 + seed),
    )  # fmt: skip
    for step, ids in enumerate(sampler, start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phase.schedule, steps, step)
        optimizer.zero_grad()
        hooked({name: tensor[ids] for name, tensor in inputs.items()}).sum().backward()
        optimizer.step()
    hooked.remove_hooks()
    return judged(model, data, phase.data.tokenizer, shape.text_length, shape.image_size)


def read(folder: Path, count: int, tokenizer: str, length: int, side: int, labels: tuple[str, ...] = ()) -> Any:
    from murmuration.data.batch.reader import BatchReader, DataSpec
    from murmuration.data.index.shard_index import ShardIndex
    from murmuration.data.text.encoder import TextEncoder

    reader = BatchReader(
        ShardIndex.open(folder), DataSpec(image_size=side, augment="center", labels=labels),
        TextEncoder(tokenizer, length),
    )  # fmt: skip
    batch = reader.read(np.arange(count), 0)
    assert bool(batch.present.all())
    return batch.inputs


@torch.no_grad()
def judged(model: Any, data: Path, tokenizer: str, length: int, side: int) -> dict[str, float]:
    from murmuration.data.text.encoder import TextEncoder
    from murmuration.train.measures.zero_shot import zero_shot

    inputs = read(data / "held_out", HELD_OUT, tokenizer, length, side, tuple(AXES))
    truth = {axis: inputs.pop(axis) for axis in AXES}
    found = {"public_loss": float(model(inputs).mean())}
    text = TextEncoder(tokenizer, length)
    answers = zero_shot(model, inputs["images"], AXES, text, prompt="a photo of a")
    return found | {f"zero_shot_{axis}": float((answers[axis] == truth[axis]).float().mean()) for axis in AXES}


def compared(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, Any]:
    """Differences of the means: by themselves, and in units of their standard error (Welch). Runs of one seed begin
    with the same weights, on which the loss depends more than on noise and draws, so pairs differ far less."""
    found = {}
    for name in ("public_loss", *(f"zero_shot_{axis}" for axis in AXES)):
        a, b = [run[name] for run in ours], [run[name] for run in theirs]
        pairs = [one - other for one, other in zip(a, b, strict=True)]
        # A spread that happens to be near zero over few seeds would make any difference large.
        error = math.sqrt((statistics.variance(a) + statistics.variance(b)) / len(a) + 1e-6)
        apart = (statistics.mean(a) - statistics.mean(b)) / error
        found[name] = {
            "ours": statistics.mean(a), "ours_std": statistics.stdev(a), "opacus": statistics.mean(b),
            "opacus_std": statistics.stdev(b), "standard_errors_apart": apart, "apart": statistics.mean(pairs),
            "std_of_pairs": statistics.stdev(pairs),
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder / "data")
        runs: dict[str, list[dict[str, float]]] = {"ours": [], "opacus": []}
        for seed in range(arguments.seeds):
            for name, train in (("opacus", by_opacus), ("ours", by_this_trainer)):
                began = time.perf_counter()
                runs[name].append(train(folder / "data", folder, seed, arguments.steps))
                shown = {k: round(v, 3) for k, v in runs[name][-1].items()}
                print(f"{name:7} seed {seed}  {time.perf_counter() - began:5.1f} s  {shown}", flush=True)
    result = {
        "command": f"python benchmarks/utility.py --seeds {arguments.seeds} --steps {arguments.steps}",
        "setting": {
            "records": RECORDS, "expected_batch": BATCH, "steps": arguments.steps, "sigma": SIGMA, "clip_norm": CLIP,
            "peak_learning_rate": PEAK, "held_out": HELD_OUT,
            "chance": {axis: 1 / len(words) for axis, words in AXES.items()},
        },
        "runs": runs,
        "compared": compared(runs["ours"], runs["opacus"]),
    }  # fmt: skip
    print(json.dumps(result["compared"], indent=2))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
