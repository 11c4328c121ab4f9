"""Run by several ranks: the library trains by optimizers of torch.optim on every sharded engine, stops, and goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from murmuration.train.config.optimizer import ZeroOptimization
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.deepspeed_zero import start_ranks
from murmuration.train.optim.torch_optimizer import UnfitOptimizerError
from tests.support.answering import answer
from tests.support.own_module import Regression, X, Y, training

ENGINES: dict[str, dict[str, Any]] = {
    "zero0": {"engine": "deepspeed", "zero": ZeroOptimization(stage=0)},
    "zero1": {"engine": "deepspeed", "zero": ZeroOptimization(stage=1)},
    "zero3": {"engine": "deepspeed", "zero": ZeroOptimization(stage=3)},
    "fsdp2": {"engine": "fsdp2"},
}
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "Nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.05, lr_decay=0.1),
}

PAIRS = [*((engine, "AdamW") for engine in ENGINES), *(("zero1", name) for name in OPTIMIZERS if name != "AdamW")]


class Whitened(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            each -= self.param_groups[0]["lr"] * each.grad / each.grad.norm().clamp(min=1e-12)


def trained(folder: Path, stops: tuple[int, ...] = (2, 4), **changes: Any) -> dict[str, list[Any]]:
    """Four steps, closed in between; the weights."""
    asked: dict[str, Any] = dict(
        reader=TensorDataset(X, Y), records=None, synthetic=None, example=(X[0], Y[0]), steps=4, schedule=None,
        noise_multiplier=1.0,
        loss=lambda model, batch: model({"x": batch[0], "y": batch[1]}),
    )  # fmt: skip
    weights: dict[str, list[Any]] = {}
    for last in stops:
        with training(folder, **(asked | changes)) as found:
            for step in found:
                if step == last:
                    break
            found.save()
            weights = {name: tensor.tolist() for name, tensor in found.weights().items()}
    return weights


def seeded(ranks: Ranks) -> nn.Module:
    """Other weights on every rank, as a program that seeds by rank would have."""
    model = Regression()
    torch.manual_seed(100 + ranks.rank)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def refusal(folder: Path, **changes: Any) -> str:
    try:
        trained(folder, **changes)
    except UnfitOptimizerError as error:
        return str(error)
    return ""


def main() -> None:
    ranks, folder = start_ranks(), Path(sys.argv[-1])
    # Every engine with AdamW, and every optimizer at ZeRO-1, which holds slices as ZeRO-2 does; all stop and go on.
    found: dict[str, Any] = {
        f"{engine} {name}": trained(
            folder / f"{engine}-{name}", ranks=ranks, optimizer=OPTIMIZERS[name], **ENGINES[engine]
        )
        for engine, name in PAIRS
    }
    refused = {
        engine: refusal(folder / f"{engine}-whole", ranks=ranks, optimizer=Whitened, **settings)
        for engine, settings in ENGINES.items()
    }
    apart = {
        engine: ranks.gather(
            trained(
                folder / f"{engine}-apart", (1,), ranks=ranks, model=seeded(ranks), optimizer=optim.SGD,
                **ENGINES[engine],
            )
        )
        for engine in ("zero1", "zero3", "fsdp2")
    }  # fmt: skip
    answer(ranks, {"weights": found, "refused": refused, "apart": apart})


if __name__ == "__main__":
    main()
