"""The book-keeping engine from within: the same sums on every way, no more work than needed, and Opacus agrees."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any, Literal

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.model.build import build
from murmuration.train.clip.accumulator import NormAccumulator
from murmuration.train.clip.bookkeeping import HOLD, BookKeepingClip
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.losses import uncompiled
from murmuration.train.clip.per_record import Dense, OuterProduct
from murmuration.train.clip.reference import OpacusClip, ReferenceClip
from murmuration.train.clip.rule import RECORDS_AT_ONCE, ClipError
from murmuration.train.engines.forward import PlainForward
from tests.support import brute_force
from tests.support.clip_world import FLAT, Body, apart
from tests.support.train_helpers import SHAPE, Toy, nano_inputs, toy_batch


def test_the_same_sums_come_from_gradients_held_and_not_held() -> None:
    model, inputs, present = build(SHAPE, "mae"), nano_inputs("mae", 5), torch.ones(5, dtype=torch.bool)
    never, _ = clipped_totals(BookKeepingClip(FLAT, hold=0.0), model, inputs, present)
    for hold in (*HOLD.values(), 1e9):
        found, seen = clipped_totals(BookKeepingClip(FLAT, hold=hold), model, inputs, present)
        assert apart(found, never) < 1e-6 and 0 < float(seen.factors.max()) <= 1


@pytest.mark.parametrize("objective", ["mae", "caption"])
def test_more_records_than_are_summed_at_once_are_the_sum_of_two_micro_batches(
    objective: Literal["mae", "caption"],
) -> None:
    model, inputs, present = build(SHAPE, objective), nano_inputs(objective, 150), torch.arange(150) % 7 > 0
    whole, seen = clipped_totals(BookKeepingClip(FLAT, "bf16", round_operands=True), model, inputs, present)
    parts = []
    for rows in (slice(0, RECORDS_AT_ONCE), slice(RECORDS_AT_ONCE, None)):
        some = {name: value[rows] for name, value in inputs.items()}
        parts.append(clipped_totals(BookKeepingClip(FLAT, "bf16", round_operands=True), model, some, present[rows]))
    both = {name: parts[0][0][name] + parts[1][0][name] for name in whole}
    assert apart(both, whole) < 1e-3, "up to how bf16 products are cut"
    assert torch.allclose(seen.norms, torch.cat([part.norms for _, part in parts]), rtol=1e-2)


def test_a_step_done_again_is_the_same_in_every_bit() -> None:
    model, inputs, present = build(SHAPE, "caption"), nano_inputs("caption", 5), torch.ones(5, dtype=torch.bool)
    first, _ = clipped_totals(BookKeepingClip(FLAT), model, inputs, present)
    again, _ = clipped_totals(BookKeepingClip(FLAT), model, inputs, present)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("objective", ["mae", "caption"])
def test_nothing_of_a_micro_batch_waits_for_the_garbage_collector(objective: Literal["mae", "caption"]) -> None:
    """It would keep the activations in memory, and collecting takes longer than many a step of a last layer."""
    model, inputs, present = build(SHAPE, objective), nano_inputs(objective, 5), torch.ones(5, dtype=torch.bool)
    clip = BookKeepingClip(FLAT)
    clipped_totals(clip, model, inputs, present)
    gc.disable()
    try:
        left = []
        for _ in range(3):  # what other threads leave meanwhile is counted too, but not each time
            gc.collect()
            gc.collect()  # what was ended by the first
            clipped_totals(clip, model, inputs, present)
            left.append(gc.collect())
        assert min(left) == 0
    finally:
        gc.enable()


def test_tensors_that_were_exchanged_between_micro_batches_are_seen() -> None:
    """What the engine remembers of a model is looked up again where another tensor stands in its place."""
    batch, model = toy_batch(6), Toy()
    inputs, present = batch.inputs, batch.present
    clip = BookKeepingClip(FLAT)
    before, _ = clipped_totals(clip, model, inputs, present)
    model.first.weight = nn.Parameter(model.first.weight.detach() * 1.5)
    moved, _ = clipped_totals(clip, model, inputs, present)
    expected, _ = clipped_totals(BookKeepingClip(FLAT), model, inputs, present)
    assert apart(moved, expected) == 0 and apart(moved, before) > 1e-3
    model.first.weight.requires_grad_(False)
    frozen, _ = clipped_totals(clip, model, inputs, present)
    assert frozen.keys() == before.keys() - {"first.weight"}
    model.first.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ClipError, match="unused"):
        clipped_totals(clip, model, inputs, present)


@pytest.mark.parametrize("how", ["blocks", "whole", "function"])
def test_compiled_parts_run_as_written_while_gradients_are_clipped(how: str) -> None:
    """To the bit, without a frame compiled; elsewhere they stay compiled."""
    from torch._dynamo.utils import counters

    model, inputs, present = build(SHAPE, "mae"), nano_inputs("mae", 5), torch.ones(5, dtype=torch.bool)
    expected, _ = clipped_totals(BookKeepingClip(FLAT), model, inputs, present)
    if how == "function":
        model.forward = torch.compile(model.forward, backend="eager")
    else:
        for part in model.blocks.children() if how == "blocks" else [model]:
            part.compile(backend="eager")
    counters.clear()
    found, _ = clipped_totals(BookKeepingClip(FLAT), model, inputs, present)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not counters["frames"]
    model(inputs)
    assert counters["frames"]["ok"] > 0
    torch._dynamo.reset()


def test_one_thread_that_leaves_a_pass_lets_no_compiled_code_into_anothers() -> None:
    """Nor does the last one leave PyTorch as if a pass were still under way."""
    torch._dynamo.reset()  # imports it
    calls = list[str]()

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *given: calls.append("compiled") or graph(*given)

    doubled = torch.compile(lambda x: 2 * x, backend=backend)
    entered, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with uncompiled():
            entered.set()
            go_on.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    with uncompiled():
        go_on.set()
        thread.join()
        doubled(torch.ones(2))
        assert not calls
    doubled(torch.ones(2))
    assert calls == ["compiled"]
    torch._dynamo.reset()


def test_below_the_first_trained_layer_nothing_runs_backward() -> None:
    model, batch = Body(lambda body, x: body.second(Counted.apply(body.first(x)))), toy_batch(4)
    model.first.requires_grad_(False)
    Counted.backwards = 0
    clipped_totals(BookKeepingClip(FLAT), model, batch.inputs, batch.present)
    assert Counted.backwards == 0
    model.first.requires_grad_(True)
    clipped_totals(BookKeepingClip(FLAT), model, batch.inputs, batch.present)
    assert Counted.backwards == 1, "one backward pass, no second one"


class Counted(torch.autograd.Function):
    backwards = 0

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        Counted.backwards += 1
        return gradient


def test_the_model_and_its_gradients_are_left_alone() -> None:
    model, batch = Toy(), toy_batch(4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    clipped_totals(BookKeepingClip(FLAT), model, batch.inputs, batch.present)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def agreed_with_opacus(model: Any, inputs: Any, present: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Its sums, and our factors."""
    peer = OpacusClip(FLAT)
    peer.prepare(model)
    expected, theirs = clipped_totals(peer, model, inputs, present)
    found, ours = clipped_totals(BookKeepingClip(FLAT), model, inputs, present)
    assert apart(found, expected) < 1e-6
    torch.testing.assert_close(ours.factors.double(), theirs.factors.double(), rtol=1e-5, atol=0)
    return expected, ours.factors


def test_opacus_agrees_on_a_vision_transformer() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.vit = timm.create_model(
                "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5
            )

        def forward(self, inputs: Any) -> Tensor:
            return F.cross_entropy(self.vit(inputs["images"]), inputs["label"], reduction="none")

    draw = torch.Generator().manual_seed(0)
    inputs = {"images": torch.randn(6, 3, 16, 16, generator=draw), "label": torch.arange(6) % 5}
    inputs["images"][4] = math.nan
    present = torch.tensor([True, True, False, True, True, True])
    assert bool((agreed_with_opacus(Classifier(), inputs, present)[1][[0, 1, 3, 5]] < 1).any())


@pytest.mark.parametrize("objective", ["mae", "caption", "classify"])
def test_opacus_agrees_on_our_models(objective: Literal["mae", "caption", "classify"]) -> None:
    """Class and mask tokens lie outside of the layers that it hooks."""
    model, inputs, present = build(SHAPE, objective), nano_inputs(objective, 5), torch.arange(5) != 1
    if objective == "classify":
        inputs = {"images": inputs["images"], "labels": torch.arange(5) % 3}
        nn.init.normal_(model.head.weight)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    expected, _ = agreed_with_opacus(model, inputs, present)
    tokens = [name for name in ("cls_token", "mask_token") if name in expected]
    assert all(bool(expected[name].any()) for name in tokens)
    assert tokens or objective == "caption", "whose class token is frozen"


def test_opacus_has_no_gradients_for_tied_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with pytest.raises(ClipError, match="Opacus has no per-record gradients for weights that are tied"):
        OpacusClip(FLAT).prepare(model)


@pytest.mark.parametrize("shared", ["weight and bias", "bias"])
def test_a_layer_used_twice_by_one_token_of_each_record_is_measured_as_one_gradient(shared: str) -> None:
    """The shortcut for a weight with its bias is for one use alone; the second would be measured without the first."""

    def act(body: Any, x: Tensor) -> Tensor:
        hidden = body.first(x).tanh()
        again = body.second(-2 * hidden) if shared == "weight and bias" else hidden + body.second.bias
        return body.second(hidden) + again

    batch, model = toy_batch(5), Body(act)
    found, seen = clipped_totals(BookKeepingClip(FLAT), model, batch.inputs, batch.present)
    expected, other = clipped_totals(ReferenceClip(FLAT), model, batch.inputs, batch.present)
    assert apart(found, expected) < 1e-6
    torch.testing.assert_close(seen.norms, other.norms, rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", ["bias of other values", "tokens that cancel"])
def test_only_a_bias_that_is_its_weights_left_side_shares_its_lengths(case: str) -> None:
    draw = torch.Generator().manual_seed(4)
    left, right = torch.randn(3, 2, 5, generator=draw), torch.randn(3, 2, 4, generator=draw)
    if case == "bias of other values":
        left, right = left[:, :1].clone(), right[:, :1].clone()
        bias = torch.randn(3, 5, generator=draw)
    else:
        bias = left.sum(1)
        # As if a view of the gradients' memory had been handed on.
        bias = left.flatten(1)[:, :5].copy_(bias)
    weights = torch.einsum("bto,bti->boi", left.double(), right.double()).flatten(1)
    expected = (weights.square().sum(1) + bias.double().square().sum(1)).sqrt()
    accumulator = NormAccumulator({"w": 0, "b": 0}, 3, 0.0, False, torch.device("cpu"))
    accumulator.add([OuterProduct("w", left, right, torch.Size((5, 4))), Dense("b", bias)], {"w": 1, "b": 1})
    torch.testing.assert_close(accumulator.norms(torch.ones(3, dtype=torch.bool))[0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("odd", [math.nan, 0.0, 1e15])
def test_gradients_that_lie_in_memory_in_another_order_are_measured_too(transposed: bool, odd: float) -> None:
    """vmap may return them so to the reference; only a record whose norm is computed again in fp64 shows it."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(1, 4, 3))

        def forward(self, inputs: Any) -> Tensor:
            tokens = inputs["x"].transpose(1, 2) if transposed else inputs["x"]
            return ((self.table + tokens) * tokens).sum((1, 2))

    inputs, present = {"x": torch.randn(5, 3, 4) if transposed else torch.randn(5, 4, 3)}, torch.ones(5).bool()
    inputs["x"][2] *= odd
    model = Positions()
    records = brute_force.records_of(model, inputs)
    factors = brute_force.factors_of(records, present, brute_force.flat(FLAT.bound))
    sums, clipped = clipped_totals(ReferenceClip(FLAT), model, inputs, present)
    assert brute_force.relative_error(sums, brute_force.clipped_sum(records, factors)) < 1e-5
    others = [row for row in range(5) if row != 2 or not math.isnan(odd)]
    assert clipped.norms[others].tolist() == pytest.approx([records[row].norm() for row in others], rel=1e-5)


def test_the_plain_forward_sums_the_losses_of_the_present_alone() -> None:
    batch = toy_batch(5, absent=(1,))
    forward = PlainForward(Toy())
    images = batch.inputs["images"].clone()
    images[1] = math.nan
    loss = forward({"images": images}, batch.present)
    expected = Toy()(batch.inputs)[[0, 2, 3, 4]]
    assert float(loss.detach()) == pytest.approx(float(expected.detach().sum()), rel=1e-6)
    assert forward.observed is not None and float(forward.observed[1]) == 0.0
