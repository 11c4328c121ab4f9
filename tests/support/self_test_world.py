"""The self-test on a small captioner, with parts put in the place of the honest ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from murmuration.model.build import build
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.noise.aes import AESNoise
from murmuration.train.self_test.probes import SyntheticRecords
from murmuration.train.self_test.self_test import SelfTestReport, self_test
from tests.support.train_helpers import ADAMW, SHAPE, LocalEngine, plan_for, private_engine

MICRO_BATCH = 4


def caption_model() -> nn.Module:
    return build(SHAPE, "caption")


def tried(
    ranks: Any, replicated: bool = False, engine: Callable[..., LocalEngine] = LocalEngine,
    change: Callable[[Any, ReferenceClip, AESNoise], Any] | None = None, clip_norm: float = 1.0,
    model: nn.Module | None = None, objective: str = "caption", optimizer: Optimizer = ADAMW,
) -> SelfTestReport:  # fmt: skip
    built, clip, noise = private_engine(
        ranks, plan_for(clip_norm=clip_norm), replicated, model or caption_model(), engine=engine, optimizer=optimizer
    )
    if change is not None:
        noise = change(built, clip, noise) or noise
    records = SyntheticRecords.of(SHAPE, objective)
    return self_test(built, clip, noise, built.ranks_per_copy, records, MICRO_BATCH, ranks)
