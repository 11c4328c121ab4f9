"""A head from one pass over the sums of features against a head trained by DP-SGD, at equal epsilon.

    python benchmarks/head.py --seeds 3 --out benchmarks/results/head.json

Both go through `murmuration.PrivateTraining`, with keys from the operating system, on features drawn from classes that
overlap. For each epsilon, DP-SGD's learning rate is chosen on other records of the same kind, which play public
stand-ins; the head from sums has nothing to choose. Ridge regression by scikit-learn shows what can be had
without noise. It does not show what features of real encoders would give.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from sklearn.linear_model import Ridge  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import murmuration  # noqa: E402
from murmuration.model.statistics_head import StatisticsHead  # noqa: E402
from murmuration.train.config.optimizer import Optimizer, OptimizerParams  # noqa: E402

RECORDS, HELD_OUT, WIDTH, CLASSES, APART, MICRO_BATCH = 10_000, 10_000, 64, 10, 3.0, 512
EPSILONS = (0.1, 1.0, 8.0)
STEPS, RATES, EXPECTED = (30,), (1.0, 3.0, 10.0), 1000.0
DESCENT = Optimizer(type="SGD", params=OptimizerParams(momentum=0.0))


def drawn(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Features of length 1 whose classes overlap; the classes' means are the same for every seed."""
    means = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    means *= APART / means.norm(dim=1, keepdim=True)
    draw = torch.Generator().manual_seed(1 + seed)
    labels = torch.randint(0, CLASSES, (count,), generator=draw)
    features = means[labels] + torch.randn(count, WIDTH, generator=draw)
    return features / features.norm(dim=1, keepdim=True), labels


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = StatisticsHead(nn.Linear(WIDTH, CLASSES))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.head(inputs["features"], inputs["labels"])


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.head(inputs["features"]), inputs["labels"], reduction="none")


def trained(model: Any, seed: int, epsilon: float, batch: float, steps: int, rate: float) -> float:
    """Accuracy on held-out records after private training."""
    features, labels = drawn(seed, RECORDS)

    def synthetic(size: int, seed: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        found = torch.randn(size, WIDTH, generator=draw)
        return {
            "features": found / found.norm(dim=1, keepdim=True),
            "labels": torch.randint(0, CLASSES, (size,), generator=draw),
        }

    with tempfile.TemporaryDirectory() as folder, murmuration.PrivateTraining(
        model, lambda numbers: {"features": features[numbers], "labels": labels[numbers]},
        murmuration.Settings(
            privacy=murmuration.Privacy(epsilon=epsilon, expected_batch=batch), steps=steps,
            dataset=f"overlapping classes {seed}", run_dir=folder, micro_batch=MICRO_BATCH,
        ),
        synthetic=synthetic, records=RECORDS, optimizer=DESCENT, schedule=rate,
    ) as training:  # fmt: skip
        training.prove()
        for step in training.steps():
            training.step(step)
        assert training.finish().epsilon <= epsilon
    if isinstance(model.head, StatisticsHead):  # the ridge is post-processing
        model.head.settle(training.plan.noise_std / training.plan.divisor)
    return right(model.head, seed)


@torch.no_grad()
def right(head: Any, seed: int) -> float:
    features, labels = drawn(1000 + seed, HELD_OUT)
    return float((head(features).argmax(1) == labels).float().mean())


def without_noise(seed: int) -> float:
    features, labels = drawn(seed, RECORDS)
    ridge = Ridge(alpha=1e-3, fit_intercept=False).fit(features.numpy(), np.eye(CLASSES)[labels.numpy()])
    held, expected = drawn(1000 + seed, HELD_OUT)
    return float((ridge.predict(held.numpy()).argmax(1) == expected.numpy()).mean())


def descent_settings(epsilon: float) -> tuple[int, float]:
    """The best of all on a stand-in."""
    tried = {
        (steps, rate): trained(Softmax(), 500, epsilon, EXPECTED, steps, rate) for steps in STEPS for rate in RATES
    }
    return max(tried, key=lambda each: tried[each])


def study(seeds: int) -> dict[str, Any]:
    rows = []
    for epsilon in EPSILONS:
        steps, rate = descent_settings(epsilon)
        one = [trained(Sums(), seed, epsilon, RECORDS, 1, 1.0) for seed in range(seeds)]
        descent = [trained(Softmax(), seed, epsilon, EXPECTED, steps, rate) for seed in range(seeds)]
        rows.append({"epsilon": epsilon, "sums": one, "descent": descent, "steps": steps, "learning_rate": rate})
        print(f"epsilon {epsilon:g}: from sums {statistics.mean(one):.3f}, by DP-SGD {statistics.mean(descent):.3f} "
              f"({steps} steps at {rate:g})", flush=True)  # fmt: skip
    setting = {"records": RECORDS, "width": WIDTH, "classes": CLASSES, "chance": 1 / CLASSES}
    return setting | {"rows": rows, "ridge_without_noise": [without_noise(seed) for seed in range(seeds)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="write this JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = study(arguments.seeds)
    print(f"without noise, by scikit-learn's ridge: {statistics.mean(found['ridge_without_noise']):.3f}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
