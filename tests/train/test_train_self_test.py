"""The self-test at start-up: an honest machine passes and is left as it was; every planted fault is caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from self_test_world import caption_model, tried
from torch import Tensor, nn
from train_helpers import SHAPE, LocalEngine, alone, on_ranks, plan_for, private_engine

from data.batches import MicroBatch
from model.build import build
from train.clip import Clipped
from train.clip_reference import ReferenceClip
from train.engine import Applied
from train.forward import PrivateForward
from train.gradient import NoisyUpdate, Update
from train.noise import NoiseMechanism
from train.probes import synthetic_batch
from train.self_test import SelfTestError, self_test
from train.sums import GradientSums


@pytest.mark.parametrize("objective", ["caption", "mae"])
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_an_honest_engine_passes_and_is_left_bit_by_bit_as_it_was(objective: str, micro_batch: int) -> None:
    model = build(SHAPE, objective)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with torch.no_grad():  # as after some training: no zeros left
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * 0.01)
    engine, clip, noise = private_engine(alone(), plan_for(), False, model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flat, rule = engine.flats[0].detach().clone(), clip.rule
    torch.manual_seed(5)
    state = torch.get_rng_state()
    report = self_test(engine, clip, noise, False, SHAPE, objective, micro_batch, alone())
    assert report.measured_sigma == pytest.approx(1.5, rel=0.05)
    assert 0 < report.largest_hostile <= 1 and report.records_per_second > 0
    after = model.state_dict()
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    assert torch.equal(engine.flats[0], flat) and clip.rule is rule
    assert engine.optimizer_step() == 0 and not engine.base.state
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("replicated", [False, True])
def test_honest_ranks_pass_together(world: int, replicated: bool) -> None:
    reports = on_ranks(world, lambda ranks: tried(ranks, replicated))
    assert len({report.measured_sigma for report in reports}) == 1


def test_the_noise_of_the_self_test_is_its_own() -> None:
    """What it draws must come from the key it is given, never from the run's noise key."""
    used: list[tuple[int, int]] = []

    class Spy(NoiseMechanism):
        def draw(self, step: int, parameter: int, start: int, length: int, dtype: Any = np.float32) -> np.ndarray:
            used.append((step, parameter))
            return super().draw(step, parameter, start, length, dtype)

    tried(alone(), change=lambda e, c, n: Spy(b"t" * 32, n.std, n.divisor))
    assert used


@pytest.mark.parametrize("kind", ["AdamW", "LAMB", "SGD", "LARS"])
def test_every_optimizer_passes_and_shows_what_changes_the_gradient_after_the_noise(kind: Any) -> None:
    honest = type("Honest", (LocalEngine,), {"optimizer": kind})
    tampered = type("Tampered", (ChangedAfterwards,), {"optimizer": kind})
    tried(alone(), engine=honest)
    on_ranks(2, lambda ranks: tried(ranks, engine=honest))
    with pytest.raises(SelfTestError, match="after the noise"):
        tried(alone(), engine=tampered)


# The planted faults


class NoiseTwice(LocalEngine):
    def finish(self, update: Update) -> None:
        super().finish(update)
        inner = getattr(update, "inner", update)
        if isinstance(inner, NoisyUpdate):
            again = NoisyUpdate(NoiseMechanism(b"2" * 32, inner.mechanism.std, inner.mechanism.divisor), inner.step)
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

    def accumulate(self, batch: MicroBatch) -> None:
        assert isinstance(self.forward, PrivateForward)
        self.forward.sums.clear()
        super().accumulate(batch)


class StaleGradient(LocalEngine):
    """Keeps a share of each step's sum for the next one."""

    def update(self, update: Update, learning_rate: float) -> Applied:
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

    def update(self, update: Update, learning_rate: float) -> Applied:
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


class EqualPerRank(NoiseMechanism):
    """Keyed by the place in the shard, not in the parameter: shards of all ranks draw the same."""

    count = 0

    def draw(self, step: int, parameter: int, start: int, length: int, dtype: Any = np.float32) -> np.ndarray:
        self.count += 1
        return super().draw(step, self.count % 1000, 0, length, dtype)


class EqualPerParameter(NoiseMechanism):
    def draw(self, step: int, parameter: int, start: int, length: int, dtype: Any = np.float32) -> np.ndarray:
        return super().draw(step, 0, start, length, dtype)


class EqualPerStep(NoiseMechanism):
    def draw(self, step: int, parameter: int, start: int, length: int, dtype: Any = np.float32) -> np.ndarray:
        return super().draw(0, parameter, start, length, dtype)


class OwnPerRank(NoiseMechanism):
    def __init__(self, key: bytes, std: float, divisor: float, rank: int) -> None:
        super().__init__(bytes([rank]) * 32, std, divisor)


class Scaled(NoiseMechanism):
    factor = 1.0

    def draw(self, step: int, parameter: int, start: int, length: int, dtype: Any = np.float32) -> np.ndarray:
        return super().draw(step, parameter, start, length, dtype) * self.factor


def scaled(factor: float) -> Callable[..., NoiseMechanism]:
    def change(engine: Any, clip: Any, noise: NoiseMechanism) -> NoiseMechanism:
        faulty = Scaled(b"s" * 32, noise.std, noise.divisor)
        faulty.factor = factor
        return faulty

    return change


def swapped(kind: type[NoiseMechanism]) -> Callable[..., NoiseMechanism]:
    return lambda engine, clip, noise: kind(b"s" * 32, noise.std, noise.divisor)


def factor_ignored(engine: Any, clip: ReferenceClip, noise: Any) -> None:
    real = clip.add_clipped

    def unclipped(model: nn.Module, inputs: Any, present: Tensor, sums: GradientSums) -> Clipped:
        rule, clip.rule = clip.rule, dataclasses.replace(clip.rule, kind="flat", bound=1e12)
        try:
            return dataclasses.replace(real(model, inputs, present, sums), sensitivity=rule.sensitivity)
        finally:
            clip.rule = rule

    clip.add_clipped = unclipped


def factor_halved(engine: Any, clip: ReferenceClip, noise: Any) -> None:
    """One record moves the sum by 2C."""
    real = clip.add_clipped

    def doubled(model: nn.Module, inputs: Any, present: Tensor, sums: GradientSums) -> Clipped:
        real(model, inputs, present, sums)
        return real(model, inputs, present, sums)

    clip.add_clipped = doubled


def nan_leaks(engine: Any, clip: ReferenceClip, noise: Any) -> None:
    real = clip.add_clipped

    def leaking(model: nn.Module, inputs: Any, present: Tensor, sums: GradientSums) -> Clipped:
        found = real(model, inputs, present, sums)
        poison = torch.where(present & ~torch.isfinite(found.losses), torch.nan, 0.0).sum()
        for name, p in model.named_parameters():
            if p.requires_grad:
                sums.add(name, poison.expand_as(p))
        return found

    clip.add_clipped = leaking


class DividesByRealised(LocalEngine):
    """Divides once more, by the share of records that really came."""

    def finish(self, update: Update) -> None:
        super().finish(update)
        for flat in self.flats:
            assert flat.grad is not None
            flat.grad /= 1.5
        refill(update, self)


class Coupled(nn.Module):
    """A loss that is centred over the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Any) -> Tensor:
        losses = self.inner(inputs)
        return losses - 0.1 * losses.mean()


class Normalised(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(1)

    def forward(self, inputs: Any) -> Tensor:
        return self.norm(self.inner(inputs)[:, None])[:, 0]


ONE_RANK: dict[str, tuple[dict[str, Any], str]] = {
    "the hook is lost": ({"engine": HookLost}, "elements were finished"),
    "noise dropped": ({"change": scaled(0.0)}, "sigma = 0.0000"),
    "sigma x 0.3": ({"change": scaled(0.3)}, "sigma = 0.4"),
    "sigma x 0.9": ({"change": scaled(0.9)}, "sigma = 1.3"),
    "noise added twice": ({"engine": NoiseTwice}, "sigma = 2.1"),
    "a part without noise": ({"engine": HalfHook}, "no noise"),
    "equal noise on all parameters": ({"change": swapped(EqualPerParameter)}, "same noise was drawn"),
    "equal noise at all steps": ({"change": swapped(EqualPerStep)}, "same noise was drawn"),
    "clip factor ignored": ({"change": factor_ignored}, "clipping does not hold"),
    "sensitivity 2C": ({"change": factor_halved}, "clipping does not hold"),
    "NaN leaks": ({"change": nan_leaks}, "moved the sum by nan"),
    "one parameter gets no gradient": ({"engine": Untrained}, "get no gradient"),
    "one parameter never moves": ({"engine": Unmoved}, "does not move"),
    "accumulation overwrites": ({"engine": LastMicroBatch}, "reduced sum differs"),
    "a gradient is left over": ({"engine": StaleGradient}, "sigma|left|keeps a gradient|reduced sum"),
    "the gradient is changed after the noise": ({"engine": ChangedAfterwards}, "after the noise was added"),
    "weights move at rate 0": ({"engine": MovesAtRateZero}, "changed the weights"),
    "the model drifts from its shards": ({"engine": ModelDrifts}, "changed the weights"),
    "optimizer state is kept": ({"engine": KeepsState}, "optimizer's state"),
    "divided by another number": ({"engine": DividesByRealised}, "sigma = 1.0"),
}


@pytest.mark.parametrize("fault", ONE_RANK)
def test_a_planted_fault_is_caught(fault: str) -> None:
    options, message = ONE_RANK[fault]
    with pytest.raises(SelfTestError, match=message):
        tried(alone(), **options)


@pytest.mark.parametrize("fault", ["clip factor ignored", "sensitivity 2C"])
def test_it_does_not_take_gradients_above_c_to_see_that_clipping_is_broken(fault: str) -> None:
    options, message = ONE_RANK[fault]
    with pytest.raises(SelfTestError, match=message):
        tried(alone(), clip_norm=1e4, **options)


@pytest.mark.parametrize("wrap", [Coupled, Normalised])
def test_a_model_that_couples_records_is_caught(wrap: type[nn.Module]) -> None:
    with pytest.raises(SelfTestError, match="records are not independent"):
        tried(alone(), model=wrap(caption_model()))


def own_stream(engine: Any, clip: Any, noise: NoiseMechanism) -> NoiseMechanism:
    return OwnPerRank(b"", noise.std, noise.divisor, engine.ranks.rank)


TWO_RANKS: dict[str, tuple[dict[str, Any], str]] = {
    "noise before the sum": ({"engine": NoiseBeforeSum, "replicated": True, "change": own_stream}, "sigma = 2.1"),
    "equal noise on disjoint shards": ({"change": swapped(EqualPerRank)}, "same noise was drawn"),
    "different noise on replicas": ({"replicated": True, "change": own_stream}, "replicas drew different noise"),
    "the mean over ranks": ({"engine": Mean}, "reduced sum differs"),
    "the mean over replicas": ({"engine": Mean, "replicated": True}, "reduced sum differs"),
    "the own rank's sum alone": ({"engine": OwnRankOnly}, "reduced sum differs"),
    "a gap and an overlap": ({"engine": Gap}, "twice, or never"),
}


@pytest.mark.parametrize("fault", TWO_RANKS)
def test_a_planted_fault_between_ranks_is_caught_by_all_of_them(fault: str) -> None:
    options, message = TWO_RANKS[fault]
    caught: list[str] = []

    def act(ranks: Any) -> None:
        try:
            tried(ranks, **options)
        except SelfTestError as error:
            caught.append(str(error))

    on_ranks(2, act)
    assert len(caught) == 2, "both ranks must stop, or one waits for ever"
    with pytest.raises(SelfTestError, match=message):
        raise SelfTestError(caught[0])


def test_a_fault_on_one_rank_stops_every_rank() -> None:
    caught: list[str] = []

    def act(ranks: Any) -> None:
        try:
            tried(ranks, change=nan_leaks if ranks.rank == 1 else None)
        except SelfTestError as error:
            caught.append(str(error))

    on_ranks(2, act)
    assert len(caught) == 2 and caught[0] == caught[1] and "moved the sum" in caught[0]


def test_it_refuses_to_run_where_it_would_lose_the_optimizer_state() -> None:
    engine, clip, noise = private_engine(alone(), model=caption_model())
    engine.set_optimizer_step(7)
    with pytest.raises(SelfTestError, match="before the optimizer's state is restored"):
        self_test(engine, clip, noise, False, SHAPE, "caption", 4, alone())
    assert engine.optimizer_step() == 7


def test_the_batches_are_synthetic_and_repeatable() -> None:
    for objective in ("mae", "caption"):
        first, second = (synthetic_batch(SHAPE, objective, 3, 1) for _ in range(2))
        assert all(torch.equal(first.inputs[name], second.inputs[name]) for name in first.inputs)
        assert first.present.all() and len(first.inputs) == 2
