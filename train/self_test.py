"""Proof at every start, on the live engine with synthetic records: clipped, noised once, bounded, all trained.

It runs before the first private record is read and leaves weights and optimizer as they were, bit by bit. Its
noise comes from its own key. A run that fails it does not start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batches import MicroBatch
from model.safety import CouplingError, coupling_probe, refuse_coupling
from model.settings import Shape
from train.clip import ClipEngine
from train.engine import ShardedEngine
from train.gradient import Fragment, NoisyUpdate, PlainUpdate, Update
from train.noise import NoiseMechanism
from train.ranks import Ranks

SIGMA_TOLERANCE = 0.05
HOSTILE = {"1e19": 1e19, "NaN": math.nan, "infinite": math.inf, "1e-25": 1e-25}


class SelfTestError(RuntimeError):
    """The machinery does not do what the ledger would say; the run must not start."""


@dataclass(frozen=True)
class SelfTestReport:
    measured_sigma: float
    largest_hostile: float
    records_per_second: float


class _Capture:
    """Lets the real update work on the gradient, and keeps what it made of it."""

    def __init__(self, inner: Update) -> None:
        self.inner = inner
        self.found: list[tuple[Fragment, Tensor]] = []

    @property
    def elements(self) -> int:
        return self.inner.elements

    def finish(self, flat: Tensor, fragments: Sequence[Fragment]) -> None:
        self.inner.finish(flat, fragments)
        self.found += [(fragment, fragment.of(flat).detach().cpu().clone()) for fragment in fragments]


def synthetic_batch(shape: Shape, objective: str, size: int, seed: int) -> MicroBatch:
    """Random inputs of the right form; nothing of any data set."""
    draw = torch.Generator().manual_seed(seed)
    inputs = {"images": torch.randn(size, 3, shape.image_size, shape.image_size, generator=draw)}
    if objective == "mae":
        inputs["mask_noise"] = torch.rand(size, shape.patches, generator=draw)
    else:
        inputs["tokens"] = torch.randint(1, shape.vocabulary, (size, shape.text_length), generator=draw)
    return MicroBatch(inputs, torch.ones(size, dtype=torch.bool))


def self_test(
    engine: ShardedEngine, clip: ClipEngine, noise: NoiseMechanism, replicated: bool, shape: Shape,
    objective: str, micro_batch: int, ranks: Ranks,
) -> SelfTestReport:  # fmt: skip
    """`noise` has the planned deviation and divisor but the self-test's key."""
    batch = synthetic_batch(shape, objective, micro_batch, seed=ranks.rank).to(engine.device)
    _coupling(engine, batch)
    before = [shard.weights.detach().clone() for shard in engine.shards()]
    largest = _hostile(engine, clip, batch)

    absent = MicroBatch(batch.inputs, torch.zeros_like(batch.present))
    engine.accumulate(absent)
    captured = _Capture(NoisyUpdate(noise, step=1))
    engine.update(captured, learning_rate=0.0)
    sigma = _measured_sigma(captured, noise, clip, replicated, ranks)

    engine.accumulate(batch)
    started = time.monotonic()
    engine.accumulate(batch)
    engine.accumulate(batch)
    seconds = max(ranks.gather(time.monotonic() - started))
    gradients = _Capture(PlainUpdate(3 * micro_batch * ranks.world))
    engine.update(gradients, learning_rate=0.0)
    _all_trained(engine, gradients, ranks)

    engine.set_optimizer_step(0)
    for shard, kept in zip(engine.shards(), before, strict=True):
        if not torch.equal(shard.weights.detach(), kept):
            raise SelfTestError("the self-test changed the weights; the optimizer moves at learning rate 0")
    return SelfTestReport(sigma, largest, 2 * micro_batch * ranks.world / seconds)


def _coupling(engine: ShardedEngine, batch: MicroBatch) -> None:
    try:
        refuse_coupling(engine.model)
        few = {name: tensor[:3] for name, tensor in batch.inputs.items()}
        # Kernels on a GPU may not be bitwise independent of the row; on a CPU they are.
        coupling_probe(engine.model, few, tolerance=0.0 if engine.device.type == "cpu" else 1e-5)
    except CouplingError as error:
        raise SelfTestError(f"records are not independent: {error}") from None


def _hostile(engine: ShardedEngine, clip: ClipEngine, batch: MicroBatch) -> float:
    """How far one hostile record moves the sum of its micro-batch, in units of C."""
    without = batch.present.clone()
    without[0] = False
    base = clip.clipped_sum(engine.model, batch.inputs, without).gradients
    largest = 0.0
    for name, value in HOSTILE.items():
        images = batch.inputs["images"].clone()
        images[0] = images[0] * value
        moved = clip.clipped_sum(engine.model, {**batch.inputs, "images": images}, batch.present).gradients
        squares = sum(float((moved[k].double() - base[k].double()).square().sum()) for k in base)
        distance = math.sqrt(squares) / clip.rule.sensitivity
        if not distance <= 1.0:
            raise SelfTestError(f"a hostile record ({name}) moved the sum by {distance:.3f}·C; clipping does not hold")
        largest = max(largest, distance)
    return largest


def _measured_sigma(
    captured: _Capture, noise: NoiseMechanism, clip: ClipEngine, replicated: bool, ranks: Ranks
) -> float:
    """From an empty step: what reached the optimizer is noise and nothing else."""
    values = torch.cat([values for _, values in captured.found]).double() if captured.found else torch.zeros(0)
    parts = ranks.gather((len(values), float(values.square().sum()), values[:64].tolist()))
    count, squares = sum(part[0] for part in parts), sum(part[1] for part in parts)
    measured = math.sqrt(squares / max(1, count)) * noise.divisor / clip.rule.sensitivity
    planned = noise.std / clip.rule.sensitivity
    if not abs(measured - planned) <= SIGMA_TOLERANCE * planned:
        raise SelfTestError(f"the noise has sigma = {measured:.4f} where {planned:.4f} is planned")
    heads = [tuple(part[2]) for part in parts if part[2]]
    if len(set(heads)) != (1 if replicated else len(heads)):
        raise SelfTestError(
            "replicas drew different noise" if replicated else "two ranks drew the same noise for different elements"
        )
    return measured


def _all_trained(engine: ShardedEngine, gradients: _Capture, ranks: Ranks) -> None:
    moved = {fragment.name for fragment, values in gradients.found if bool((values != 0).any())}
    reached = set().union(*ranks.gather(moved))
    declared = {name for name, p in engine.model.named_parameters() if p.requires_grad}
    if reached != declared:
        odd = ", ".join(sorted(declared ^ reached)[:3])
        raise SelfTestError(f"the trained set is not the declared one: {odd} … get no gradient")
