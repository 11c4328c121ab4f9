"""Run by several ranks: modules of all kinds where frameworks' hooks gather their weights, which are ZeRO-3 and FSDP2.

Each rank has the same records, in several micro-batches, since some modules wait for the fifth; one step of SGD at rate
1 then moves the weights by the mean of their clipped sums. The names of the modules are the arguments.
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.core import Computation, clipping_engine
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.deepspeed_zero import start_ranks
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.update import NoisyUpdate
from tests.support import zoo
from tests.support.answering import answer
from tests.support.brute_force import one_by_one, size
from tests.support.sharded_engines import Layout, distance, settings_of

PLAIN = Optimizer.model_validate({"type": "SGD", "params": {"momentum": 0.0, "weight_decay": 0.0}})
PASSES = 5
LAYOUTS: tuple[Layout, ...] = (3, "fsdp2")


def outcome(ranks: Ranks, layout: Layout, model: nn.Module) -> str | float:
    """What refuses it, or how far the step is from the loop over single records, as a share of it."""
    inputs: zoo.Inputs = model.data()  # pyright: ignore[reportCallIssue]
    records = len(next(iter(inputs.values())))
    try:
        expected = one_by_one(model, inputs, zoo.BOUND)
    except Exception:  # nor can such a model be trained otherwise
        expected = {}
    before = {name: tensor.double() for name, tensor in copy.deepcopy(model.state_dict()).items()}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    frozen = [name for name, x in model.state_dict(keep_vars=True).items() if id(x) not in trained]
    engine = clipping_engine(
        model, ClipRule("flat", zoo.BOUND, 0.0), PLAIN, settings_of(layout), ranks, Computation()
    ).engine
    try:
        for _ in range(PASSES):
            engine.accumulate(MicroBatch(inputs, torch.ones(records, dtype=torch.bool)))
        engine.update(NoisyUpdate(AESNoise(b"n" * 32, 1e-12, float(PASSES * ranks.world)), 1), 1.0)
        after = engine.whole_weights()
    finally:
        engine.close()
    if written := [name for name in frozen if "num_batches" not in name and bool((after[name] != before[name]).any())]:
        return f"moved without noise: {written}"
    return distance({name: before[name] - after[name].double() for name in expected}, expected) / size(
        expected.values()
    )


def main() -> None:
    ranks = start_ranks()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in sys.argv[1:]:
        for layout in LAYOUTS:
            torch.manual_seed(0)
            try:
                found[f"{layout} {name}"] = outcome(ranks, layout, (zoo.hostile() | zoo.ordinary())[name]())
            except ClipError as error:
                found[f"{layout} {name}"] = f"refused: {error}"
            except Exception as error:
                found[f"{layout} {name}"] = f"{type(error).__name__}: {error}"
    answer(ranks, found)


if __name__ == "__main__":
    main()
