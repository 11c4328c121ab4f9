"""Run under `deepspeed`: ways in which DeepSpeed loses, scales or misplaces a sum or its noise without an error.

Each is provoked in the real thing, past the config loader that refuses it, and must be stopped by the engine's guard.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

import murmuration.train.engines.deepspeed_zero as engine_module
from murmuration.model.build import build
from murmuration.train.config.root import ZeroOptimization
from murmuration.train.engines.choose import EngineSettings, make_engine
from murmuration.train.engines.deepspeed_zero import DeepSpeedEngine, start_ranks
from murmuration.train.engines.forward import PrivateForward
from murmuration.train.noise.update import NoisyUpdate
from murmuration.train.private import Computation, clipping_engine
from tests.support.answering import answer
from tests.support.sharded_engines import MICRO_BATCH, OPTIMIZERS, PLAN, RULE, SHAPE, noise, rows_of

REAL = engine_module.deepspeed_config


def told(**changes: Any) -> Callable[..., dict[str, Any]]:
    """DeepSpeed is told something else than the trainer would; None removes a key."""

    def config(zero: ZeroOptimization, micro_batch: int) -> dict[str, Any]:
        found = REAL(zero, micro_batch)
        found["zero_optimization"] |= changes.pop("zero", {})
        found |= changes
        return {key: value for key, value in found.items() if value is not None}

    return config


def one_step(
    ranks, stage: int, change: Callable[[DeepSpeedEngine], None] | None = None, dtype: torch.dtype = torch.float32,
    make: Callable[..., Any] = make_engine,
) -> None:  # fmt: skip
    settings = EngineSettings("deepspeed", MICRO_BATCH, ZeroOptimization(stage=stage))  # pyright: ignore[reportArgumentType]
    engine: Any = clipping_engine(
        build(SHAPE, "caption").to(dtype), RULE, OPTIMIZERS["AdamW"], 0.0, settings, ranks, Computation(), make=make
    ).engine
    try:
        if change is not None:
            change(engine)
        start = 2 * MICRO_BATCH * ranks.rank
        for offset in (0, MICRO_BATCH):
            engine.accumulate(rows_of(np.arange(start + offset, start + offset + MICRO_BATCH) % PLAN.records))
        if getattr(engine, "poison", False):
            engine._forward.sums.totals["cls_token" if "cls_token" in engine.shapes else next(iter(engine.shapes))][
                ..., 0
            ] = float("nan")  # pyright: ignore
        engine.update(NoisyUpdate(noise(), 1), 1e-3)
    finally:
        engine.close()


def collectives(ranks, stage: int) -> dict[str, dict[str, int]]:
    """What is said over the network in two micro-batches, and in the update."""
    said: Counter[str] = Counter()
    names = [
        "all_reduce",
        "reduce",
        "reduce_scatter_tensor",
        "_reduce_scatter_base",
        "all_gather_into_tensor",
        "broadcast",
    ]
    kept = {name: getattr(torch.distributed, name) for name in names if hasattr(torch.distributed, name)}

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
            if tensor.is_floating_point() and tensor.numel() > 64:
                said[name] += 1
            elif not tensor.is_floating_point():  # the guard's own counts and flags
                said["checks"] += 1
            return real(tensor, *rest, **options)

        return call

    found: dict[str, dict[str, int]] = {}

    def spy(engine: DeepSpeedEngine) -> None:
        for name, real in kept.items():
            setattr(torch.distributed, name, counted(name, real))
        update = engine.update

        def updated(*arguments: Any) -> Any:
            found["micro-batches"] = dict(said)
            said.clear()
            return update(*arguments)

        engine.update = updated  # pyright: ignore[reportAttributeAccessIssue]

    try:
        one_step(ranks, stage, spy)
    finally:
        for name, real in kept.items():
            setattr(torch.distributed, name, real)
    return found | {"update": dict(said)}


def adagrad(settings: EngineSettings, forward: PrivateForward, optimizer: Any, ranks: Any) -> Any:
    optimizer = torch.optim.Adagrad([p for p in forward.model.parameters() if p.requires_grad], lr=0.0)
    return make_engine(settings, forward, optimizer, ranks)  # pyright: ignore[reportArgumentType]


def poisoned(engine: DeepSpeedEngine) -> None:
    engine.poison = True  # pyright: ignore[reportAttributeAccessIssue]


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "honest at 1": (1, {}, {}),
    "honest at 3": (3, {}, {}),
    "clips the reduced sum at 1": (1, {"gradient_clipping": 1e-3}, {}),
    "clips the reduced sum at 3": (3, {"gradient_clipping": 1e-3}, {}),
    "clips by default": (2, {"gradient_clipping": None}, {}),
    "averages over ranks": (1, {"gradient_allreduce_op": None}, {}),
    "averages over ranks at 0": (0, {"gradient_allreduce_op": None}, {}),
    "round robin": (2, {"zero": {"round_robin_gradients": True}}, {}),
    "bf16 parameters by its own mode": (1, {"bf16": {"enabled": True}}, {}),
    "bf16 on the wire": (1, {"communication_data_type": "bf16"}, {}),
    "hook lost": (1, {}, {"change": lambda engine: engine._hook.remove()}),
    "hook lost at 0": (0, {}, {"change": lambda engine: engine._hook.remove()}),
    "optimizer made anew": (3, {}, {"make": adagrad}),
    "bf16 parameters": (1, {}, {"dtype": torch.bfloat16}),
    "NaN in the sum at 0": (0, {}, {"change": poisoned}),
    "NaN in the sum at 1, step skipped": (1, {}, {"change": poisoned}),
    "NaN in the sum at 3, step skipped": (3, {}, {"change": poisoned}),
}  # fmt: skip


def main() -> None:
    ranks = start_ranks()
    found: dict[str, str] = {}
    chosen = sys.argv[-1] if len(sys.argv) > 1 and sys.argv[-1] in CASES else None
    for name, (stage, changes, arguments) in CASES.items():
        if chosen not in (None, name):
            continue
        engine_module.deepspeed_config = told(**changes) if changes else REAL
        try:
            one_step(ranks, stage, **arguments)
            outcome = "went through"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        found[name] = outcome
        if any(other != "went through" for other in ranks.gather(outcome)) and outcome == "went through":
            found[name] = "went through on this rank"
        if ranks.main:
            print("CASE", name, "|", outcome[:300], flush=True)
    engine_module.deepspeed_config = REAL
    counts = {stage: collectives(ranks, stage) for stage in (0, 1, 2, 3)} if chosen is None else {}
    answer(ranks, {"cases": found, "collectives": counts})


if __name__ == "__main__":
    main()
