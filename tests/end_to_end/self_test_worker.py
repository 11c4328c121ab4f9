"""Run by several ranks: the self-test where weights are sharded, honest and with gradients that are 3 % too small.

Too small, because what is too large moves the sum by more than C, which the self-test sees without any reference.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from murmuration.model.build import build
from murmuration.train.clip.engine import Precision
from murmuration.train.clip.rule import ClipRule
from murmuration.train.core import Computation, clipping_engine
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.deepspeed_zero import start_ranks
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.self_test.self_test import SelfTestError, self_test
from tests.support.answering import answer
from tests.support.planted_faults import OffBy
from tests.support.sharded_engines import MICRO_BATCH, OPTIMIZERS, SHAPE, C, Layout, noise, settings_of

ALLOWANCE = 1e-4
"""The share of C by which rounding may change a sum."""


def outcome(ranks: Ranks, layout: Layout, precision: Precision, times: float | None) -> str:
    built = clipping_engine(
        build(SHAPE, "caption"), ClipRule("flat", C, ALLOWANCE), OPTIMIZERS["SGD"], settings_of(layout), ranks,
        Computation(precision=precision), None if times is None
        else lambda clip: OffBy(precision, clip.rule, sums=times, norms=times, always=precision == "fp32"),
    )  # fmt: skip
    records = SyntheticRecords.of(SHAPE, "caption")
    try:
        self_test(built.engine, built.clip, noise(), 0, records, MICRO_BATCH, ranks)
        return "passed"
    except SelfTestError as error:
        return f"{error}"
    finally:
        built.engine.close()


def main() -> None:
    ranks = start_ranks()
    found: dict[str, Any] = {}
    settings: tuple[tuple[Layout, Precision], ...] = ((3, "bf16"), ("fsdp2", "fp32"))
    for layout, precision in settings:
        for name, times in (("honest", None), ("3 % off", 0.97)):
            found[f"{layout} {precision} {name}"] = ranks.gather(outcome(ranks, layout, precision, times))
    answer(ranks, found)


if __name__ == "__main__":
    main()
