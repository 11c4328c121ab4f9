"""The audit without DeepSpeed: the real step, ledger, sampler, clipping and noise on a toy, ranks as threads."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from murmuration.accounting.banded import best_banded
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.epsilon.audit_evidence import Claim
from murmuration.accounting.epsilon.calibrate import calibrate_sigma
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.noise import IndependentNoise
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import CyclicPoisson, Poisson, RandomAllocation
from murmuration.data.draw.micro_batch import EMPTY, MicroBatch
from murmuration.data.draw.poisson import Draw
from murmuration.data.draw.samplers import AllocationSampler
from murmuration.train.audit.audit import Shown, Sightings, WatchedEngine, charged_claim
from murmuration.train.audit.canaries import CanaryBatches, CanaryClip, Coordinates, SilentBatches, WeakenedNoise, toss
from murmuration.train.audit.checks import Check, check_divisor
from murmuration.train.audit.turns import SeenSegment
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.core import PrivateCore
from murmuration.train.noise.choose import over_steps
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


def toy_plan(
    records: int, rate: float, steps: int, claim: float, bands: int = 1, slots: int = 1, again: int = 0,
    sigma: float | None = None,
) -> PrivacyPlan:  # fmt: skip
    """With bands or slots, of as many blocks or epochs, in each of which a record has a turn; `again` of them are made
    a second time."""
    rate = rate if slots == 1 else 1 / slots
    sigma = sigma or calibrate_sigma(Event(rate, 1.0, steps + again, slots=slots), claim, DELTA)
    noise = IndependentNoise() if bands == 1 else best_banded(bands, steps * bands)
    sampling = Poisson(round(rate * 2**32)) if bands == 1 else CyclicPoisson(round(rate * 2**32), bands)
    sampling = sampling if slots == 1 else RandomAllocation(slots)
    return PrivacyPlan(records, sampling, 1.0, sigma, steps * bands * slots, DELTA, claim, noise=noise)


def canary_clip(plan: PrivacyPlan, model: Toy, canaries: int) -> CanaryClip:
    rule = ClipRule.of(plan, "flat", 0.01, MICRO_BATCH)
    return CanaryClip(ReferenceClip(rule), Coordinates.choose(model, canaries))


@dataclass(frozen=True)
class Faults:
    """What may be planted."""

    scale: float = 1.0
    """The ratio of the noise that is drawn to the noise that is claimed."""
    twice: bool = False
    """A record takes part in the step after its own, too."""
    reused: bool = False
    """A second segment draws the noise of the first."""


HONEST = Faults()


@dataclass(frozen=True)
class Twice:
    inner: AllocationSampler

    def draw(self, step: int) -> Draw:
        slots = self.inner.slots
        before = step - 1 if (step - 1) % slots else step + slots - 1
        ids = np.concatenate([self.inner.draw(each).ids for each in (step, before)])
        return self.inner.whole(step, np.sort(ids))


def toy_journal(folder: Path, plan: PrivacyPlan) -> Journal:
    journal = Journal(Ledger.open(folder / "ledger.jsonl"))
    journal.start_run("toy audit", "-", False, {}, "hmac-sha256", "signer")
    journal.declare_plan(0, "private", plan, describe("pld"))
    journal.begin_segment(0, "config", "data", 0, "first")
    return journal


def private_step(
    journal: Journal | None, ranks: Any, plan: PrivacyPlan, canaries: int, keys: Mapping[str, bytes],
    batches: Callable[..., Any], faults: Faults = HONEST, replicated: bool = False, begun_after: int = 0,
) -> PrivateStep:  # fmt: skip
    model = Toy(WIDTH)
    coordinates = Coordinates.choose(model, canaries)
    inner, clip, _ = private_engine(
        ranks, plan, replicated, model, MICRO_BATCH, around_clip=lambda clip: CanaryClip(clip, coordinates)
    )
    engine = WatchedEngine(inner)
    engine.watcher = Sightings(coordinates)
    core = PrivateCore(plan, clip, engine, keys.__getitem__, ranks, begun_after=begun_after)  # pyright: ignore
    noise = core.noise("noise")
    if faults.scale != 1:
        weak = WeakenedNoise(keys["noise"], plan.noise_std, plan.divisor, faults.scale)
        noise = over_steps(weak, plan, begun_after + 1)
    stop: Any = NoStop()
    sampler: Any = core.sampler()
    sampler = Twice(sampler) if faults.twice else sampler
    return core.step(0, journal, Records(sampler.draw, batches), stop, noise=noise)


def toy_keys(names: Sequence[str] = ("sampling", "sampling-digest", "noise")) -> dict[str, bytes]:
    return {name: secrets.token_bytes(32) for name in names}


def sightings(step: PrivateStep) -> Sightings:
    assert isinstance(step.engine, WatchedEngine) and step.engine.watcher is not None
    return step.engine.watcher


def toy_audit(
    folder: Path, faults: Faults = HONEST, world: int = 1, replicated: bool = False, rate: float = 1.0,
    steps: int = STEPS, canaries: int = CANARIES, claim: float = CLAIM, bands: int = 1, slots: int = 1, again: int = 0,
    sigma: float | None = None,
) -> tuple[Shown, Claim]:  # fmt: skip
    """What the canaries show, and what the ledger charges. `again`: how many of the last turns are made again in a
    second segment; `sigma`: not the one that the claim needs."""
    plan = toy_plan(REAL + canaries, rate, steps, claim, bands, slots, again, sigma)
    together = bands * slots
    begun = [0] if not again else [0, plan.steps - again * together + together // 2]
    included, first, second = toss(canaries), toy_keys(), toy_keys()
    keys = [first, second | {"noise": first["noise"]} if faults.reused else second]

    def one(ranks: Any) -> tuple[Shown, Claim | None]:
        batches = CanaryBatches(ToyReader(), ranks, MICRO_BATCH, REAL, included, None)  # pyright: ignore
        journal, seen = toy_journal(folder, plan) if ranks.main else None, []
        bound = 0.0
        for number, after in enumerate(begun):
            if number and journal is not None:
                journal.begin_segment(0, "config", "data", after, "made again")
            step = private_step(journal, ranks, plan, canaries, keys[number], batches, faults, replicated, after)
            assert isinstance(step.clip, CanaryClip)
            known, took_part, bound = [], [], step.clip.rule.bound
            for t in range(after + 1, plan.steps + 1):
                step.run(t, 1e-2)
                known.append(step.clip.take_known())
                took_part.append(batches.took_part(step.records.draw(t).ids))
            values = sightings(step).values(known, plan.divisor, ranks, ranks_per_copy=1 if replicated else 0)
            seen.append(SeenSegment(after + 1, values, np.array(took_part)))
        shown = Shown.by(seen, plan, REAL + np.arange(canaries), included, bound)
        return shown, charged_claim(journal) if journal else None

    shown, charged = on_ranks(world, one)[0]
    assert charged is not None
    return shown, charged


def toy_divisor(folder: Path, world: int = 1, steps: int = 8, records: int = 100) -> Check:
    """Steps of silent records at q = 1/2: noise, and whatever it is divided by."""
    plan = PrivacyPlan(records, Poisson(2**31), 1.0, 1.5, steps, DELTA, epsilon_budget=1e3)
    keys = toy_keys()

    def one(ranks: Any) -> Check:
        example = ToyReader().read(np.arange(MICRO_BATCH), 0)
        journal = toy_journal(folder, plan) if ranks.main else None
        step = private_step(journal, ranks, plan, 2, keys, SilentBatches(example, ranks))
        for t in range(1, steps + 1):
            step.run(t, 0.0)
        squares, elements = sightings(step).sizes_of_noise(ranks, ranks_per_copy=0)
        sizes = np.array([len(step.records.draw(t).ids) for t in range(1, steps + 1)])
        return check_divisor(squares, elements, plan.noise_std, plan.divisor, sizes)

    return on_ranks(world, one)[0]
