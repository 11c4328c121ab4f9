"""A private step with a real ledger on 400 random records: what tests of the step and of what acts in it stand on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_helpers import LocalEngine, private_engine

from accounting.journal import Journal
from accounting.ledger import Ledger
from accounting.plan import PrivacyPlan
from data.batches import MicroBatch, slots
from data.sampler import PoissonSampler
from train.step import PrivateStep
from train.stop import Stopped

KEY, DIGEST_KEY = b"k" * 32, b"d" * 32
RECORDS = torch.randn(400, 3, 4, 4, generator=torch.Generator().manual_seed(1))


class Stop:
    """Asks to stop at the n-th micro-batch."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.count = at, 0

    def check(self, ranks: Any) -> None:
        self.count += 1
        if self.count == self.at:
            raise Stopped("test")


def read(ids: np.ndarray, ranks: Any, micro_batch: int = 8) -> Iterator[MicroBatch]:
    for row in slots(ids, ranks.rank, ranks.world, micro_batch):
        present = torch.from_numpy(row >= 0)
        images = torch.where(present.view(-1, 1, 1, 1), RECORDS[torch.from_numpy(row).clamp(min=0)], 0.0)
        yield MicroBatch({"images": images}, present)


def journal_at(path: Path, plan: PrivacyPlan, begin: bool = True) -> Journal:
    journal = Journal(Ledger.open(path / "ledger.jsonl"))
    if begin:
        journal.start_run("toy", "check", False, {})
        journal.declare_plan(0, "private", plan, {"accountant": "pld"})
        journal.begin_segment(0, "config", "data", 0, "first", salt="salt")
    return journal


def step_of(
    ranks: Any, journal: Journal | None, plan: PrivacyPlan, stop: Any = None, replicated: bool = False, **changes: Any
) -> tuple[PrivateStep, LocalEngine]:
    engine, clip, noise = private_engine(ranks, plan, replicated)
    sampler = PoissonSampler(KEY, DIGEST_KEY, plan.records, plan.threshold)
    parts: dict[str, Any] = {"sampler": sampler, "clip": clip, "noise": noise} | changes
    step = PrivateStep(
        0, journal, parts["sampler"], parts["clip"], parts["noise"], engine, ranks, stop or Stop(),
        lambda ids, step: read(ids, ranks),
    )  # fmt: skip
    return step, engine


def kinds(journal: Journal) -> list[str]:
    return [entry.kind for entry in journal.ledger.entries][3:]


def weights(engine: LocalEngine) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in engine.parameters.values()])
