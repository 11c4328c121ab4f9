"""Learning rates that follow probes of the loss: what is measured, what one record can move, and what follows."""

from __future__ import annotations

import copy
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.event import Event
from murmuration.accounting.metrics import CURVATURE, SLOPE, HeldOutAccuracy, LossProbe
from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.draw.micro_batch import ROW_SHARE, MicroBatch
from murmuration.train.clip.engine import Observation
from murmuration.train.config.phase import Phase
from murmuration.train.config.section import RecipeError
from murmuration.train.core import PrivateCore
from murmuration.train.engines.measures import LossProbes, weights_before
from murmuration.train.noise.metrics import MetricRelease
from murmuration.train.noise.update import NoisyUpdate
from murmuration.train.optim.probed_rate import RELEASED, ProbedRate
from murmuration.train.recipe.ready_phase import plan_of_phase
from murmuration.train.step import Records
from tests.support.step_world import KEYS, METRIC_KEY, Stop, journal_at, read
from tests.support.train_helpers import NOISE_KEY, alone, on_ranks, plan_for, private_engine, toy_batch

BOUND = 50.0


def plan_of(bound: float = BOUND, std: float = 1e-9) -> PrivacyPlan:
    return plan_for(metrics=(LossProbe(SLOPE, bound, std), LossProbe(CURVATURE, bound, std)))


def moved_engine(ranks: Any = None, replicated: bool = False, rate: float = 0.3) -> tuple[Any, dict[str, Tensor]]:
    """After one noised step at a high rate; with the weights from before it."""
    plan = plan_for()
    engine, _, noise = private_engine(ranks or alone(), plan, replicated)
    engine.base.keeps_before = True
    before = {name: p.detach().clone() for name, p in engine.parameters.items()}
    engine.accumulate(toy_batch(8, seed=1))
    engine.update(NoisyUpdate(noise, 1), rate)
    return engine, before


def through(engine: Any, batch: MicroBatch, plan: PrivacyPlan, probes: bool = True) -> tuple[float, float]:
    """The sums over a step's records, as they are released without noise worth speaking of."""
    release = MetricRelease(METRIC_KEY, plan, alone())
    measured = LossProbes(engine, release, alone(), lambda step: probes)
    (passed,) = measured.around(lambda ids, step: iter([batch]))(np.arange(len(batch.present)), 2)
    assert passed is batch
    twos = 2 * torch.ones(len(batch.present))  # what the pass that makes the gradients has seen is no part of it
    release.add(batch.present, Observation(twos, twos, 1.0), bound=1.0)
    told = release.release(2)
    return told[RELEASED[0]] * plan.divisor, told[RELEASED[1]] * plan.divisor


def loss_at(model: nn.Module, weights: dict[str, Tensor], batch: MicroBatch) -> Tensor:
    """By another model that holds these weights."""
    other = copy.deepcopy(model).double()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
        return other({name: x.double() for name, x in batch.inputs.items()})


def test_slope_and_curvature_are_those_of_the_losses_at_both_ends_of_the_move() -> None:
    engine, before = moved_engine()
    now = {name: p.detach().clone() for name, p in engine.parameters.items()}
    batch = toy_batch(6, seed=2, absent=(1, 4))
    back, here = loss_at(engine.model, before, batch), loss_at(engine.model, now, batch)
    on = loss_at(engine.model, {name: 2 * now[name] - before[name] for name in now}, batch)
    there = batch.present
    slope, curvature = through(engine, batch, plan_of())
    expected = float(((on - back) / 2)[there].sum()), float((on - 2 * here + back)[there].sum())
    assert (slope, curvature) == pytest.approx(expected, rel=1e-4) and min(abs(each) for each in expected) > 0.1
    assert all(torch.equal(now[name], p) for name, p in engine.parameters.items()), "the weights stay as they are"


def test_a_step_that_does_not_probe_measures_nothing() -> None:
    engine, _ = moved_engine()
    assert through(engine, toy_batch(6, seed=2), plan_of(), probes=False) == pytest.approx((0.0, 0.0), abs=1e-6)


@pytest.mark.parametrize("inputs", [1e4, math.nan, math.inf, -1e30])
def test_one_record_moves_each_sum_by_at_most_the_bound(inputs: float) -> None:
    engine, _ = moved_engine()
    plan = plan_of(bound=0.5)
    hostile, blank = toy_batch(6, seed=2), toy_batch(6, seed=2)
    hostile.inputs["images"][3], blank.inputs["images"][3] = inputs, inputs
    blank.present[3] = False
    for one, other in zip(through(engine, hostile, plan), through(engine, blank, plan), strict=True):
        assert abs(one - other) <= 0.5 + 1e-5
    if inputs == 1e4:
        assert abs(through(engine, hostile, plan)[0] - through(engine, blank, plan)[0]) > 0.49, "it would move it more"


def test_rows_of_a_slot_count_as_their_mean() -> None:
    engine, _ = moved_engine()
    batch = toy_batch(6, seed=2)
    rows = MicroBatch(batch.inputs | {ROW_SHARE: torch.full((6,), 0.5)}, torch.ones(3, dtype=torch.bool))
    together = through(engine, rows, plan_of())
    assert together == pytest.approx([each / 2 for each in through(engine, batch, plan_of())], rel=1e-4)


@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
def test_the_weights_from_before_are_whole_on_every_rank(replicated: bool) -> None:
    def one(ranks: Any) -> bool:
        engine, before = moved_engine(ranks, replicated)
        found = weights_before(engine, ranks)
        return found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in before)

    assert on_ranks(3, one) == [True] * 3


def test_a_sharded_model_is_refused() -> None:
    engine, _ = moved_engine()
    engine.partitioned = True
    with pytest.raises(RecipeError, match="use ZeRO 0, 1 or 2"):
        LossProbes(engine, MetricRelease(METRIC_KEY, plan_of(), alone()), alone(), lambda step: True)


def test_the_gradient_of_a_step_is_the_same_with_and_without_probes(tmp_path: Path) -> None:
    """The same draws and noise give the same weights, bit by bit, and every step is charged with both sums."""

    def trained(folder: str, probes: Any) -> tuple[list[Tensor], Any]:
        (tmp_path / folder).mkdir()
        plan, ranks = plan_of(bound=0.1, std=1.0), alone()
        engine, clip, _ = private_engine(ranks, plan)
        engine.base.keeps_before = True
        journal = journal_at(tmp_path / folder, plan)
        core = PrivateCore(plan, clip, engine, KEYS.__getitem__, ranks)
        records = Records(core.sampler().draw, lambda ids, step: read(ids, ranks))
        step = core.step(0, journal, records, Stop(), probes=probes)  # pyright: ignore[reportArgumentType]
        for t in (1, 2, 3):
            step.run(t, 0.1)
        core.close()
        return [p.detach().clone() for p in engine.parameters.values()], journal

    plain, journal = trained("plain", None)
    probed, other = trained("probed", lambda step: step == 2)
    assert all(torch.equal(one, two) for one, two in zip(plain, probed, strict=True))
    assert [e.kind for e in journal.ledger.entries] == [e.kind for e in other.ledger.entries]
    opened = [e.fields for e in other.ledger.entries if e.kind == "open"]
    assert {m["name"] for m in opened[0]["facts"]["metrics"]} == {SLOPE, CURVATURE} and len(opened) == 3


# The rate that follows.


def rate_of(noise: float = 1e-9, **changes: Any) -> ProbedRate:
    return ProbedRate(
        **({"every": 2, "most": 2.0, "span": 1e4, "slope_noise": noise, "curvature_noise": noise} | changes)
    )


def follow(rate: ProbedRate, fall: float, bend: float, peak: float, steps: int, noise: float = 0.0) -> list[float]:
    """On a quadratic along every move: at rate r it changes the loss by -fall·r + bend·r²/2."""
    draw, rates = np.random.default_rng(3), []
    for step in range(1, steps + 1):
        now, moved = peak * rate.factor, rate.moved
        told = {RELEASED[0]: -fall * moved, RELEASED[1]: bend * moved**2}
        rate.advance(step, now, {name: value + noise * draw.standard_normal() for name, value in told.items()})
        rates.append(now)
    return rates


@pytest.mark.parametrize("peak", [1e-6, 1e-3, 1.0, 300.0])
def test_it_finds_the_best_rate_of_a_quadratic_from_far_below_and_above(peak: float) -> None:
    assert follow(rate_of(span=1e9), fall=3.0, bend=4.0, peak=peak, steps=60)[-1] == pytest.approx(0.75, rel=1e-6)


def test_with_noise_it_stays_near_the_best_and_no_single_probe_throws_it_off() -> None:
    rates = follow(rate_of(noise=0.3, span=1e9), fall=3.0, bend=4.0, peak=1e-4, steps=400, noise=0.3)
    assert 0.3 < float(np.median(rates[100:])) < 2.0
    assert all(0.49 < second / first < 2.01 for first, second in pairwise(rates))


def test_where_the_loss_rises_and_does_not_bend_the_rate_falls() -> None:
    assert follow(rate_of(noise=0.01), fall=-3.0, bend=0.0, peak=1.0, steps=12)[-1] < 0.1


def test_what_cannot_be_seen_raises_the_rate_and_the_span_bounds_it() -> None:
    assert follow(rate_of(noise=1.0, span=8.0), fall=0.0, bend=0.0, peak=1.0, steps=40)[-1] == 8.0


def test_only_probes_are_told_and_only_they_change_the_rate() -> None:
    rate = rate_of()
    released = {RELEASED[0]: -1.0, RELEASED[1]: 1.0, "noised_loss": 3.0}
    assert rate.advance(1, 0.5, dict(released)) == {"noised_loss": 3.0} and rate.factor == 1.0
    told = rate.advance(2, 0.5, dict(released))
    assert told == released | {"learning_rate_factor": 1.0} and rate.factor == 1.0  # the best is 1 time the last move
    assert rate.advance(3, 0.5, dict(released)) == {"noised_loss": 3.0}
    still = rate_of()
    still.advance(1, 0.0, dict(released))
    assert not still.probes(2), "a first step at rate 0 moves nothing"


# Plan and config.

PHASE: dict[str, Any] = {
    "name": "private", "objective": "mae", "steps": 100, "data": {"source": "shards", "path": "x"},
    "schedule": {"peak": 1e-3, "shape": "constant"},
    "privacy": {"epsilon": 2.0, "expected_batch": 100, "loss_probes": {"every": 5, "noise_multiplier": 8.0}},
}  # fmt: skip


def planned(plan: PrivacyPlan, manifest: dict[str, Any] | None = None) -> ProbedRate:
    privacy = Phase.model_validate(PHASE).privacy
    assert privacy is not None and privacy.loss_probes is not None
    return ProbedRate.of(privacy.loss_probes, plan, manifest)


def test_it_goes_on_from_a_checkpoint_as_if_never_stopped() -> None:
    plan = plan_of(std=0.01)
    whole, first = planned(plan), planned(plan, {"of a phase without": "probes"})
    expected = follow(whole, 3.0, 4.0, 0.01, 50)
    begun = follow(first, 3.0, 4.0, 0.01, 22)
    resumed = planned(plan, json.loads(json.dumps({"steps": 22, **first.state()})))
    rest = []
    for step in range(23, 51):
        now = 0.01 * resumed.factor
        resumed.advance(step, now, {RELEASED[0]: -3.0 * resumed.moved, RELEASED[1]: 4.0 * resumed.moved**2})
        rest.append(now)
    assert begun + rest == expected and begun[-1] != begun[0]


def test_both_sums_are_charged_with_the_gradient_within_the_budget() -> None:
    phase = Phase.model_validate(PHASE)
    assert phase.privacy is not None
    plan = plan_of_phase(phase, 5000, "phases.0")
    assert {m.name: (m.bound, m.std) for m in plan.metrics} == {SLOPE: (0.1, 0.8), CURVATURE: (0.1, 0.8)}
    together = (plan.noise_multiplier**-2 + 2 * 8.0**-2) ** -0.5
    assert plan.effective_noise_multiplier == pytest.approx(together, rel=1e-12)
    assert epsilon([plan.event()], plan.delta) <= 2.0 < epsilon([Event(0.02, together * 0.99, 100)], plan.delta)
    without = copy.deepcopy(PHASE)
    del without["privacy"]["loss_probes"]
    plain = Phase.model_validate(without)
    assert plain.privacy is not None
    assert plan_of_phase(plain, 5000, "phases.0").noise_multiplier < plan.noise_multiplier


def test_a_schedule_that_falls_by_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set schedule\.shape to 'constant', or leave loss_probes out"):
        Phase.model_validate(PHASE | {"schedule": {"peak": 1e-3, "shape": "cosine"}})


def test_the_noise_on_a_released_slope_is_the_planned_one() -> None:
    """A σ that is off by a fifth is rejected."""
    plan = plan_of(bound=0.1, std=0.8)
    release = MetricRelease(NOISE_KEY, plan, alone())
    drawn = [release.release(step) for step in range(1, 1501)]
    for name in RELEASED:
        found = np.std([each[name] for each in drawn]) * plan.divisor
        assert abs(found / 0.8 - 1) < 0.1, "1500 draws tell σ within 2 %"


def test_what_a_rate_takes_for_noise_is_the_noise_of_what_is_released() -> None:
    """With held-out records, sums are divided by the expected number of the others."""
    metrics = (*plan_of(bound=0.1, std=0.8).metrics, HeldOutAccuracy.of(1.0, 0.5))
    for plan in (plan_of(bound=0.1, std=0.8), plan_for(metrics=metrics)):
        rate = planned(plan)
        release = MetricRelease(NOISE_KEY, plan, alone())
        drawn = [release.release(step)[RELEASED[0]] for step in range(1, 801)]
        assert abs(np.std(drawn) / rate.slope_noise - 1) < 0.15
