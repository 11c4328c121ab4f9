"""Two networks of `ds_configs/studies/body_then_head.json` trained again, by PyTorch's own parts alone.

    OMP_NUM_THREADS=1 python benchmarks/real_scratch.py TRAIN TEST --out benchmarks/results/real_scratch.json

TRAIN and TEST are CIFAR-10 as class folders. Nothing of the trainer runs here: the transformer is timm's, each record's
gradient comes from a backward pass of its own, NumPy draws records and noise, dp-accounting finds the noise's size, and
torch.optim.AdamW takes the steps. So the accuracy must be that of the study's arm "private alone", within the scatter
of its seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from real_heads import sigma_of_draws
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

PRIVATE, HELD_OUT, BATCH, EPSILON = 45_000, 5_000, 800, 8.0
PEAK, WARMUP, DECAY, GAMMA = 0.003, 5, 0.05, 0.01
"""As in ds_configs/studies/cifar10_mixed.json; clipping is automatic, with C = 1."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=[30])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = read(given.train)
    held, answers = read(given.test, HELD_OUT // 10)
    rows = []
    for steps in given.steps:
        sigma = sigma_of_draws(EPSILON, BATCH / PRIVATE, steps)
        found = []
        for seed in range(given.seeds):
            chance = np.random.default_rng(seed)
            mine = chance.permutation(len(images))[:PRIVATE]
            model = trained(images[mine], labels[mine], steps, sigma, seed, chance)
            with torch.no_grad():
                found.append(float((model(held).argmax(1) == answers).float().mean()))
            print(f"{steps} steps, seed {seed}: {found[-1]:.4f}", flush=True)
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        rows.append({"steps": steps, "sigma": sigma, "top_1": statistics.mean(found), "sd": spread, "runs": found})
        print(f"{steps} steps, sigma {sigma:.4f}: {statistics.mean(found):.4f} ± {spread:.4f}", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


def read(folder: Path, of_each: int | None = None) -> tuple[Tensor, Tensor]:
    found, labels = [], []
    for number, name in enumerate(sorted(each.name for each in folder.iterdir() if each.is_dir())):
        for file in sorted((folder / name).iterdir())[:of_each]:
            with Image.open(file) as image:
                found.append(np.asarray(image.convert("RGB")))
            labels.append(number)
    pixels = torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).float() / 255
    return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1), torch.tensor(labels)


def network(seed: int) -> nn.Module:
    """Patches of 8 pixels, width 64, two blocks. Matrices start Xavier-uniform, biases at zero, tokens and positions as
    N(0, 0.02²), the head at zero."""
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=10, global_pool="avg", fc_norm=False
    )
    for name, weight in model.named_parameters():
        if name in ("cls_token", "pos_embed"):
            nn.init.normal_(weight, std=0.02)
        elif name == "head.weight":
            nn.init.zeros_(weight)
        elif weight.dim() > 1:
            nn.init.xavier_uniform_(weight.data.flatten(1))
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    return model


def trained(
    images: Tensor, labels: Tensor, steps: int, sigma: float, seed: int, chance: np.random.Generator
) -> nn.Module:
    model = network(seed)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, weight_decay=DECAY)
    for step in range(steps):
        total = [torch.zeros_like(weight) for weight in weights]
        for record in np.flatnonzero(chance.random(len(images)) < BATCH / len(images)).tolist():
            loss = F.cross_entropy(model(images[record : record + 1]), labels[record : record + 1])
            gradient = torch.autograd.grad(loss, weights)
            norm = math.sqrt(sum(float(part.square().sum()) for part in gradient))
            for summed, part in zip(total, gradient, strict=True):
                summed.add_(part, alpha=1 / (norm + GAMMA))
        for weight, summed in zip(weights, total, strict=True):
            noise = torch.from_numpy(sigma * chance.standard_normal(tuple(summed.shape))).float()
            weight.grad = (summed + noise) / BATCH
        falling = 0.5 * (1 + math.cos(math.pi * max(0, step - WARMUP) / (steps - WARMUP)))
        optimizer.param_groups[0]["lr"] = PEAK * min((step + 1) / WARMUP, falling)
        optimizer.step()
    return model.eval()


if __name__ == "__main__":
    main()
