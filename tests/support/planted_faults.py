"""Faults of engines, noise and clipping, for the self-test to catch: each breaks one promise and hides it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import Clipped, Precision
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.clip.sums import GradientSums
from murmuration.train.engines.base import AppliedUpdate
from murmuration.train.engines.forward import PrivateForward
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.update import NoisyUpdate, Update
from tests.support.train_helpers import LocalEngine


class NoiseTwice(LocalEngine):
    def finish(self, update: Update) -> None:
        super().finish(update)
        inner = getattr(update, "inner", update)
        if isinstance(inner, NoisyUpdate):
            again = NoisyUpdate(AESNoise(b"2" * 32, inner.mechanism.std, inner.mechanism.divisor), inner.step)
            for flat, fragments in zip(self.flats, self.layout, strict=True):
                extra = torch.zeros_like(flat)
                again.finish(extra, fragments)
                assert flat.grad is not None
                flat.grad.add_(extra)
        refill(update, self)


class ChangedAfterwards(LocalEngine):
    """Something scales single gradients between the noise and the optimizer, unseen by the hook."""

    def step(self) -> None:
        for flat in self.flats:
            assert flat.grad is not None
            flat.grad[::2] *= 0.5
        super().step()


class HookLost(LocalEngine):
    """The optimizer steps on the raw sum; nobody is asked."""

    def finish(self, update: Update) -> None:
        del update


class HalfHook(LocalEngine):
    """A part of the fragments never reaches the update, and the count is faked."""

    def finish(self, update: Update) -> None:
        flat, fragments = self.flats[0], self.layout[0]
        assert flat.grad is not None
        update.finish(flat.grad, fragments[:-1])
        inner = getattr(update, "inner", update)
        inner.elements += fragments[-1].length


class NoiseBeforeSum(LocalEngine):
    """Every rank noises its own sum with its own stream, and then the sums are added."""

    def reduce(self) -> None:
        pass

    def finish(self, update: Update) -> None:
        super().finish(update)
        for p in self.parameters.values():
            assert p.grad is not None
            self.ranks.add(p.grad)
        refill(update, self)


def refill(update: Any, engine: LocalEngine) -> None:
    """What the capture kept becomes what the optimizer will really see."""
    if hasattr(update, "found"):
        update.found = [
            (fragment, fragment.of(flat.grad).detach().clone())
            for flat, fragments in zip(engine.flats, engine.layout, strict=True)
            for fragment in fragments
            if flat.grad is not None
        ]


class Mean(LocalEngine):
    """Averages over ranks instead of adding."""

    def reduce(self) -> None:
        super().reduce()
        for p in {*self.flats, *self.parameters.values()}:
            if p.grad is not None:
                p.grad /= self.ranks.world


class OwnRankOnly(LocalEngine):
    def reduce(self) -> None:
        whole, self.ranks.add = self.ranks.add, lambda tensor: tensor
        try:
            super().reduce()
        finally:
            self.ranks.add = whole


class LastMicroBatch(LocalEngine):
    """Overwrites in place of accumulating (DeepSpeed's stage 3 through engine.module)."""

    def accumulate(self, batch: MicroBatch, rule: ClipRule | None = None) -> None:
        assert isinstance(self.forward, PrivateForward)
        self.forward.sums.clear()
        super().accumulate(batch, rule)


class StaleGradient(LocalEngine):
    """Keeps a share of each step's sum for the next one."""

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        assert isinstance(self.forward, PrivateForward)
        sums = self.forward.sums
        kept = {name: total * 0.5 for name, total in sums.totals.items()}
        applied = super().update(update, learning_rate)
        for name, total in kept.items():
            sums.add(name, total)
        return applied


class Untrained(LocalEngine):
    """The engine's sum never reaches one parameter."""

    def reduce(self) -> None:
        self.parameters["cls_token" if "cls_token" in self.parameters else next(iter(self.parameters))].grad.zero_()  # pyright: ignore
        super().reduce()


class Unmoved(LocalEngine):
    """The optimizer puts one parameter back."""

    def step(self) -> None:
        kept = self.flats[0].detach().clone()
        super().step()
        fragment = self.layout[0][0]
        with torch.no_grad():
            fragment.of(self.flats[0]).copy_(fragment.of(kept))


class MovesAtRateZero(LocalEngine):
    def step(self) -> None:
        super().step()
        with torch.no_grad():
            self.flats[0].add_(1e-6)


class ModelDrifts(LocalEngine):
    """The shards are right, and the model that computes is not."""

    def update(self, update: Update, learning_rate: float) -> AppliedUpdate:
        applied = super().update(update, learning_rate)
        with torch.no_grad():
            next(iter(self.parameters.values())).view(-1)[0] += 1e-6
        return applied


class KeepsState(LocalEngine):
    def set_optimizer_step(self, step: int) -> None:
        if step:
            super().set_optimizer_step(step)


class Gap(LocalEngine):
    """Two elements are covered twice and two never: the count is right all the same."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        fragments = self.layout[0]
        if self.ranks.rank == self.ranks.world - 1:
            first = fragments[0]
            fragments[0] = dataclasses.replace(first, start=first.start - 2)


class EqualPerRank(AESNoise):
    """Keyed by the place in the shard, not in the parameter: shards of all ranks draw the same."""

    count = 0

    def draw(self, step: int, parameter: int, start: int, length: int, dtype: Any = np.float32) -> np.ndarray:
        self.count += 1
        return super().draw(step, self.count % 1000, 0, length, dtype)


class EqualPerParameter(AESNoise):
    def draw(self, step: int, parameter: int, start: int, length: int, dtype: Any = np.float32) -> np.ndarray:
        return super().draw(step, 0, start, length, dtype)


class EqualPerStep(AESNoise):
    def draw(self, step: int, parameter: int, start: int, length: int, dtype: Any = np.float32) -> np.ndarray:
        return super().draw(0, parameter, start, length, dtype)


class OwnPerRank(AESNoise):
    def __init__(self, key: bytes, std: float, divisor: float, rank: int) -> None:
        super().__init__(bytes([rank]) * 32, std, divisor)


class Scaled(AESNoise):
    factor = 1.0

    def draw(self, step: int, parameter: int, start: int, length: int, dtype: Any = np.float32) -> np.ndarray:
        return super().draw(step, parameter, start, length, dtype) * self.factor


def scaled(factor: float) -> Callable[..., AESNoise]:
    def change(engine: Any, clip: Any, noise: AESNoise) -> AESNoise:
        faulty = Scaled(b"s" * 32, noise.std, noise.divisor)
        faulty.factor = factor
        return faulty

    return change


def swapped(kind: type[AESNoise]) -> Callable[..., AESNoise]:
    return lambda engine, clip, noise: kind(b"s" * 32, noise.std, noise.divisor)


def factor_ignored(engine: Any, clip: ReferenceClip, noise: Any) -> None:
    real = clip.add_clipped

    def unclipped(
        model: nn.Module, inputs: Any, present: Tensor, sums: GradientSums, rule: ClipRule | None = None
    ) -> Clipped:  # fmt: skip
        own = rule or clip.rule
        far = dataclasses.replace(own, kind="flat", bound=1e12)
        return dataclasses.replace(real(model, inputs, present, sums, far), sensitivity=own.sensitivity)

    clip.add_clipped = unclipped


def factor_halved(engine: Any, clip: ReferenceClip, noise: Any) -> None:
    """One record moves the sum by 2C."""
    real = clip.add_clipped

    def doubled(
        model: nn.Module, inputs: Any, present: Tensor, sums: GradientSums, rule: ClipRule | None = None
    ) -> Clipped:  # fmt: skip
        real(model, inputs, present, sums, rule)
        return real(model, inputs, present, sums, rule)

    clip.add_clipped = doubled


def nan_leaks(engine: Any, clip: ReferenceClip, noise: Any) -> None:
    real = clip.add_clipped

    def leaking(
        model: nn.Module, inputs: Any, present: Tensor, sums: GradientSums, rule: ClipRule | None = None
    ) -> Clipped:  # fmt: skip
        found = real(model, inputs, present, sums, rule)
        poison = torch.where(present & ~torch.isfinite(found.losses), torch.nan, 0.0).sum()
        for name, p in model.named_parameters():
            if p.requires_grad:
                sums.add(name, poison.expand_as(p))
        return found

    clip.add_clipped = leaking


def losses_mixed(engine: Any, clip: ReferenceClip, noise: Any) -> None:
    """The loss of each record holds a little of all others'."""
    real = clip.add_clipped

    def mixing(*given: Any, **options: Any) -> Clipped:
        found = real(*given, **options)
        return dataclasses.replace(found, losses=found.losses + 1e-3 * found.losses.nan_to_num().mean())

    clip.add_clipped = mixing


class DividesByRealised(LocalEngine):
    """Divides once more, by the share of records that really came."""

    def finish(self, update: Update) -> None:
        super().finish(update)
        for flat in self.flats:
            assert flat.grad is not None
            flat.grad /= 1.5
        refill(update, self)


def own_stream(engine: Any, clip: Any, noise: AESNoise) -> AESNoise:
    return OwnPerRank(b"", noise.std, noise.divisor, engine.ranks.rank)


class OffBy(BookKeepingClip):
    """Gradients, or the norms alone, that are a few percent off: in half precision only, or always."""

    def __init__(
        self, precision: Precision, rule: ClipRule, sums: float = 1.0, norms: float = 1.0, always: bool = False,
        clipped_by: bool = False, **how: Any,
    ) -> None:  # fmt: skip
        """`clipped_by`: what was measured is right, and the norms that clip are made of it."""
        super().__init__(rule, precision, **how)
        self.clipped_by = clipped_by
        self.times_sums, self.times_norms, self.always = sums, norms, always

    def add_clipped(
        self, model: nn.Module, inputs: Mapping[str, Tensor], present: Tensor, sums: GradientSums,
        rule: ClipRule | None = None,
    ) -> Clipped:  # fmt: skip
        if self.precision == "fp32" and not self.always:
            return super().add_clipped(model, inputs, present, sums, rule)
        found = super().add_clipped(model, inputs, present, _Times(sums, self.times_sums), rule)
        measured = None if found.measured is None else found.measured * (1.0 if self.clipped_by else self.times_norms)
        return dataclasses.replace(found, norms=found.norms * self.times_norms, measured=measured)


class _Times:
    def __init__(self, sums: GradientSums, factor: float) -> None:
        self.sums, self.factor = sums, factor

    def add(self, name: str, value: Tensor) -> None:
        self.sums.add(name, value * self.factor)

    def add_product(self, name: str, left: Tensor, right: Tensor, at_once: int | None = None) -> None:
        self.sums.add_product(name, left.float() * self.factor, right.float(), at_once)
