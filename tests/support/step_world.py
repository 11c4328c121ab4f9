"""A private step with a real ledger on 400 random records: what tests of the step and of what acts in it stand on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.draw.micro_batch import MicroBatch, slots
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.train.core import PrivateCore
from murmuration.train.distributed.stop import Stopped
from murmuration.train.step import PrivateStep, Records
from tests.support.train_helpers import NOISE_KEY, LocalEngine, private_engine

KEY, DIGEST_KEY, METRIC_KEY = b"k" * 32, b"d" * 32, b"m" * 32
KEYS = {"sampling": KEY, "sampling-digest": DIGEST_KEY, "noise": NOISE_KEY, "metric-noise": METRIC_KEY}
RECORDS = torch.randn(400, 3, 4, 4, generator=torch.Generator().manual_seed(1))


class Stop:
    """Asks to stop at the n-th micro-batch."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.count, self.each = at, 0, set[bool]()

    def until_asked(self, micro_batches: Iterator[MicroBatch], ranks: Any, each: bool) -> Iterator[MicroBatch]:
        self.each.add(each)
        for micro_batch in micro_batches:
            self.count += 1
            if self.count == self.at:
                raise Stopped("test")
            yield micro_batch


def read(ids: np.ndarray, ranks: Any, micro_batch: int = 8) -> Iterator[MicroBatch]:
    for row in slots(ids, ranks.rank, ranks.world, micro_batch):
        present = torch.from_numpy(row >= 0)
        images = torch.where(present.view(-1, 1, 1, 1), RECORDS[torch.from_numpy(row).clamp(min=0)], 0.0)
        yield MicroBatch({"images": images}, present)


def journal_at(path: Path, plan: PrivacyPlan, begin: bool = True) -> Journal:
    journal = Journal(Ledger.open(path / "ledger.jsonl"))
    if begin:
        journal.start_run("toy", "check", False, {}, "hmac-sha256", "signer")
        journal.declare_plan(0, "private", plan, {"accountant": "pld"})
        journal.begin_segment(0, "config", "data", 0, "first", salt="salt")
    return journal


def step_of(
    ranks: Any, journal: Journal | None, plan: PrivacyPlan, stop: Any = None, replicated: bool = False,
    sampler: PoissonSampler | None = None, first_norm: float | None = None,
) -> tuple[PrivateStep, LocalEngine]:  # fmt: skip
    engine, clip, noise = private_engine(ranks, plan, replicated)
    core = PrivateCore(plan, clip, engine, KEYS.__getitem__, ranks)
    records = Records((sampler or core.sampler()).draw, lambda ids, step: read(ids, ranks))
    # Drawn ahead where C adapts, as in a run; else the mechanism itself, for tests that look at it or change it.
    ahead = first_norm is not None
    step = core.step(0, journal, records, stop or Stop(), first_norm=first_norm, noise=None if ahead else noise)
    return step, engine


def kinds(journal: Journal) -> list[str]:
    return [entry.kind for entry in journal.ledger.entries][3:]


def weights(engine: LocalEngine) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in engine.parameters.values()])
