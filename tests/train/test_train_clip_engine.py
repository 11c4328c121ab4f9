"""The book-keeping engine from within: its ways to a norm agree, and what it cannot clip it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from train_helpers import SHAPE, Toy, nano_inputs, toy_batch

from model.build import build
from train.clip import ClipEngine, clipped_totals
from train.clip_book import Book
from train.clip_bookkeeping import HOLD, BookKeepingClip
from train.clip_check import check_gradients
from train.clip_groups import group_of, groups_of
from train.clip_norms import STRIPS_FROM, measure
from train.clip_opacus import OpacusClip
from train.clip_pieces import Outer, Whole, squared_length
from train.clip_reference import ReferenceClip
from train.clip_rule import ClipError, ClipRule
from train.precision import Precision

FLAT = ClipRule("flat", 0.5, 0.0)


def size(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return size({name: found[name].double() - expected[name].double() for name in found}) / size(expected)


# Norms


@settings(max_examples=60, deadline=None)
@given(
    records=st.integers(1, 4), tokens=st.integers(1, 2 * STRIPS_FROM), rows=st.integers(1, 9),
    columns=st.integers(1, 9), sparse=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_every_way_to_a_norm_gives_the_norm(
    records: int, tokens: int, rows: int, columns: int, sparse: bool, seed: int
) -> None:
    """Closed form, Gram matrices whole and in strips, and written out: of one use and of two, against fp64."""
    draw = torch.Generator().manual_seed(seed)
    dense = torch.randn(records, tokens, rows, generator=draw)
    left = torch.randint(0, rows, (records, tokens), generator=draw) if sparse else dense
    one = Outer("w", left, torch.randn(records, tokens, columns, generator=draw), torch.Size((rows, columns)))
    other = Outer("w", dense[:, :1], torch.randn(records, 1, columns, generator=draw), one.shape)
    whole = Whole("w", torch.randn(records, rows, columns, generator=draw))
    for pieces in ([one], [one, other], [other, one, one], [one, whole]):
        exact = torch.stack([piece.instances(slice(None), torch.float64) for piece in pieces]).sum(0)
        expected = exact.flatten(1).square().sum(1)
        found = measure(list(pieces))
        trace = torch.stack([piece.spread().sqrt() for piece in pieces]).sum(0).square()
        # A doubt is an estimate; four times it is far inside what C is lowered by (1e-4 of a square calls for fp64).
        assert bool(((found.square - expected).abs() <= 4 * found.doubt + 1e-6 * expected).all())
        cancels = len(pieces) > 1 or tokens > 1
        assert not cancels or bool((found.doubt >= 1e-7 * trace).all()), "terms that may cancel leave a doubt"


def test_the_same_sums_come_from_gradients_held_and_not_held() -> None:
    model, inputs, present = build(SHAPE, "mae"), nano_inputs("mae", 5), torch.ones(5, dtype=torch.bool)
    never, _ = clipped_totals(BookKeepingClip(FLAT, hold=0.0), model, inputs, present)
    for hold in (*HOLD.values(), 1e9):
        found, seen = clipped_totals(BookKeepingClip(FLAT, hold=hold), model, inputs, present)
        assert apart(found, never) < 1e-6 and 0 < float(seen.factors.max()) <= 1


def test_a_step_done_again_is_the_same_in_every_bit() -> None:
    model, inputs, present = build(SHAPE, "caption"), nano_inputs("caption", 5), torch.ones(5, dtype=torch.bool)
    first, _ = clipped_totals(BookKeepingClip(FLAT), model, inputs, present)
    again, _ = clipped_totals(BookKeepingClip(FLAT), model, inputs, present)
    assert all(torch.equal(first[name], again[name]) for name in first)


# Groups


def test_groups_follow_blocks_and_layers() -> None:
    assert group_of("blocks.3.attn.qkv.weight", "block") == "blocks.3"
    assert group_of("decoder.layers.0.norm1.bias", "block") == "decoder.layers.0"
    assert group_of("cls_token", "block") == group_of("norm.weight", "block") == ""
    assert group_of("blocks.3.attn.qkv.weight", "layer") == group_of("blocks.3.attn.qkv.bias", "layer")
    assert group_of("cls_token", "layer") == "cls_token"
    names = [name for name, _ in build(SHAPE, "mae").named_parameters()]
    assert set(groups_of(names, "all").values()) == {0}
    assert 1 < len(set(groups_of(names, "block").values())) < len(set(groups_of(names, "layer").values()))


@pytest.mark.parametrize("kind", ["flat", "automatic"])
@pytest.mark.parametrize("grouping", ["block", "layer"])
def test_each_group_keeps_to_its_share_and_all_to_the_bound(grouping: Any, kind: Any) -> None:
    model, inputs = build(SHAPE, "mae"), nano_inputs("mae", 4)
    rule = ClipRule(kind, 1e-4, 0.0, 0.0, grouping)
    group = groups_of([name for name, _ in model.named_parameters()], grouping)
    count = len(set(group.values()))
    for row in range(4):
        alone = torch.zeros(4, dtype=torch.bool)
        alone[row] = True
        totals, seen = clipped_totals(BookKeepingClip(rule), model, inputs, alone)
        for number in range(count):
            share = size({name: g for name, g in totals.items() if group[name] == number}) * math.sqrt(count)
            assert share <= 1e-4 * (1 + 1e-5)
            assert share == 0 or share == pytest.approx(1e-4, rel=1e-3), "every group is far above its share"
        assert size(totals) <= seen.sensitivity * (1 + 1e-5)


# Precision


@pytest.mark.parametrize(("precision", "near"), [("bf16", 0.1), ("fp16", 0.02)])
@pytest.mark.parametrize("rounded", [False, True])
def test_half_precision_is_close_and_keeps_the_bound(precision: Precision, near: float, rounded: bool) -> None:
    model, inputs, present = build(SHAPE, "caption"), nano_inputs("caption", 24), torch.ones(24, dtype=torch.bool)
    exact, _ = clipped_totals(BookKeepingClip(FLAT), model, inputs, present)
    clip = BookKeepingClip(FLAT, precision, round_operands=rounded)
    found, seen = clipped_totals(clip, model, inputs, present)
    assert all(g.dtype == torch.float32 for g in found.values()) and bool((seen.factors < 1).all())
    assert 1e-5 < apart(found, exact) < near, "half precision is used, and only that"
    for row in range(24):
        alone = torch.zeros(24, dtype=torch.bool)
        alone[row] = True
        mine = size(clipped_totals(clip, model, inputs, alone)[0])
        low = 0.97 if rounded and precision == "bf16" else 0.99999
        assert low * FLAT.bound < mine <= seen.sensitivity * (1 + 1e-5)


class Given(nn.Module):
    """Activations and output gradients as they are given."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.layer = nn.Linear(columns, rows, bias=False)

    def forward(self, inputs: Any) -> Tensor:
        return (self.layer(inputs["x"]).float() * inputs["g"]).sum((1, 2))


@pytest.mark.parametrize("tokens", [1, 8, 64, 197])
@pytest.mark.parametrize(("rows", "columns"), [(4, 24), (24, 4), (96, 96)])
def test_equal_tokens_that_round_alike_and_cancel_stay_within_the_bound(rows: int, columns: int, tokens: int) -> None:
    """Rounding of the weighted bf16 operand, made as bad as it can be: many tokens +a, some -b, in all ratios."""
    model, draw = Given(rows, columns), torch.Generator().manual_seed(0)
    largest, one = 0.0, torch.ones(1, dtype=torch.bool)
    for trial in range(60):
        high, low = 1 + torch.randint(0, 128, (2,), generator=draw) / 128
        ahead = int(torch.randint(tokens // 2, tokens, (1,), generator=draw)) + 1
        sign = torch.cat([torch.ones(ahead), -torch.ones(tokens - ahead)])
        sizes = torch.cat([high.expand(ahead), low.expand(tokens - ahead)])
        carrier, other = sizes[:, None].expand(tokens, rows), sign[:, None].expand(tokens, columns)
        if columns < rows:  # the operand with fewer columns carries the factor
            carrier, other = sign[:, None].expand(tokens, rows), sizes[:, None].expand(tokens, columns)
        inputs = {"x": other[None].contiguous(), "g": carrier[None].contiguous()}
        bound = float(torch.rand(1, generator=draw)) * 0.1 + 0.01
        clip = BookKeepingClip(ClipRule("flat", bound, 0.0), "bf16", hold=0.0, round_operands=True)
        totals, seen = clipped_totals(clip, model, inputs, one)
        largest = max(largest, size(totals) / bound if float(seen.factors[0]) < 1 else 0.0)
        exact, _ = clipped_totals(BookKeepingClip(clip.rule, "bf16", hold=0.0), model, inputs, one)
        assert size(exact) <= bound * (1 + 1e-4), trial
    assert 0.5 < largest <= 1 + 1e-6


def test_norms_of_millions_of_elements_are_added_up_in_stretches() -> None:
    """fp32 squares, one after the other, are 0.2 % short at two million."""
    value = torch.full((2, 2_400_001), 1.0371)
    expected = 2_400_001 * float(value[0, 0]) ** 2
    assert torch.allclose(squared_length(value), torch.tensor(expected).double(), rtol=1e-5)
    few = torch.arange(24.0).view(2, 3, 4)
    assert torch.allclose(squared_length(few), few.double().square().sum(-1), rtol=1e-6)


def test_a_use_that_was_not_announced_is_no_part_of_any_sum() -> None:
    book = Book({"w": 0}, 2, 1.0, False, torch.device("cpu"))
    piece = Whole("w", torch.ones(2, 3))
    book.enter([piece], {"w": 1})
    with pytest.raises(ClipError, match="more uses"):
        book.enter([piece], {"w": 1})


# Refusals


class Body(nn.Module):
    def __init__(self, act: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(48, 5), nn.Linear(5, 5), act

    def forward(self, inputs: Any) -> Tensor:
        return self.act(self, inputs["images"].flatten(1)).square().sum(1)


def reentrant(body: Any, x: Tensor) -> Tensor:
    out = checkpoint(body.second, body.first(x), use_reentrant=True)
    assert isinstance(out, Tensor)
    return out


def rows_mixed(body: Any, x: Tensor) -> Tensor:
    return body.second(body.first(x)[:1])


REFUSED: list[tuple[str, Callable[[Any, Tensor], Tensor]]] = [
    ("does not use second", lambda body, x: body.first(x)),
    ("does not use second", reentrant),
    ("cannot be told apart", rows_mixed),
]


@pytest.mark.parametrize(("message", "act"), REFUSED)
def test_what_cannot_be_clipped_is_refused(message: str, act: Callable[[Any, Tensor], Tensor]) -> None:
    batch, model = toy_batch(4), Body(act)
    clip = BookKeepingClip(FLAT)
    clip.prepare(model)
    for _ in range(2):
        with pytest.raises(ClipError, match=message):
            clip.add_clipped(model, batch.inputs, batch.present, _Nowhere())


def test_a_scripted_part_hides_its_parameters_and_is_refused() -> None:
    model = Toy()
    model.second = torch.jit.script(model.second)  # pyright: ignore[reportAttributeAccessIssue]
    batch = toy_batch(4)
    with pytest.raises(ClipError, match=r"second\.(weight|bias)"):
        BookKeepingClip(FLAT).add_clipped(model, batch.inputs, batch.present, _Nowhere())


class _Nowhere:
    def add(self, name: str, value: Tensor) -> None:
        raise AssertionError(f"{name} was added to, although the model is refused")

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        raise AssertionError(f"{name} was added to, although the model is refused")


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Embedding(9, 4, scale_grad_by_freq=True), torch.randint(0, 9, (3, 5))),
        (nn.Embedding(9, 4, max_norm=1.0), torch.randint(0, 9, (3, 5))),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True), torch.randn(3, 5, 4)),
        (nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), torch.randn(3, 5, 4)),
        (nn.BatchNorm1d(5), torch.randn(3, 5)),
    ],
)
def test_layers_that_mix_records_or_drop_units_are_refused(layer: nn.Module, inputs: Tensor) -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, given: Any) -> Tensor:
            x = given["x"]
            out = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
            return out.flatten(1).square().sum(1)

    with pytest.raises(ClipError):
        BookKeepingClip(FLAT).add_clipped(Only(), {"x": inputs}, torch.ones(3, dtype=torch.bool), _Nowhere())


def test_half_parameters_and_models_without_any_are_refused() -> None:
    with pytest.raises(ClipError, match="half precision"):
        BookKeepingClip(FLAT).prepare(Toy().bfloat16())
    with pytest.raises(ClipError, match="no trainable"):
        BookKeepingClip(FLAT).prepare(Toy().requires_grad_(False))


def test_an_unknown_function_is_announced_and_right() -> None:
    model = Body(lambda body, x: torch.einsum("bi,oi->bo", body.first(x).tanh(), body.second.weight) + body.second.bias)
    batch = toy_batch(5)
    with pytest.warns(UserWarning, match="einsum has no clipping rule"):
        found, _ = clipped_totals(BookKeepingClip(FLAT), model, batch.inputs, batch.present)
    expected, _ = clipped_totals(ReferenceClip(FLAT), model, batch.inputs, batch.present)
    assert apart(found, expected) < 1e-6


# No more work, and no more memory, than needed


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

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

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


# Against Opacus, and against the definition at every start


def test_opacus_agrees_on_a_vision_transformer() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.vit = timm.create_model(
                "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5
            )
            self.vit.cls_token.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue]
            self.vit.pos_embed.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue]

        def forward(self, inputs: Any) -> Tensor:
            return F.cross_entropy(self.vit(inputs["images"]), inputs["label"], reduction="none")

    draw = torch.Generator().manual_seed(0)
    inputs = {"images": torch.randn(6, 3, 16, 16, generator=draw), "label": torch.arange(6) % 5}
    inputs["images"][4] = math.nan
    present = torch.tensor([True, True, False, True, True, True])
    model = Classifier()
    peer = OpacusClip(FLAT)
    peer.prepare(model)
    expected, theirs = clipped_totals(peer, model, inputs, present)
    found, ours = clipped_totals(BookKeepingClip(FLAT), model, inputs, present)
    assert apart(found, expected) < 1e-6 and bool((ours.factors[[0, 1, 3, 5]] < 1).any())
    assert torch.allclose(ours.factors.double(), theirs.factors.double(), rtol=1e-5)
    with pytest.raises(ClipError, match="Opacus has no per-record gradients"):
        peer.prepare(build(SHAPE, "mae"))


@pytest.mark.parametrize("make", [ReferenceClip, BookKeepingClip])
def test_an_honest_engine_passes_the_check_and_a_wrong_one_does_not(make: Callable[[ClipRule], ClipEngine]) -> None:
    batch = toy_batch(5, absent=(0,))
    clip = make(FLAT)
    check_gradients(clip, Toy(), batch.inputs, batch.present)
    assert clip.rule == FLAT

    class Coupled(nn.Module):
        """Records in another order: a weight is added to rows of the wrong record."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(48, 5)

        def forward(self, inputs: Any) -> Tensor:
            return self.layer(inputs["images"].flatten(1).flip(0)).flip(0).square().sum(1)

    if make is BookKeepingClip:
        with pytest.raises(ClipError, match="is off by"):
            check_gradients(clip, Coupled(), batch.inputs, batch.present)
        assert clip.rule == FLAT
