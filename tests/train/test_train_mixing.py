"""Public gradients are mixed in after the noise; what is charged does not depend on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.train.config.data import ShardData
from murmuration.train.config.phase import Mixing
from murmuration.train.noise.update import NoisyUpdate, UpdateError
from murmuration.train.run.public_mixing import MixingEngine, PublicGradient, alpha
from murmuration.train.self_test.probes import Capture
from tests.support.step_world import journal_at, kinds, step_of
from tests.support.train_helpers import Toy, alone, on_ranks, plan_for, private_engine, toy_batch

PUBLIC = ShardData(path="open", public=True)


def mixing(**more: Any) -> Mixing:
    return Mixing(data=PUBLIC, batch=100, **more)


def test_alpha_follows_its_shape() -> None:
    def over(settings: Mixing, steps: int = 10) -> list[float]:
        return [round(alpha(settings, step, steps, 300.0), 6) for step in (1, 6, 10)]

    assert over(mixing(start=0.3)) == [0.3, 0.3, 0.3]
    assert over(mixing(shape="linear", start=1.0, end=0.0)) == [1.0, 0.5, 0.1]
    assert over(mixing(shape="linear", start=1.0, end=0.0, steps=5)) == [1.0, 0.0, 0.0]
    # DPMD weighs the private gradient by cos(pi·t / 2T), t = 0, 1, … T-1.
    private = [math.cos(math.pi * t / 20) for t in (0, 5, 9)]
    assert over(mixing(shape="cosine", start=0.0, end=1.0)) == [round(1 - weight, 6) for weight in private]
    assert over(mixing(shape="switch", start=1.0, end=0.0, steps=5)) == [1.0, 0.0, 0.0]
    assert over(mixing(shape="switch", start=1.0, end=0.0, steps=6)) == [1.0, 1.0, 0.0]
    assert over(mixing(shape="sample-ratio")) == [0.25, 0.25, 0.25]
    assert over(mixing(shape="sample-ratio", start=None, end=None)) == [0.25, 0.25, 0.25]


@pytest.mark.parametrize("shape", ["linear", "cosine", "switch"])
def test_alpha_may_reach_its_end_before_the_phase_does(shape: Any) -> None:
    settings = mixing(shape=shape, start=1.0, end=0.25, steps=5)
    assert [round(alpha(settings, step, 10, 300.0), 6) for step in (1, 6, 11)] == [1.0, 0.25, 0.25]


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(48))

    def forward(self, inputs: Any) -> torch.Tensor:
        return (inputs["images"].flatten(1) @ self.weight).square()


def test_a_public_record_whose_loss_is_no_number_has_no_part_in_the_mean() -> None:
    batch = toy_batch(4)
    batch.inputs["images"][2] = 1e30  # its square is infinite
    found = PublicGradient(Line(), lambda step: iter([batch]), alone()).of_step(1)["weight"]
    rows = batch.inputs["images"].flatten(1)[[0, 1, 3]]
    assert torch.allclose(found, (2 * rows.sum(1, keepdim=True) * rows).mean(0), rtol=1e-4)


def test_a_step_that_is_dropped_is_dropped_by_the_engine_within() -> None:
    engine, inner, _ = mixed_engine(alone(), 0.5, True)
    dropped: list[bool] = []
    inner.discard = lambda: dropped.append(True)
    engine.discard()
    assert dropped == [True]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"shape": "linear"}, "needs `end`"), ({"shape": "switch", "end": 0.0}, "needs `steps`"),
        ({"shape": "sample-ratio", "start": 0.1, "end": 1.0}, "set end, start to null"),
        ({"start": 0.0, "end": 1.0}, "'constant' has one alpha"), ({"steps": 3}, "'constant' has one alpha"),
        ({"start": None}, "needs `start`"), ({"shape": "linear", "start": None, "end": 1.0}, "needs `start`"),
        ({"data": ShardData(path="x")}, "not declared public"),
    ],
)  # fmt: skip
def test_mixtures_that_mean_nothing_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixing(**({"data": PUBLIC, "batch": 10} | more))


def mixed_engine(ranks: Any, weight: float, replicated: bool, batches: int = 2) -> tuple[Any, Any, Any]:
    plan = plan_for()
    inner, _, noise = private_engine(ranks, plan, replicated)
    public = [toy_batch(5, seed=40 + ranks.rank * 10 + n, absent=(1,)) for n in range(batches)]
    gradient = PublicGradient(inner.model, lambda step: iter(public), ranks)
    return MixingEngine(inner, gradient, lambda step: weight), inner, noise


@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_update_is_the_weighted_sum_of_the_noised_mean_and_the_public_mean(weight: float, replicated: bool) -> None:
    """Against a plain mean over the public records of both ranks, and the same noised update without mixing."""

    def finished(ranks: Any, mixed: bool) -> list[torch.Tensor]:
        engine, inner, noise = mixed_engine(ranks, weight, replicated)
        inner.accumulate(toy_batch(6, seed=ranks.rank))
        used = engine if mixed else inner
        captured: list[torch.Tensor] = []
        before = inner.finish

        def keep(update: Any) -> None:
            before(update)
            captured.extend(flat.grad.clone() for flat in inner.flats)

        inner.finish = keep
        used.update(NoisyUpdate(noise, 3), 0.0)
        return [torch.cat([flat.flatten() for flat in captured])]

    model = Toy()
    records = [toy_batch(5, seed=40 + rank * 10 + n, absent=(1,)) for rank in range(2) for n in range(2)]
    images = torch.cat([batch.inputs["images"][batch.present] for batch in records])
    model({"images": images}).mean().backward()
    public = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    plain = [flats[0] for flats in on_ranks(2, lambda ranks: finished(ranks, False))]
    mixed = [flats[0] for flats in on_ranks(2, lambda ranks: finished(ranks, True))]
    whole, got = (parts[0] if replicated else torch.cat(parts) for parts in (plain, mixed))
    assert torch.allclose(got, (1 - weight) * whole + weight * public, atol=2e-6)
    assert public.norm() > 0.1 and whole.norm() > 0


def test_a_mixed_step_is_opened_charged_and_committed_as_any_other(tmp_path: Path) -> None:
    plan = plan_for()
    (tmp_path / "mixed").mkdir(), (tmp_path / "plain").mkdir()
    facts = []
    for name in ("plain", "mixed"):
        journal = journal_at(tmp_path / name, plan)
        step, engine = step_of(alone(), journal, plan)
        if name == "mixed":
            public = PublicGradient(engine.model, lambda step: iter([toy_batch(5)]), alone())
            step.engine = MixingEngine(engine, public, lambda step: 0.5)
        step.run(1, 1e-3)
        assert kinds(journal) == ["open", "commit"]
        facts.append([entry.fields["facts"] for entry in journal.ledger.entries if entry.kind == "commit"])
    assert facts[0] == facts[1]


def test_only_a_steps_own_update_is_mixed_and_only_with_whole_weights() -> None:
    engine, inner, noise = mixed_engine(alone(), 0.5, True)
    with pytest.raises(UpdateError, match="mixed into a step's update"):
        engine.update(Capture(NoisyUpdate(noise, 1)), 0.0)
    inner.partitioned = True
    with pytest.raises(UpdateError, match="below 3"):
        MixingEngine(inner, engine._gradient, lambda step: 0.5)
