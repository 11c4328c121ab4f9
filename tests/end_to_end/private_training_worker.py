"""Run by several ranks: the library trains a module of one's own on every sharded engine, stops, and continues."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from murmuration.train.config.zero_optimization import ZeroOptimization
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.deepspeed_zero import start_ranks
from tests.support.answering import answer
from tests.support.own_module import RATE, training

ENGINES: dict[str, dict[str, Any]] = {
    "zero0": {"engine": "deepspeed", "zero": ZeroOptimization(stage=0)},
    "zero1": {"engine": "deepspeed", "zero": ZeroOptimization(stage=1)},
    "zero3": {"engine": "deepspeed", "zero": ZeroOptimization(stage=3)},
    "fsdp2": {"engine": "fsdp2"},
}


def trained(folder: Path, ranks: Ranks, **engine: Any) -> dict[str, Any]:
    """Two steps, closed, two more; weights and verdict."""
    for last in (2, 4):
        with training(folder, steps=4, ranks=ranks, **engine) as found:
            hostile = found.prove().largest_hostile
            for step in [step for step in found.steps() if step <= last]:
                found.step(step, RATE)
            found.save()
            weights = {name: tensor.tolist() for name, tensor in found.weights().items()}
            verdict = found.finish() if last == 4 else None
    assert verdict is not None
    return {"weights": weights, "hostile": hostile, "epsilon": verdict.epsilon, "committed": verdict.committed}


def main() -> None:
    ranks = start_ranks()
    folder = Path(sys.argv[-1])
    answer(ranks, {name: trained(folder / name, ranks, **engine) for name, engine in ENGINES.items()})


if __name__ == "__main__":
    main()
