"""Run by several ranks: every ZeRO stage and FSDP2, precision and optimizer against one textbook trajectory.

The draws are Poisson, so ranks get uneven numbers of records and padding, and one step draws nothing at all. The
textbook holds whole tensors in one process, loops over single records in fp32 and knows nothing of shards.

Each of its gradients is taken at the weights that the engine has at that step. The two keep weights in different
precision, so theirs differ in the last bit of fp32. bf16 passes that on as it is, or turns it into 2^-8 of an
activation, where the activation lies at the edge between two bf16 numbers. Which of them do depends on the kernel.
At equal weights equal operands meet in equal kernels, and bf16 sums are as exact as fp32 ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.data.draw.micro_batch import MicroBatch, slots
from murmuration.model.build import build
from murmuration.train.clip import compiled
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import Precision
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.core import Computation, clipping_engine
from murmuration.train.engines.deepspeed_zero import start_ranks
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.update import NoisyUpdate
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.self_test.self_test import SelfTestError, self_test
from tests.support.answering import answer
from tests.support.planted_faults import OffBy
from tests.support.recorded_blocks import operation_by_operation
from tests.support.sharded_engines import (
    HOSTILE,
    LAYOUTS,
    LONG,
    MICRO_BATCH,
    MOST_ROWS,
    NOISE_KEY,
    OPTIMIZERS,
    RATES,
    RULE,
    SHAPE,
    STEPS,
    UNITS,
    C,
    Layout,
    Teacher,
    distance,
    drawn,
    engine_of,
    length,
    noise,
    rows_of,
    settings_of,
    sum_of_units,
    units_of,
)

compiled.by_inductor = operation_by_operation  # the compiler would take minutes

ONE_OF_EACH: tuple[Layout, ...] = (1, 3, "fsdp2")
"""A layout for each way of adding up micro-batches."""


def spoil_padding(engine) -> None:
    """As memory may be that nobody ever wrote: the engine must not take it for weights."""
    for shard in engine.shards():
        behind = torch.ones(shard.weights.numel(), dtype=torch.bool)
        for fragment in shard.fragments:
            fragment.of(behind)[...] = False
        with torch.no_grad():
            shard.weights.view(-1)[behind] = float("nan")


def sharded(
    ranks, layout: Layout, kind: str, precision: Precision, offload: Any = None, *,
    mechanism: AESNoise | None = None, norm: float = C, lost: int = 0, compile: Literal["off", "blocks"] = "off",
) -> dict[str, float]:  # fmt: skip
    """The engine against its teacher, who knows nothing of another mechanism, another norm or lost records."""
    teacher = Teacher(kind, precision, ranks.world) if ranks.main else None
    model = build(SHAPE, "caption")
    rule = ClipRule("flat", norm, 0.0)
    found = engine_of(ranks, settings_of(layout, offload), model, OPTIMIZERS[kind], rule, precision, compile)
    engine = found.engine
    if ranks.world == 3:  # where sizes do not divide evenly
        spoil_padding(engine)
    for step in STEPS:
        weights = engine.whole_weights()
        if teacher is not None:
            teacher.step(step, weights)
        for row in slots(drawn(step)[lost:], ranks.rank, ranks.world, MICRO_BATCH):
            engine.accumulate(rows_of(row))
        engine.update(NoisyUpdate(mechanism or noise(), step), RATES[kind])
    weights = {name: tensor.double() for name, tensor in engine.whole_weights().items() if name in engine.shapes}
    engine.close()
    if compile == "blocks":
        assert isinstance(found.clip, BookKeepingClip) and found.clip.blocks is not None
        assert found.clip.blocks.kinds and not found.clip.blocks.why_not, found.clip.blocks.about()
    return {} if teacher is None else teacher.compare(weights)


class Straight(nn.Module):
    """Whose gradient of a record is the record."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(37))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return (inputs["x"] * self.weight).sum(1)


def straight(number: int) -> MicroBatch:
    """Two records: one that nearly all share, and one that is its opposite every other time."""
    draw = torch.Generator().manual_seed(number)
    x = torch.cat([torch.ones(1, 37), torch.full((1, 37), (-1.0) ** number)]) + torch.randn(2, 37, generator=draw)
    return MicroBatch({"x": x * 10}, torch.ones(2, dtype=torch.bool))


def error_of_a_long_sum(ranks, layout: Layout) -> float:
    """In units of C: from the clipped sum of many micro-batches to what moved the weights, at rate and divisor 1."""
    engine = engine_of(ranks, settings_of(layout), Straight(), Optimizer.model_validate({"type": "SGD"})).engine
    for number in range(ranks.rank, LONG, ranks.world):
        engine.accumulate(straight(number))
    engine.update(NoisyUpdate(AESNoise(NOISE_KEY, 1e-9, 1.0), 1), 1.0)
    found = engine.whole_weights()["weight"].double()
    engine.close()
    every = torch.cat([straight(number).inputs["x"] for number in range(LONG)]).double()
    exact = (every * (C / every.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    return float((found + exact).norm()) / C


def error_of_units(ranks, layout: Layout, precision: Precision) -> float:
    """The error of the sum by which the weights moved, at rate and divisor 1: units of 1 to 9 rows over all ranks,
    against the rows' own gradients, weighed and added up, then clipped. In bf16 against the clip engine's own sums."""
    model, sizes = build(SHAPE, "caption"), [1 + unit % MOST_ROWS for unit in range(UNITS)]
    engine = engine_of(ranks, settings_of(layout), model, Optimizer.model_validate({"type": "SGD"}), RULE, precision)
    before = {name: tensor.double() for name, tensor in engine.engine.whole_weights().items()}
    for row in slots(np.arange(UNITS), ranks.rank, ranks.world, MICRO_BATCH):
        engine.engine.accumulate(units_of(row, sizes))
    engine.engine.update(NoisyUpdate(AESNoise(NOISE_KEY, 1e-9, 1.0), 1), 1.0)
    after = {name: tensor.double() for name, tensor in engine.engine.whole_weights().items()}
    engine.engine.close()
    expected = sum_of_units(build(SHAPE, "caption"), sizes, precision, ranks.world)
    moved = {name: before[name] - after[name] for name in expected}
    return distance(moved, expected) / length(expected)


def self_tested(ranks, layout: Layout, precision: Precision, times: float | None) -> str:
    """Of gradients that are `times` as large as they should be; what is too large moves the sum by more than C, which
    the self-test sees without any reference."""
    rule = ClipRule("flat", C, 1e-4)  # the share of C by which rounding may change a sum
    built = clipping_engine(
        build(SHAPE, "caption"), rule, OPTIMIZERS["SGD"], settings_of(layout), ranks,
        Computation(precision=precision), None if times is None
        else lambda clip: OffBy(precision, clip.rule, sums=times, norms=times, always=precision == "fp32"),
    )  # fmt: skip
    try:
        self_test(built.engine, built.clip, noise(), 0, SyntheticRecords.of(SHAPE, "caption"), MICRO_BATCH, ranks)
        return "passed"
    except SelfTestError as error:
        return f"{error}"
    finally:
        built.engine.close()


def main() -> None:
    ranks = start_ranks()
    assert HOSTILE in drawn(STEPS[0])
    results = []
    # Every layout with LAMB, which has both moments and asks for norms of whole parameters; LARS, which asks for them,
    # too, and bf16, whose gradients reach an optimizer in fp32, together for each way of cutting weights; others once.
    for precision, kinds in (("fp32", OPTIMIZERS), ("bf16", ("LARS",))):
        for kind in kinds:
            cuts = LAYOUTS if kind == "LAMB" or "--all" in sys.argv else ONE_OF_EACH if precision == "bf16" else (1,)
            layouts: list[tuple[Layout, str | None]] = [(layout, None) for layout in cuts]
            if "--offload" in sys.argv and kind in ("AdamW", "LAMB") and precision == "fp32":
                layouts += [(stage, "torch") for stage in (1, 2, 3)]
                layouts += [(stage, "deepspeed") for stage in (1, 2, 3) if kind == "AdamW"]
            for layout, offload in layouts:
                found = sharded(ranks, layout, kind, precision, offload)
                results.append({"layout": layout, "optimizer": kind, "precision": precision, "world": ranks.world,
                                "offload": offload} | found)  # fmt: skip
    recorded = [sharded(ranks, layout, "LAMB", "fp32", compile="blocks") for layout in (3, "fsdp2")]
    faults = {
        "noise": {"mechanism": noise(times=1.001)}, "divisor": {"mechanism": noise(more=1.0)},
        "clipping": {"norm": 1e9}, "clip norm": {"norm": 1.001 * C}, "lost record": {"lost": 1},
    }  # fmt: skip
    planted = {fault: sharded(ranks, 0, "SGD", "fp32", **given) for fault, given in faults.items()}
    counts = [
        [int((slots(drawn(s), r, ranks.world, MICRO_BATCH) >= 0).sum()) for r in range(ranks.world)] for s in STEPS
    ]
    # Stages 0 to 2 differ in what is done with the sum.
    errors = {str(layout): error_of_a_long_sum(ranks, layout) for layout in ONE_OF_EACH}
    units = {
        f"{layout} {precision}": error_of_units(ranks, layout, precision)
        for layout in ONE_OF_EACH for precision in ("fp32", "bf16")
    }  # fmt: skip
    # How weights are gathered has nothing to do with the precision.
    self_tests = {
        name: ranks.gather(self_tested(ranks, *given)) for name, given in (
            ("honest", ("fsdp2", "bf16", None)), ("ZeRO-3", (3, "bf16", 0.97)), ("FSDP2", ("fsdp2", "fp32", 0.97)),
        )
    }  # fmt: skip
    answer(ranks, {"results": results, "records_per_rank": counts, "errors_of_long_sums": errors, "planted": planted,
                   "errors_of_units": units, "recorded": recorded, "self_tests": self_tests})  # fmt: skip


if __name__ == "__main__":
    main()
