"""The monitor's four numbers against an exact Hessian, and its prediction against many real noisy steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from murmuration.accounting.sampling import RATE_DENOMINATOR
from murmuration.data.draw.micro_batch import MicroBatch, slots
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.noise.aes import AESNoise
from murmuration.train.public.curvature import Curvature, PublicLoss, inner, measure
from murmuration.train.public.prediction import (
    Choice,
    Mechanism,
    at_batch,
    best_batch_at_fixed_noise,
    choices,
    predict,
    said,
    suggest,
    table,
)  # fmt: skip
from tests.support.train_helpers import SHAPE, Toy, alone, nano_inputs, on_ranks, plan_for

RECORDS = 24


class Line(nn.Module):
    """Least squares on 12 numbers: its loss is a quadratic, so second order is the whole truth."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12))

    def forward(self, inputs: Any) -> Tensor:
        rows = inputs["images"].flatten(1)
        return 0.5 * (rows[:, :12] @ self.weight - rows[:, 12]).square()


def images(count: int, seed: int = 3) -> Tensor:
    return torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def public(model: nn.Module, inputs: dict[str, Tensor], ranks: Any, bad: tuple[int, ...] = ()) -> PublicLoss:
    """As the monitor sets it up, in micro-batches of 5, so that the last is padded."""
    count = len(next(iter(inputs.values())))
    rows = slots(torch.arange(count).numpy(), ranks.rank, ranks.world, 5)

    def batches() -> Iterator[MicroBatch]:
        for row in rows:
            there = torch.tensor([int(i) >= 0 and int(i) not in bad for i in row])
            taken = {name: tensor[torch.from_numpy(row).clamp(min=0)].clone() for name, tensor in inputs.items()}
            for tensor in taken.values():
                tensor[~there] = 0
            yield MicroBatch(taken, there)

    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    return PublicLoss(model, shapes, batches, ranks, count, ranks.rank * count // ranks.world)


def exact(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean gradient, Hessian of the mean loss and covariance of one record's gradient, in fp64 and whole."""
    model = model.double()
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    sizes = [p.numel() for p in named.values()]
    data = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}

    def losses(flat: Tensor) -> Tensor:
        parts = {n: part.view(named[n].shape) for n, part in zip(named, flat.split(sizes), strict=True)}
        return functional_call(model, parts, (data,))

    flat = torch.cat([p.reshape(-1) for p in named.values()])
    each = jacrev(losses)(flat)
    centred = each - each.mean(0)
    return each.mean(0), hessian(lambda w: losses(w).mean())(flat), centred.T @ centred / (len(each) - 1)


@pytest.mark.parametrize("world", [1, 2])
def test_slope_and_curvature_equal_the_exact_hessian_and_the_traces_come_out_on_average(world: int) -> None:
    inputs = {"images": images(RECORDS)}
    mean, bend, spread = exact(Toy(), inputs)

    def act(ranks: Any) -> tuple[Curvature, list[Curvature]]:
        loss = public(Toy(), inputs, ranks)
        return measure(loss, 1)[0], [measure(loss, 25)[0]]

    for found, (many,) in on_ranks(world, act):
        assert found.records == RECORDS
        assert found.slope == pytest.approx(float(mean @ mean), rel=1e-4)
        assert found.along == pytest.approx(float(mean @ bend @ mean), rel=1e-3)
        # A trace by n probes of random signs errs by sqrt(2·off-diagonal²/n).
        off = bend - torch.diag(bend.diagonal())
        assert abs(many.trace - float(bend.trace())) < 4 * math.sqrt(2 * float(off.square().sum()) / 25)
        assert many.spread == pytest.approx(float((bend @ spread).trace()), rel=0.4)
        assert found.trace != many.trace


def test_every_probe_of_a_trace_is_unbiased_when_all_signs_are_tried() -> None:
    """Twelve weights and four records: all signs can be tried, and the means are the traces themselves."""
    model, inputs = Line(), {"images": images(4)}
    _, bend, spread = exact(Line(), inputs)
    loss, mean = public(model, inputs, alone()), None
    mean = loss.gradient()
    total = 0.0
    for pattern in range(16):
        signs = torch.tensor([1.0 if pattern >> bit & 1 else -1.0 for bit in range(4)])
        mixed = loss.gradient(signs)
        mixed["weight"] -= loss.balance(signs) * mean["weight"]
        total += loss.quadratic(mixed) / (loss.present - 1) / 16
    assert total == pytest.approx(float((bend @ spread).trace()), rel=1e-5)
    corner = [loss.quadratic({"weight": row}) for row in torch.eye(12)]
    assert sum(corner) == pytest.approx(float(bend.trace()), rel=1e-5)


@pytest.mark.parametrize("objective", ["mae", "caption"])
def test_real_models_have_second_derivatives_and_frozen_weights_stay_out(objective: str) -> None:
    from murmuration.model.build import build

    model = build(SHAPE, objective)  # pyright: ignore[reportArgumentType, reportCallIssue]
    inputs = nano_inputs(objective, 6)
    loss = public(model, inputs, alone())
    mean = loss.gradient()
    assert set(mean) == {name for name, p in model.named_parameters() if p.requires_grad}
    bent = loss.quadratic(mean)
    # The second difference of the loss itself along the gradient.
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    values = []
    for way in (-1, 0, 1):
        step = 0.02 / math.sqrt(inner(mean, mean))
        moved = {n: (w + way * step * mean[n] if n in mean else w).double() for n, w in weights.items()}
        doubled = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
        buffers = {n: b.double() if b.is_floating_point() else b for n, b in model.named_buffers()}
        values.append(float(functional_call(model, (moved, buffers), (doubled,)).mean()))
    measured = (values[0] - 2 * values[1] + values[2]) / step**2
    assert bent == pytest.approx(measured, rel=0.02)
    assert all(p.grad is None for p in model.parameters()), "the engine's own gradients are touched"


def test_bad_records_have_no_part_in_any_mean() -> None:
    inputs = {"images": images(RECORDS)}
    kept = {"images": torch.cat([inputs["images"][:3], inputs["images"][4:]])}
    with_bad, _ = measure(public(Toy(), inputs, alone(), bad=(3,)), 1)
    without, _ = measure(public(Toy(), kept, alone()), 1)
    assert with_bad.records == RECORDS - 1
    assert with_bad.slope == pytest.approx(without.slope, rel=1e-5)
    assert with_bad.along == pytest.approx(without.along, rel=1e-4)


@pytest.mark.parametrize("noise", [0.0, 2.5])
def test_the_prediction_is_what_real_poisson_draws_and_real_noise_do_to_the_loss(noise: float) -> None:
    """Thousands of logical steps of a quadratic loss: draw, sum, noise, divide by q·n, one step at the best rate."""
    records, batch, draws = 60, 12.0, 4000
    inputs = {"images": images(records)}
    threshold = round(batch / records * RATE_DENOMINATOR)
    mean, bend, spread = exact(Line(), inputs)
    known = Curvature(records, float(mean @ mean), float(mean @ bend @ mean), float(bend.trace()),
                      float((bend @ spread).trace()) * (records - 1) / records)  # fmt: skip
    predicted = predict(known, Mechanism(batch, batch / records, noise))
    assert predicted is not None
    each = -inputs["images"].flatten(1)[:, 12:13].double() * inputs["images"].flatten(1)[:, :12].double()
    sampler = PoissonSampler(b"s" * 32, b"d" * 32, records, threshold)
    mechanism = AESNoise(b"n" * 32, noise, batch)
    rate, falls = 2 * predicted.improvement / known.slope, []  # of the best step of plain SGD
    for step in range(1, draws + 1):
        total = each[torch.from_numpy(sampler.draw(step).ids.copy())].sum(0)
        total += torch.from_numpy(mechanism.draw(step, 0, 0, 12)).double()
        moved = -rate * total / batch
        falls.append(float(-(mean @ moved) - 0.5 * moved @ bend @ moved))
    sample = torch.tensor(falls, dtype=torch.float64)
    error = float(sample.std()) / math.sqrt(draws)
    assert abs(float(sample.mean()) - predicted.improvement) < 4 * error
    assert error < 0.05 * predicted.improvement, "the check has no power"
    if noise:
        quiet = predict(known, Mechanism(batch, batch / records))
        assert quiet is not None and quiet.improvement == pytest.approx(predicted.without_noise)
        # What the check would say of a prediction that forgets the noise.
        assert abs(float(sample.mean()) - predicted.without_noise) > 10 * error
        assert predicted.decelerator == pytest.approx(1 - predicted.improvement / predicted.without_noise)


def test_with_real_clipping_the_prediction_holds_as_far_as_the_clipped_mean_is_parallel() -> None:
    records, batch, sigma = 200, 40.0, 0.5
    inputs = {"images": images(records)}
    plan = plan_for(records=records, batch=batch, clip_norm=1.5, noise_multiplier=sigma)
    clip = ReferenceClip(ClipRule.of(plan, "flat", 0.0, 8))
    model = Line()
    totals, seen = clipped_totals(clip, model, inputs, torch.ones(records, dtype=torch.bool))
    factor = float(seen.factors.mean())
    assert 0.3 < factor < 0.95
    mean, bend, _ = exact(Line(), inputs)
    curvature, _ = measure(public(Line(), inputs, alone()), 40)
    found = predict(curvature, Mechanism(plan.divisor, plan.sampling_rate, plan.noise_std, factor))
    assert found is not None
    rows = inputs["images"].flatten(1).double()
    each = seen.factors.double()[:, None] * -rows[:, 12:13] * rows[:, :12]
    draw = torch.Generator().manual_seed(1)
    taken = torch.rand(3000, records, generator=draw, dtype=torch.float64) < plan.sampling_rate
    moved = taken.double() @ each + plan.noise_std * torch.randn(3000, 12, generator=draw, dtype=torch.float64)
    moved *= -2 * found.improvement / (curvature.slope * factor) / plan.divisor  # at the best rate of plain SGD
    fall = float((-(moved @ mean) - 0.5 * ((moved @ bend) * moved).sum(1)).mean())
    alignment = torch.cosine_similarity(totals["weight"].double(), mean, dim=0)
    assert float(alignment) > 0.8
    assert fall == pytest.approx(found.improvement, rel=0.25)


def test_no_step_is_best_where_the_loss_does_not_curve_upwards() -> None:
    assert predict(Curvature(9, 1.0, -2.0, 5.0, 0.1), Mechanism(4.0)) is None
    assert predict(Curvature(9, 1.0, 2.0, -500.0, 0.1), Mechanism(4.0, 0.1, 3.0)) is None
    assert best_batch_at_fixed_noise(Curvature(9, 1.0, -2.0, 5.0, 0.1), Mechanism(4.0, 0.1, 1.0)) is None


def test_the_suggested_batch_is_the_best_of_a_brute_search_with_sigma_calibrated_at_each_batch() -> None:
    from murmuration.accounting.epsilon.accountant import epsilon
    from murmuration.accounting.event import Event

    plan = plan_for(records=20_000, batch=800, steps=40, noise_multiplier=1.6, epsilon_budget=1e3)
    known = choices(plan, (0.25, 1.0, 4.0))
    assert [choice.steps for choice in known] == [160, 40, 10]
    spent = [epsilon([Event(c.batch / plan.records, c.sigma, c.steps)], plan.delta) for c in known]
    assert max(spent) <= spent[1] * 1.0001 and min(spent) > 0.98 * spent[1], "σ(B) keeps ε, and no more than that"
    curvature = Curvature(100, 1.0, 2.0, 6e5, 5.0)
    now = Mechanism(plan.divisor, plan.sampling_rate, plan.noise_std, 0.8)
    found = suggest(curvature, now, plan, known)
    assert found is not None

    def per_record(choice: Choice) -> float:
        predicted = predict(curvature, at_batch(now, plan, choice.batch, choice.sigma))
        assert predicted is not None
        return predicted.improvement / choice.batch

    best = max(known, key=per_record)
    assert best.batch / 4 < found[0] < best.batch * 4
    assert known[0].batch < found[0] < known[-1].batch, "a batch at the edge would be no search"
    for trace, words in ((1e12, " or more"), (1e-3, " or less"), (6e5, "")):
        edge = suggest(Curvature(100, 1.0, 2.0, trace, 5.0), now, plan, known)
        assert edge is not None and said(edge[0], known) == f"{edge[0]:,.0f}{words}"
    rows = table(curvature, now, plan, known)
    assert len(rows) == 1 + len(known) and f"{best.batch:,.0f}" in rows[1 + known.index(best)]
