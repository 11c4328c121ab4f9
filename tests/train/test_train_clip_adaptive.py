"""Adaptive clipping in the real step: C_t moves clip engine, noise and count together, by what was released alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmuration.accounting.adaptive import METRIC, AdaptiveRule
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.metrics import ClippedShare
from murmuration.accounting.plan import PrivacyPlan
from murmuration.model.build import build
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import Observation
from murmuration.train.clip.rule import ClipError
from murmuration.train.config.phase import Phase
from murmuration.train.noise.adaptive_norm import AdaptiveNorm
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.metrics import MetricRelease
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.public.monitor import LossMonitor
from murmuration.train.recipe.ready_phase import plan_of_phase, planned_epsilon
from murmuration.train.step import PrivateStep
from tests.support.drops_world import measured, private_of, ready
from tests.support.self_test_world import tried
from tests.support.step_world import METRIC_KEY, journal_at, read, step_of, weights
from tests.support.train_helpers import alone, plan_for, private_engine
from tests.support.whole_history import steps_of

RULE = AdaptiveRule(quantile=0.5, learning_rate=1.0, lowest=1e-3, highest=1e3)


def adaptive_plan(std: float = 1.0, rule: AdaptiveRule = RULE, **changes: Any) -> PrivacyPlan:
    return replace(plan_for(**changes), metrics=(ClippedShare.of(std, rule),))


def norms_of(step: PrivateStep, number: int, model: torch.nn.Module) -> torch.Tensor:
    """Of the drawn records, one at a time, by plain autograd."""
    found = []
    for batch in read(step.records.draw(number).ids, alone(), micro_batch=1):
        if bool(batch.present[0]):
            loss = model(batch.inputs).sum()
            gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
            found.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))
    return torch.tensor(found, dtype=torch.float64)


def test_norms_shares_and_noise_of_a_run_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    plan = adaptive_plan(steps=6, clip_norm=30.0)
    journal = journal_at(tmp_path, plan)
    step, engine = step_of(alone(), journal, plan, first_norm=plan.clip_norm)
    counts = AESNoise(METRIC_KEY, 1.0, plan.divisor)
    norm, moved = 30.0, []
    for number in range(1, 7):
        lengths = norms_of(step, number, engine.model)
        bound = norm / (1 + step.clip.rule.allowance)
        count = float(torch.where(lengths > bound, 0.5, -0.5).sum())
        share = (count + float(counts.draw(number, 0, 0, 1, np.float64)[0])) / plan.divisor + 0.5
        observed = step.run(number, 1e-2)
        released = observed.released
        assert released["noised_clipped_share"] == pytest.approx(share, rel=1e-6) and released["clip_norm"] == norm
        assert observed.over_ranks(alone(), None)["clipped_fraction"] == pytest.approx(float((lengths > bound).mean(
            dtype=torch.float64)))  # fmt: skip
        facts = list(steps_of(journal).committed.values())[-1]
        assert facts.noise.std == plan.noise_multiplier * norm
        assert facts.clipping.sensitivity == pytest.approx(norm, rel=1e-12)
        norm = RULE.following(norm, released["noised_clipped_share"])
        moved.append(norm)
    assert step.norm is not None and step.norm.norm == norm and len({30.0, *moved}) == 7


def test_the_sum_is_clipped_and_noised_at_the_norm_of_its_own_step(tmp_path: Path) -> None:
    """The update of step 2 is made at C_2, not at C_1."""
    plan = adaptive_plan(steps=3, clip_norm=30.0)
    step, engine = step_of(alone(), journal_at(tmp_path, plan), plan, first_norm=plan.clip_norm)
    step.run(1, 0.0)
    assert step.norm is not None
    second = step.norm.norm
    assert abs(math.log(second / 30.0)) > 0.05
    reference, clip, noise = private_engine(alone(), plan)
    noise = noise.at(plan.noise_multiplier * second)
    for parameter, value in zip(reference.parameters.values(), engine.parameters.values(), strict=True):
        parameter.data.copy_(value)
    seen: list[torch.Tensor] = []
    engine.step = lambda: seen.append(engine.flats[0].grad.clone())  # pyright: ignore
    step.run(2, 1e-2)
    (batch,) = read(step.records.draw(2).ids, alone(), micro_batch=400)
    reference.accumulate(batch, clip.rule.at(second))
    reference.hand_over()
    sums = torch.cat([p.grad.flatten() for p in reference.parameters.values()])  # pyright: ignore
    drawn = [torch.from_numpy(noise.draw(2, i, 0, p.numel())) for i, p in enumerate(reference.parameters.values())]
    expected = (sums + torch.cat(drawn)) / plan.divisor
    assert torch.allclose(seen[0], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_the_norm_follows_the_share_that_stands_in_the_ledger(tmp_path: Path) -> None:
    """A replayed step may round its share otherwise; what was told the first time counts, for the next C as well."""
    plan = adaptive_plan()
    step, _ = step_of(alone(), journal_at(tmp_path, plan), plan, first_norm=plan.clip_norm)
    told, committed = 0.9375, step.record.committed
    step.record.committed = lambda *given: (committed(*given), told)[1]
    observed = step.run(1, 1e-2)
    assert step.norm is not None and step.norm.norm == RULE.following(plan.clip_norm, told)
    assert observed.released["noised_clipped_share"] == told


def test_a_part_with_another_norm_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    plan = adaptive_plan()
    journal = journal_at(tmp_path, plan)
    step, engine = step_of(alone(), journal, plan, first_norm=plan.clip_norm)
    step.run(1, 1e-2)
    before = weights(engine)
    assert step.norm is not None
    step.norm.norm *= 1.01
    with pytest.raises(LedgerError, match="released before it"):
        step.run(2, 1e-2)
    assert torch.equal(weights(engine), before)


def test_the_count_gets_the_planned_noise_at_every_step_apart_from_the_gradients(tmp_path: Path) -> None:
    plan = adaptive_plan(std=3.0)
    release = MetricRelease(METRIC_KEY, plan, alone())
    drawn = np.array([(release.release(step)["noised_clipped_share"] - 0.5) * plan.divisor for step in range(1, 2001)])
    assert abs(drawn.std() / 3.0 - 1) < 0.08 and abs(drawn.mean()) < 0.3 and len(set(drawn)) > 1990
    gradient = AESNoise.of(b"s" * 32, plan)
    other = np.array([gradient.draw(step, 0, 0, 1, np.float64)[0] for step in range(1, 2001)])
    assert abs(np.corrcoef(drawn, other)[0, 1]) < 0.1


def test_one_record_moves_the_count_by_a_half_and_one_that_is_not_a_number_by_nothing() -> None:
    plan = adaptive_plan(std=1e-9)
    norms = torch.tensor([0.5, 2.0, 1.0, math.nan, math.inf, 9.0], dtype=torch.float64)

    def count(present: list[bool], norms: torch.Tensor = norms) -> float:
        release = MetricRelease(METRIC_KEY, plan, alone())
        release.add(torch.tensor(present), Observation(norms, norms, 1.0), bound=1.0)
        return (release.release(1)["noised_clipped_share"] - 0.5) * plan.divisor

    everyone = [True] * 6
    assert count(everyone) == pytest.approx(-0.5 + 0.5 - 0.5 + 0.5, abs=1e-5)
    for record, moved in enumerate((0.5, -0.5, 0.5, 0.0, 0.0, -0.5)):
        without = [number != record for number in range(6)]
        assert count(without) - count(everyone) == pytest.approx(moved, abs=1e-5)


@pytest.mark.parametrize("quantile", [0.3, 0.8])
@pytest.mark.parametrize("first", [0.02, 50.0])
def test_the_norm_settles_at_the_quantile(quantile: float, first: float) -> None:
    """Counts as the release makes them, of records whose norms never change; the noise is that of a tenth of them."""
    rule = replace(RULE, quantile=quantile, learning_rate=0.3)
    plan = adaptive_plan(std=20.0, rule=rule, records=400, batch=400, steps=200)
    lengths = torch.randn(400, generator=torch.Generator().manual_seed(4), dtype=torch.float64).exp()
    release, norm, seen = MetricRelease(METRIC_KEY, plan, alone()), first, []
    for step in range(1, 201):
        release.add(torch.ones(400, dtype=torch.bool), Observation(lengths, lengths, 1.0), bound=norm)
        norm = rule.following(norm, release.release(step)["noised_clipped_share"])
        seen.append(float((lengths <= norm).double().mean()))
    assert abs(np.mean(seen[100:]) - quantile) < 0.03 and max(abs(np.array(seen[100:]) - quantile)) < 0.15


@pytest.mark.parametrize("norm", [1e-4, 1e4])
def test_the_self_test_holds_at_every_norm(norm: float) -> None:
    """The rounding allowance is a share of C, so what is proved for the first C is proved for all."""

    def moved(engine: Any, clip: Any, noise: Any) -> None:
        rule = clip.rule
        clip.rule, noise.std = rule.at(norm), 1.5 * norm
        assert clip.rule.allowance == rule.allowance and clip.rule.sensitivity == pytest.approx(norm, rel=1e-12)

    report = tried(alone(), change=moved)
    assert report.measured_sigma == pytest.approx(1.5, rel=0.05) and 0 < report.largest_hostile <= 1


def settings(clip: dict[str, Any], optimizer: dict[str, Any] | None = None) -> Phase:
    return Phase.model_validate(
        {
            "name": "private", "data": {"path": "x", "tokenizer": "t"}, "objective": "caption", "steps": 20,
            "schedule": {"peak": 1e-3}, "optimizer": {"params": optimizer or {}},
            "privacy": {"epsilon": 4.0, "expected_batch": 50.0, "clip": clip, "noise_multiplier": 1.5},
        }
    )  # fmt: skip


def test_the_config_becomes_a_frozen_rule_and_a_charged_count() -> None:
    phase = settings({"norm": 2.0, "adaptive": {"quantile": 0.6}})
    assert phase.privacy is not None
    plan = plan_of_phase(phase, 1000, "phases.0")
    assert plan.adaptive == AdaptiveRule(0.6, 0.2, 2e-4, 2e4) and plan.clip_norm == 2.0
    assert [(m.name, m.bound, m.std) for m in plan.metrics] == [(METRIC, 0.5, 2.5)], "a tenth of the batch, in halves"
    fixed = replace(plan, metrics=())
    assert planned_epsilon(fixed) < planned_epsilon(plan) < 1.2 * planned_epsilon(fixed)


def test_what_does_not_go_with_adaptive_clipping_is_refused() -> None:
    for clip in ({"kind": "automatic"}, {"groups": "layer"}):
        with pytest.raises(ValueError, match="do not go together"):
            settings({**clip, "adaptive": {}})


@pytest.mark.rest
def test_what_is_measured_at_a_checkpoint_is_measured_at_the_norm_of_the_next_step() -> None:
    phase, plan = measured(ready()), adaptive_plan()
    engine, clip, _ = private_engine(alone(), plan, False, build(phase.shape, "mae"))
    moved = AdaptiveNorm(plan, 0.01)
    there = BookKeepingClip(clip.rule.at(0.01))
    for make in (PublicEvaluator, LossMonitor):

        def found(clip: Any, norm: AdaptiveNorm | None, make: Any = make) -> dict[str, float]:
            seen = make(phase, engine, alone(), 8, b"m" * 32, private_of(clip, plan, norm)).measure()
            return seen if isinstance(seen, dict) else seen.values

        assert found(clip, moved) == pytest.approx(found(there, None), rel=1e-6) != pytest.approx(found(clip, None))


def test_a_norm_that_is_fixed_does_not_adapt() -> None:
    with pytest.raises(ClipError, match="is fixed"):
        AdaptiveNorm(plan_for(), 1.0)
