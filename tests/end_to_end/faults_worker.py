"""Run by several ranks: ways in which DeepSpeed loses, scales or misplaces a sum or its noise without an error.

Each is provoked in the real thing, past the config loader that refuses it, and must be stopped by the engine's guard.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

import murmuration.train.engines.deepspeed_zero as engine_module
from murmuration.model.build import build
from murmuration.train.config.optimizer import ZeroOptimization
from murmuration.train.core import Computation, clipping_engine
from murmuration.train.engines.choose import EngineSettings, make_engine
from murmuration.train.engines.deepspeed_zero import DeepSpeedEngine, start_ranks
from murmuration.train.engines.forward import PrivateForward
from murmuration.train.engines.sharded_sums import ShardedSums
from murmuration.train.noise.update import NoisyUpdate
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
    make: Callable[..., Any] = make_engine, later: Callable[[DeepSpeedEngine], None] | None = None,
    empty_first: bool = False,
) -> None:  # fmt: skip
    """`later` comes before a second step. `empty_first`: a step without records comes before, as in the self-test."""
    settings = EngineSettings("deepspeed", MICRO_BATCH, ZeroOptimization(stage=stage))  # pyright: ignore[reportArgumentType]
    engine: Any = clipping_engine(
        build(SHAPE, "caption").to(dtype), RULE, OPTIMIZERS["AdamW"], settings, ranks, Computation(), make=make
    ).engine
    try:
        if change is not None:
            change(engine)
        if empty_first:
            engine.accumulate(
                replace(rows_of(np.arange(MICRO_BATCH)), present=torch.zeros(MICRO_BATCH, dtype=torch.bool))
            )
            engine.update(NoisyUpdate(noise(), 0), 0.0)
        _summed_and_applied(engine, 1)
        if later is not None:
            later(engine)
            _summed_and_applied(engine, 2)
    finally:
        engine.close()


def _summed_and_applied(engine: Any, step: int) -> None:
    start = 2 * MICRO_BATCH * engine.ranks.rank
    for offset in (0, MICRO_BATCH):
        engine.accumulate(rows_of(np.arange(start + offset, start + offset + MICRO_BATCH) % PLAN.records))
    if getattr(engine, "poison", False):
        sums = engine._forward.sums
        totals = sums._window.totals if engine.partitioned else sums.totals
        totals["cls_token" if "cls_token" in engine.shapes else next(iter(engine.shapes))][..., 0] = float("nan")
    engine.update(NoisyUpdate(noise(), step), 1e-3)


def collectives(ranks, stage: int) -> dict[str, dict[str, int]]:
    """What is said over the network in the micro-batches of two steps, in the first update, and in the second."""
    said: Counter[str] = Counter()
    names = [
        "all_reduce",
        "all_to_all_single",
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
                said[f"elements by {name}"] += tensor.numel()
            elif not tensor.is_floating_point():  # the guard's own counts and flags
                said["checks"] += 1
            return real(tensor, *rest, **options)

        return call

    found: dict[str, dict[str, int]] = {}
    sizes: dict[str, int] = {}

    def spy(engine: DeepSpeedEngine) -> None:
        for name, real in kept.items():
            setattr(torch.distributed, name, counted(name, real))
        update = engine.update

        def updated(*arguments: Any) -> Any:
            found[f"micro-batches {len(found)}"] = dict(said)
            said.clear()
            done = update(*arguments)
            found["second update" if "update" in found else "update"] = dict(said)
            said.clear()
            return done

        engine.update = updated  # pyright: ignore[reportAttributeAccessIssue]

    try:
        one_step(ranks, stage, spy, later=lambda engine: sizes.update(of_model(engine)))
    finally:
        for name, real in kept.items():
            setattr(torch.distributed, name, real)
    return found | {"sizes": sizes}


def of_model(engine: Any) -> dict[str, int]:
    modules = [sum(p.numel() for p in tap.taken) for tap in engine._forward.handover.taps]
    return {"weights": engine.trainable_elements, "parameters": len(engine.shapes), "first module": modules[0]}


def adagrad(settings: EngineSettings, forward: PrivateForward, optimizer: Any, ranks: Any) -> Any:
    optimizer = torch.optim.Adagrad([p for p in forward.model.parameters() if p.requires_grad], lr=0.0)
    return make_engine(settings, forward, optimizer, ranks)  # pyright: ignore[reportArgumentType]


def poisoned(engine: DeepSpeedEngine) -> None:
    engine.poison = True  # pyright: ignore[reportAttributeAccessIssue]


def in_the_other_order(engine: DeepSpeedEngine) -> None:
    """Ranks take each other's shards for their own, and so does what proves the sums."""
    ranks, layout = engine.ranks, {}
    for flat, parts in engine._layout.values():
        of_other = {part.name: part for part in ranks.gather(parts)[1 - ranks.rank]}
        layout[id(flat)] = (flat, [replace(of_other[part.name], position=part.position) for part in parts])
    engine._layout = layout
    fragments = [part for _, parts in layout.values() for part in parts]
    engine._forward.sums = ShardedSums(engine.shapes, fragments, ranks, MICRO_BATCH)


def sent_from_elsewhere(engine: DeepSpeedEngine) -> None:
    """Every rank sends what lies one element beside the other's shard."""
    sums: Any = engine._forward.sums if engine.partitioned else engine._whole_sums
    for parcel in sums._exchange._parcels:
        first, *_ = parcel.stretches
        parcel.stretches[0] = slice(first.start + 1, first.stop + 1)


def added_twice(engine: DeepSpeedEngine) -> None:
    sums: Any = engine._forward.sharded_sums  # pyright: ignore[reportAttributeAccessIssue]
    real = sums._take
    sums._take = lambda parts, start: (real(parts, start), real(parts, start))


def kept_own(engine: DeepSpeedEngine) -> None:
    """Nothing is added up over the ranks."""
    engine._whole_sums._take = lambda arrived: None


def added_up_elsewhere(engine: DeepSpeedEngine) -> None:
    """One rank takes part in an all-reduce, but leaves its sums as they are."""
    sums: Any = engine._forward.sums
    real = sums.reduce

    def reduce(ranks: Any) -> None:
        kept = sums.flat.clone()
        real(ranks)
        if ranks.rank:
            sums.flat.copy_(kept)

    sums.reduce = reduce


def confused(engine: DeepSpeedEngine) -> None:
    """The map takes two parameters of equal sizes for each other: of each shard the last, whose turn comes late."""
    for flat, parts in engine._layout.values():
        for one, other in pairwise(reversed(parts)):
            if one.length == other.length and one.name != other.name:
                rest = [part for part in parts if part not in (one, other)]
                swapped = [replace(one, position=other.position), replace(other, position=one.position)]
                engine._layout[id(flat)] = (flat, [*rest, *swapped])
                return
    raise AssertionError("no two parameters of this shard are of equal sizes")


def scaled_later(engine: Any) -> None:
    """What DeepSpeed reduces is scaled, but not in the first step. It is the turn of a module of which both ranks hold
    something."""
    held = [{part.name for part in parts} for flat, parts in engine._layout.values()]
    by_both = set.intersection(*(set().union(*each) for each in engine.ranks.gather(held)))
    taps = enumerate(engine._forward.handover.taps)
    assert not engine._unproven, "a sum of the first step was zero"
    engine._turn = next(turn for turn, tap in taps if tap.names & by_both)

    def halve(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for flat in group["params"]:
                flat.grad.mul_(0.5)

    engine._hook.remove()
    engine._optimizer.register_step_pre_hook(halve)
    engine._hook = engine._optimizer.register_step_pre_hook(engine._before_optimizer_step)


def last_window_lost(engine: DeepSpeedEngine) -> None:
    sums: Any = engine._forward.sharded_sums  # pyright: ignore[reportAttributeAccessIssue]
    sums.send = lambda: None


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "honest at 1": (1, {}, {}),
    "honest at 3": (3, {}, {}),
    "honest at 0, where DeepSpeed reduces nothing": (0, {"gradient_allreduce_op": None}, {}),
    "clips the reduced sum at 1": (1, {"gradient_clipping": 1e-3}, {}),
    "clips the reduced sum at 3": (3, {"gradient_clipping": 1e-3}, {}),
    "clips by default": (2, {"gradient_clipping": None}, {}),
    "averages over ranks": (1, {"gradient_allreduce_op": None}, {}),
    "round robin": (2, {"zero": {"round_robin_gradients": True}}, {}),
    "bf16 parameters by its own mode": (1, {"bf16": {"enabled": True}}, {}),
    "bf16 on the wire": (1, {"communication_data_type": "bf16"}, {}),
    "hook lost": (1, {}, {"change": lambda engine: engine._hook.remove()}),
    "hook lost at 0": (0, {}, {"change": lambda engine: engine._hook.remove()}),
    "optimizer made anew": (3, {}, {"make": adagrad}),
    "bf16 parameters": (1, {}, {"dtype": torch.bfloat16}),
    "NaN in the sum at 0": (0, {}, {"change": poisoned}),
    "NaN in the sum at 1": (1, {}, {"change": poisoned}),
    "NaN in the sum at 3": (3, {}, {"change": poisoned}),
    "wrong slices of a total at 1": (1, {}, {"change": sent_from_elsewhere}),
    "nothing added up at 2": (2, {}, {"change": kept_own}),
    "not added up on one rank at 0": (0, {}, {"change": added_up_elsewhere}),
    "two parameters confused at 1": (1, {}, {"change": confused}),
    "two parameters confused at 2, and the first step is empty": (2, {}, {"change": confused, "empty_first": True}),
    "scaled in a later step at 2": (2, {}, {"later": scaled_later}),
    "shards exchanged at 3": (3, {}, {"change": in_the_other_order}),
    "wrong slices of a window at 3": (3, {}, {"change": sent_from_elsewhere}),
    "a window added twice at 3": (3, {}, {"change": added_twice}),
    "last window lost at 3": (3, {}, {"change": last_window_lost}),
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
