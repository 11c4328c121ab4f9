"""Gradients scaled by public second moments against gradients as they are, at equal epsilon.

    python benchmarks/scaled_gradients.py --seeds 3 --out benchmarks/results/scaled_gradients.json

Two toys. `words`: documents of words whose frequencies follow Zipf's law, classified by an embedding, most of whose
rows hardly ever have a gradient. `digits`: scikit-learn's pictures of digits, classified by two dense layers. A run on
public records of the same kind gives the second moments; nothing else of it is used. Learning rate and C are chosen
on further records of the kind, which play public stand-ins, from the same settings for all; keys are from the operating
system. It does not show what a vision model at scale would gain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from murmuration.accounting.epsilon.calibrate import calibrate_sigma  # noqa: E402
from murmuration.accounting.key_chain import KeyChain, PhaseKeys  # noqa: E402
from murmuration.accounting.keys import RunKey  # noqa: E402
from murmuration.accounting.plan import PrivacyPlan, ScaledSpace, threshold_for  # noqa: E402
from murmuration.accounting.scale_table import ScaleTable, scales_of  # noqa: E402
from murmuration.data.draw.micro_batch import MicroBatch  # noqa: E402
from murmuration.train.clip.rule import ClipRule  # noqa: E402
from murmuration.train.clip.scaling import Scaling  # noqa: E402
from murmuration.train.config.optimizer import Optimizer, OptimizerParams  # noqa: E402
from murmuration.train.config.root import ZeroOptimization  # noqa: E402
from murmuration.train.distributed.ranks import Alone  # noqa: E402
from murmuration.train.engines.choose import EngineSettings, make_engine  # noqa: E402
from murmuration.train.engines.forward import PlainForward  # noqa: E402
from murmuration.train.noise.update import NoisyUpdate, PlainUpdate  # noqa: E402
from murmuration.train.optim.choose import make_optimizer  # noqa: E402
from murmuration.train.private import Computation, PrivateCore, clipping_engine  # noqa: E402
from murmuration.train.recipe.scaling import moments_of  # noqa: E402

EPSILON, STEPS, FLOOR, MICRO_BATCH, PUBLIC_STEPS, PUBLIC_RATE = 2.0, 100, 1e-2, 64, 60, 3e-3
RANKS = Alone(torch.device("cpu"))
OPTIMIZERS = {
    "AdamW": Optimizer(params=OptimizerParams(betas=(0.9, 0.99))),
    "SGD": Optimizer(type="SGD", params=OptimizerParams(momentum=0.9)),
}
RATES = {"AdamW": (3e-3, 1e-2, 3e-2, 1e-1), "SGD": (0.1, 0.3, 1.0, 3.0)}
NORMS = (0.3, 1.0, 3.0)
VOCABULARY, LENGTH, CLASSES = 2000, 12, 5
Records = tuple[Tensor, Tensor]


class Parts(NamedTuple):
    public: Records
    private: Records
    held_out: Records


class Classifier(nn.Module):
    def logits(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.logits(inputs["x"]), inputs["y"], reduction="none")


class Words(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, CLASSES)
        nn.init.normal_(self.table.weight, std=0.3)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1))


class Digits(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))

    def logits(self, x: Tensor) -> Tensor:
        return self.body(x)


def words(seed: int) -> Parts:
    """A document's class is the one that its words lean to most; the leanings are the same for every seed."""
    leaning = torch.randn(VOCABULARY, CLASSES, generator=torch.Generator().manual_seed(0))
    often = 1.0 / torch.arange(1, VOCABULARY + 1)
    draw = torch.Generator().manual_seed(1 + seed)

    def some(count: int) -> Records:
        x = torch.multinomial(often, count * LENGTH, replacement=True, generator=draw).view(count, LENGTH)
        return x, leaning[x].sum(1).argmax(1)

    return Parts(some(1000), some(8000), some(4000))


def digits(seed: int) -> Parts:
    x, y = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1 + seed))
    x, y = x.float()[order] / 16, y[order]
    return Parts(*((x[part], y[part]) for part in (slice(200), slice(200, 1400), slice(1400, None))))


TASKS = {"words": (Words, words), "digits": (Digits, digits)}


def fresh(task: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return TASKS[task][0]()


def batch_of(records: Records, rows: Tensor) -> MicroBatch:
    return MicroBatch({"x": records[0][rows], "y": records[1][rows]}, torch.ones(len(rows), dtype=torch.bool))


SETTINGS = EngineSettings("local", MICRO_BATCH, ZeroOptimization())


@cache
def table_of(task: str, seed: int) -> ScaleTable:
    """From a run on the public records."""
    model, records = fresh(task, 100 + seed), TASKS[task][1](seed).public
    optimizer = make_optimizer(OPTIMIZERS["AdamW"], model.named_parameters(), 0.0)
    engine = make_engine(SETTINGS, PlainForward(model), optimizer, RANKS)
    for step in range(1, PUBLIC_STEPS + 1):
        engine.accumulate(batch_of(records, torch.randint(len(records[1]), (MICRO_BATCH,))))
        engine.update(PlainUpdate(MICRO_BATCH, step), PUBLIC_RATE)
    (names, shards) = list(engine.shapes), engine.shards()
    moments = {
        name: moments_of(shard.state["exp_avg_sq"].view(engine.shapes[name]), name)
        for name, shard in zip(names, shards, strict=True)
    }
    return scales_of(moments, FLOOR)


def plan_of(records: int, norm: float, table: ScaleTable | None) -> PrivacyPlan:
    threshold, delta = threshold_for(records, records / 10), 1 / (2 * records)
    space = None if table is None else ScaledSpace(table.digest, *table.span)
    return PrivacyPlan(records, threshold, norm, sigma_of(threshold, delta), STEPS, delta, EPSILON, scaling=space)


@cache
def sigma_of(threshold: int, delta: float) -> float:
    return calibrate_sigma(threshold / 2**32, STEPS, EPSILON, delta)


def trained(task: str, seed: int, optimizer: str, scaled: bool, rate: float, norm: float) -> float:
    """Accuracy on held-out records after private training."""
    model, parts = fresh(task, seed), TASKS[task][1](seed)
    table = table_of(task, seed) if scaled else None
    plan = plan_of(len(parts.private[1]), norm, table)
    built = clipping_engine(
        model, ClipRule.of(plan, "flat", 0.01, MICRO_BATCH), OPTIMIZERS[optimizer], 0.0, SETTINGS, RANKS, Computation(),
        scaling=None if table is None else Scaling(table),
    )  # fmt: skip
    key = RunKey.fresh()
    keys = PhaseKeys(partial(key.derive, phase=0, segment="study"), KeyChain(key.first_link("study", step=1)))
    core = PrivateCore(plan, built.clip, built.engine, keys, RANKS)
    sampler, noise = core.sampler(), core.noise("noise")
    for step in range(1, STEPS + 1):
        for rows in torch.tensor(sampler.draw(step).ids).split(MICRO_BATCH):
            built.engine.accumulate(batch_of(parts.private, rows))
        built.engine.update(NoisyUpdate(noise, step, built.clip.scaling), rate)
    with torch.no_grad():
        return float((model.logits(parts.held_out[0]).argmax(1) == parts.held_out[1]).float().mean())


def compared(task: str, optimizer: str, scaled: bool, seeds: int) -> dict[str, Any]:
    tried = {
        (rate, norm): trained(task, 500, optimizer, scaled, rate, norm)
        for rate, norm in product(RATES[optimizer], NORMS)
    }
    rate, norm = max(tried, key=lambda each: tried[each])
    found = [trained(task, seed, optimizer, scaled, rate, norm) for seed in range(seeds)]
    name = "scaled" if scaled else "as they are"
    print(f"{task:7} {optimizer:6} {name:12} {statistics.mean(found):.3f} ({min(found):.3f} to {max(found):.3f}), "
          f"rate {rate:g}, C {norm:g}", flush=True)  # fmt: skip
    return {"task": task, "optimizer": optimizer, "scaled": scaled, "rate": rate, "C": norm, "accuracy": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="write this JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compared(*each, arguments.seeds) for each in product(TASKS, OPTIMIZERS, (False, True))]
    if arguments.out is not None:
        setting = {"epsilon": EPSILON, "steps": STEPS, "floor": FLOOR, "rates": RATES, "norms": NORMS}
        arguments.out.write_text(json.dumps(setting | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
