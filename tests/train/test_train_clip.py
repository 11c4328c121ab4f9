"""Per-record clipping against a loop over single records, with hostile records among them; and its rounding bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from murmuration.model.build import build
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.engines.forward import PlainForward
from tests.support.train_helpers import SHAPE, Toy, nano_inputs, toy_batch

KINDS = ["flat", "automatic"]
GAMMA = 0.01


def brute_force(
    model: nn.Module, inputs: dict[str, Tensor], present: Tensor, kind: str, bound: float
) -> tuple[dict[str, Tensor], list[float]]:
    """One record at a time, sums in fp64, nothing taken from train/."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in trainable.items()}
    norms = []
    for row in range(len(present)):
        loss = model({name: tensor[row : row + 1] for name, tensor in inputs.items()}).sum()
        gradients = [g.double() for g in torch.autograd.grad(loss, list(trainable.values()))]
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        norms.append(norm)
        if not present[row] or not math.isfinite(norm) or not math.isfinite(float(loss.detach())) or norm == 0:
            continue
        factor = min(1.0, bound / norm) if kind == "flat" else bound / (norm + GAMMA)
        for name, gradient in zip(trainable, gradients, strict=True):
            total[name] += factor * gradient
    return total, norms


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    error = sum(float((found[name].double() - expected[name]).square().sum()) for name in expected)
    return math.sqrt(error / sum(float(t.double().square().sum()) for t in expected.values()))


def size(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


class Scaled(nn.Module):
    """A model whose loss per record is multiplied by an input: hostile norms of any size, on demand."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        rest = {name: tensor for name, tensor in inputs.items() if name != "scale"}
        return self.inner(rest) * inputs["scale"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", ["mae", "caption"])
def test_the_clipped_sum_equals_a_loop_over_single_records(objective: str, kind: str) -> None:
    model = build(SHAPE, objective)  # pyright: ignore[reportArgumentType, reportCallIssue]
    inputs = nano_inputs(objective, 9)
    inputs["images"][2] *= 1e3
    inputs["images"][5, 1, 3, 3] = math.nan
    inputs["images"][6] = 0.0
    present = torch.tensor([True] * 7 + [False, True])
    _, norms = brute_force(model, inputs, present, kind, 1.0)
    bound = float(np.nanmedian(norms))  # some are clipped, some are not
    expected, _ = brute_force(model, inputs, present, kind, bound)
    clip = ReferenceClip(ClipRule(kind, bound, 0.0, GAMMA))  # pyright: ignore[reportArgumentType]
    clip.prepare(model)
    totals, clipped = clipped_totals(clip, model, inputs, present)
    assert relative_error(totals, expected) < 1e-6
    assert clipped.factors[[5, 7]].tolist() == [0.0, 0.0]
    assert kind == "automatic" or 0 < int((clipped.factors == 1).sum()) < 7
    for row in (0, 1, 2, 3, 4, 6, 8):
        assert float(clipped.norms[row]) == pytest.approx(norms[row], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_norms_are_summed_exactly_or_not_at_all(kind: str) -> None:
    """Norm zero, far below and far above the range of fp32 squares, NaN and infinity, beside ordinary records."""
    model = Scaled(Toy())
    scales = [1.0, 0.0, 1e-25, 1e-15, 1e15, 1e19, 1e25, math.nan, math.inf, -math.inf, 1.0, 1e30]
    batch = toy_batch(len(scales))
    inputs = {**batch.inputs, "scale": torch.tensor(scales)}
    rule = ClipRule(kind, 0.7, 0.0, GAMMA)  # pyright: ignore[reportArgumentType]
    clip = ReferenceClip(rule)
    totals, clipped = clipped_totals(clip, model, inputs, batch.present)
    expected, norms = brute_force(model, inputs, batch.present, kind, 0.7)
    assert relative_error(totals, expected) < 1e-6
    assert all(bool(torch.isfinite(g).all()) for g in totals.values())
    for row in (2, 3, 4, 5, 6, 11):
        assert float(clipped.norms[row]) == pytest.approx(norms[row], rel=1e-5), scales[row]
        assert float(clipped.factors[row]) > 0
    assert clipped.factors[[1, 7, 8, 9]].tolist() == [0.0] * 4
    for row in range(len(scales)):
        alone = torch.zeros(len(scales), dtype=torch.bool)
        alone[row] = True
        assert size(clipped_totals(clip, model, inputs, alone)[0]) <= 0.7 * (1 + 1e-6), scales[row]


def test_a_loss_that_is_not_finite_with_a_finite_gradient_contributes_nothing() -> None:
    class Shifted(Scaled):
        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return self.inner({"images": inputs["images"]}) + inputs["scale"]

    batch = toy_batch(3)
    inputs = {**batch.inputs, "scale": torch.tensor([0.0, math.inf, 0.0])}
    clip = ReferenceClip(ClipRule("flat", 1.0, 0.0))
    _, clipped = clipped_totals(clip, Shifted(Toy()), inputs, batch.present)
    assert math.isfinite(float(clipped.norms[1])) and float(clipped.factors[1]) == 0
    assert float(clipped.factors[0]) > 0


@pytest.mark.parametrize("hostile", [math.nan, math.inf, 1e19, 1e-25, 0.0])
def test_neighbours_of_a_hostile_record_do_not_change_in_any_bit(hostile: float) -> None:
    model = build(SHAPE, "caption")
    clip = ReferenceClip(ClipRule("flat", 1.0, 0.0))
    clip.prepare(model)
    inputs, present = nano_inputs("caption", 6), torch.ones(6, dtype=torch.bool)
    changed = {**inputs, "images": inputs["images"].clone()}
    changed["images"][3] *= hostile
    _, before = clipped_totals(clip, model, inputs, present)
    sums, after = clipped_totals(clip, model, changed, present)
    others = [0, 1, 2, 4, 5]
    for name in ("norms", "losses", "factors"):
        assert torch.equal(getattr(before, name)[others], getattr(after, name)[others]), name
    without = present.clone()
    without[3] = False
    base, _ = clipped_totals(clip, model, changed, without)
    moved = {name: sums[name].double() - base[name].double() for name in base}
    assert size(moved) <= 1.0 + 1e-6
    if not math.isfinite(hostile):
        assert all(torch.equal(sums[name], base[name]) for name in base)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("odd", [math.nan, 0.0, 1e15])
def test_gradients_that_lie_in_memory_in_another_order_are_measured_too(transposed: bool, odd: float) -> None:
    """vmap may return them so; only a record whose norm is computed again in fp64 shows it."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(1, 4, 3))

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            tokens = inputs["x"].transpose(1, 2) if transposed else inputs["x"]
            return ((self.table + tokens) * tokens).sum((1, 2))

    inputs, present = {"x": torch.randn(5, 3, 4) if transposed else torch.randn(5, 4, 3)}, torch.ones(5).bool()
    inputs["x"][2] *= odd
    clip = ReferenceClip(ClipRule("flat", 1.0, 0.0))
    model = Positions()
    clip.prepare(model)
    sums, clipped = clipped_totals(clip, model, inputs, present)
    expected, norms = brute_force(model, inputs, present, "flat", 1.0)
    assert relative_error(sums, expected) < 1e-5
    others = [0, 1, 3, 4] if math.isnan(odd) else [0, 1, 2, 3, 4]
    assert clipped.norms[others].tolist() == pytest.approx([norms[row] for row in others], rel=1e-5)


def test_the_content_of_an_absent_slot_does_not_matter() -> None:
    batch = toy_batch(6, absent=(1, 4))
    clip, model = ReferenceClip(ClipRule("flat", 1.0, 0.0)), Toy()
    expected, _ = clipped_totals(clip, model, batch.inputs, batch.present)
    for value in (1.0, 1e30, math.nan, math.inf):
        images = batch.inputs["images"].clone()
        images[[1, 4]] = value
        found, _ = clipped_totals(clip, model, {"images": images}, batch.present)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    nothing, nobody = clipped_totals(clip, model, batch.inputs, torch.zeros(6, dtype=torch.bool))
    assert size(nothing) == 0.0 and not nobody.factors.any()


@pytest.mark.parametrize("objective", ["mae", "caption"])
def test_a_record_contributes_the_same_in_any_row(objective: str) -> None:
    model = build(SHAPE, objective)  # pyright: ignore[reportArgumentType, reportCallIssue]
    clip = ReferenceClip(ClipRule("flat", 0.5, 0.0))
    clip.prepare(model)
    inputs = nano_inputs(objective, 8)
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    ours, here = clipped_totals(clip, model, inputs, torch.ones(8, dtype=torch.bool))
    moved = {k: v[order] for k, v in inputs.items()}
    theirs, there = clipped_totals(clip, model, moved, torch.ones(8, dtype=torch.bool))
    assert torch.allclose(here.norms[order], there.norms, rtol=1e-6, atol=0)
    assert relative_error(theirs, ours) < 1e-6
    for row in range(8):
        place = int((order == row).nonzero())
        only, elsewhere = torch.zeros(8, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)
        only[row], elsewhere[place] = True, True
        first, _ = clipped_totals(clip, model, inputs, only)
        second, _ = clipped_totals(clip, model, moved, elsewhere)
        difference = {name: first[name].double() - second[name].double() for name in first}
        assert size(first) <= 0.5 * (1 + 1e-6) and size(difference) < 1e-6


def test_frozen_parameters_get_no_sum_and_do_not_count_in_the_norm() -> None:
    model, batch = Toy(), toy_batch(5)
    model.first.weight.requires_grad_(False)
    totals, clipped = clipped_totals(ReferenceClip(ClipRule("flat", 0.5, 0.0)), model, batch.inputs, batch.present)
    assert set(totals) == {n for n, p in model.named_parameters() if p.requires_grad}
    expected, norms = brute_force(model, batch.inputs, batch.present, "flat", 0.5)
    assert clipped.norms.tolist() == pytest.approx(norms, rel=1e-5)
    assert relative_error(totals, expected) < 1e-6


def test_a_parameter_used_twice_counts_with_its_whole_gradient() -> None:
    """Pitfalls A13, A14: tied weights."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(48, 48)

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            x = inputs["images"].flatten(1)
            return (self.layer(torch.tanh(self.layer(x))) - torch.tanh(x) @ self.layer.weight).square().sum(1)

    model, batch = Tied(), toy_batch(6)
    totals, _ = clipped_totals(ReferenceClip(ClipRule("flat", 1.0, 0.0)), model, batch.inputs, batch.present)
    expected, _ = brute_force(model, batch.inputs, batch.present, "flat", 1.0)
    assert relative_error(totals, expected) < 1e-6


def test_per_sample_gradients_agree_with_opacus() -> None:
    from opacus.grad_sample import GradSampleModule

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(48, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.flatten(1)).square().sum(1)

    class Named(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return self.inner(inputs["images"])

    model, batch = Plain(), toy_batch(7)
    clip = ReferenceClip(ClipRule("flat", 2.0, 0.0))
    totals, clipped = clipped_totals(clip, Named(model), batch.inputs, batch.present)
    theirs = GradSampleModule(model, loss_reduction="sum")
    theirs(batch.inputs["images"]).sum().backward()
    samples = {name: p.grad_sample for name, p in theirs._module.named_parameters()}
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in samples.values()]).norm(dim=0)
    factors = (2.0 / norms).clamp(max=1.0)
    assert 0 < int((factors < 1).sum()) <= 7
    expected = {f"inner.{name}": torch.einsum("b,b...->...", factors, g) for name, g in samples.items()}
    assert clipped.norms.tolist() == pytest.approx(norms.tolist(), rel=1e-5)
    assert relative_error(totals, expected) < 1e-6


# What the sharded engine wraps


def test_the_plain_forward_sums_the_losses_of_the_present_alone() -> None:
    batch = toy_batch(5, absent=(1,))
    forward = PlainForward(Toy())
    images = batch.inputs["images"].clone()
    images[1] = math.nan
    loss = forward({"images": images}, batch.present)
    expected = Toy()(batch.inputs)[[0, 2, 3, 4]]
    assert float(loss.detach()) == pytest.approx(float(expected.detach().sum()), rel=1e-6)
    assert forward.observed is not None and float(forward.observed[1]) == 0.0
