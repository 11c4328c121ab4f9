"""The audit without DeepSpeed: the real step, ledger, sampler, clipping and noise on a toy, ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from murmuration.accounting.banded import best_banded
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.epsilon.audit_evidence import Claim, Evidence, collect
from murmuration.accounting.epsilon.audit_pairs import pairs_of
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.draw.micro_batch import EMPTY, MicroBatch
from murmuration.train.audit.audit import charged_claim
from murmuration.train.audit.canaries import CanaryBatches, CanaryClip, Coordinates, SilentBatches, WeakenedNoise, toss
from murmuration.train.audit.checks import Check, check_divisor
from murmuration.train.audit.sightings import Sightings, WatchedEngine
from murmuration.train.audit.turns import by_turn
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.noise.correlated import CorrelatedNoise
from murmuration.train.private import PrivateCore
from murmuration.train.step import PrivateStep, Records
from tests.support.train_helpers import Toy, on_ranks, private_engine

WIDTH = 48  # more parameters than canaries
REAL, CANARIES, MICRO_BATCH, STEPS, CLAIM, DELTA = 40, 2000, 128, 4, 2.0, 1e-5


class NoStop:
    def until_asked(self, micro_batches: Any, ranks: Any, each: bool) -> Any:
        del ranks, each
        return micro_batches


class ToyReader:
    """Records by chance; an id of -1 is padding."""

    def read(self, row: np.ndarray, step: int) -> MicroBatch:
        del step
        images = torch.randn(len(row), 3, 4, 4, generator=torch.Generator().manual_seed(int(row.max()) + 2))
        there = torch.from_numpy(row != EMPTY)
        return MicroBatch({"images": torch.where(there.view(-1, 1, 1, 1), images, 0.0)}, there)


def toy_plan(records: int, rate: float, steps: int, claim: float, bands: int = 1) -> PrivacyPlan:
    """With bands, of as many blocks, in each of which a record has a turn at the rate."""
    sigma = calibrate_sigma(rate, steps, claim, DELTA)
    banded = None if bands == 1 else best_banded(bands, steps * bands)
    return PrivacyPlan(records, round(rate * 2**32), 1.0, sigma, steps * bands, DELTA, claim, banded=banded)


def canary_clip(plan: PrivacyPlan, model: Toy, canaries: int) -> CanaryClip:
    rule = ClipRule.of(plan, "flat", 0.01, MICRO_BATCH)
    return CanaryClip(ReferenceClip(rule), Coordinates.choose(model, canaries))


def private_step(
    folder: Path, ranks: Any, plan: PrivacyPlan, canaries: int, noise_key: bytes, batches: Callable[..., Any],
    scale: float = 1.0, replicated: bool = False,
) -> PrivateStep:  # fmt: skip
    journal = None
    if ranks.main:
        journal = Journal(Ledger.open(folder / "ledger.jsonl"))
        journal.start_run("toy audit", "-", False, {})
        journal.declare_plan(0, "private", plan, describe("pld"))
        journal.begin_segment(0, "config", "data", 0, "first")
    model = Toy(WIDTH)
    coordinates = Coordinates.choose(model, canaries)
    inner, clip, _ = private_engine(
        ranks, plan, replicated, model, MICRO_BATCH, around_clip=lambda clip: CanaryClip(clip, coordinates)
    )
    engine = WatchedEngine(inner)
    engine.watcher = Sightings(coordinates)
    keys = {"sampling": folder.name.encode().ljust(32, b"k")[:32], "sampling-digest": b"d" * 32, "noise": noise_key}
    core = PrivateCore(plan, clip, engine, keys.__getitem__, ranks)
    noise = core.noise("noise")
    if scale != 1:
        weak = WeakenedNoise(noise_key, plan.noise_std, plan.divisor, scale)
        noise = weak if plan.banded is None else CorrelatedNoise(weak, plan.banded, first=1)
    stop: Any = NoStop()
    return core.step(0, journal, Records(core.sampler().draw, batches), stop, noise=noise)


def sightings(step: PrivateStep) -> Sightings:
    assert isinstance(step.engine, WatchedEngine) and step.engine.watcher is not None
    return step.engine.watcher


def toy_audit(
    folder: Path, scale: float = 1.0, world: int = 1, replicated: bool = False, rate: float = 1.0, steps: int = STEPS,
    canaries: int = CANARIES, claim: float = CLAIM, bands: int = 1, sigma: float | None = None,
) -> tuple[Evidence, Claim]:  # fmt: skip
    """What the canaries show, and what the ledger charges. `sigma`: not the one that the claim needs."""
    plan = toy_plan(REAL + canaries, rate, steps, claim, bands)
    plan = plan if sigma is None else replace(plan, noise_multiplier=sigma)
    included, key = toss(canaries), toss(32).tobytes()

    def one(ranks: Any) -> tuple[Evidence, Claim | None]:
        batches = CanaryBatches(ToyReader(), ranks, MICRO_BATCH, REAL, included, None)  # pyright: ignore
        step = private_step(folder, ranks, plan, canaries, key, batches, scale, replicated)
        assert isinstance(step.clip, CanaryClip)
        known, took_part = [], []
        for t in range(1, plan.steps + 1):
            step.run(t, 1e-2)
            known.append(step.clip.take_known())
            took_part.append(batches.took_part(step.records.draw(t).ids))
        values = sightings(step).values(known, plan.divisor, ranks, ranks_per_copy=1 if replicated else 0)
        part = np.array(took_part)
        if plan.banded is not None:
            values, part = by_turn(values, part, plan.banded, REAL + np.arange(canaries))
        evidence = collect(values.sum(axis=0), included, pairs_of(values, part))
        return evidence, charged_claim(step.record.journal) if step.record.journal else None

    evidence, charged = on_ranks(world, one)[0]
    assert charged is not None
    return evidence, charged


def toy_divisor(folder: Path, world: int = 1, steps: int = 8, records: int = 100) -> Check:
    """Steps of silent records at q = 1/2: noise, and whatever it is divided by."""
    plan = PrivacyPlan(records, 2**31, 1.0, 1.5, steps, DELTA, epsilon_budget=1e3)
    key = toss(32).tobytes()

    def one(ranks: Any) -> Check:
        example = ToyReader().read(np.arange(MICRO_BATCH), 0)
        step = private_step(folder, ranks, plan, 2, key, SilentBatches(example, ranks))
        for t in range(1, steps + 1):
            step.run(t, 0.0)
        squares, elements = sightings(step).sizes_of_noise(ranks, ranks_per_copy=0)
        sizes = np.array([len(step.records.draw(t).ids) for t in range(1, steps + 1)])
        return check_divisor(squares, elements, plan.noise_std, plan.divisor, sizes)

    return on_ranks(world, one)[0]
