"""Weights that are standardised before they are used: norms and sums without a gradient per record of the weight.

The judge is plain autograd, record by record, through timm's own modules. Two ways lead to a sum: gradients that are
small next to their activations are kept, others are measured by sums over their rows and added up before the Jacobian.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers.std_conv import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from murmuration.train.clip import norms, tracker
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.check import check_gradients
from murmuration.train.clip.functions import Geometry
from murmuration.train.clip.norms import TOLERANCE, measure
from murmuration.train.clip.per_record import Dense, OuterProduct, ViaReparametrisation
from murmuration.train.clip.rule import RECORDS_AT_ONCE, ClipRule, rounding_allowance
from murmuration.train.clip.standardised import ALONG, LARGEST, Standardisation, ViaStandardisation, along
from murmuration.train.clip.sums import ExactSums, Float32Sums, trainable_shapes
from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.kernel_doubles import have_only
from tests.support.parity_cases import CASES, Case, dense, label, pictures
from tests.support.parity_engines import contribution, judged, rule_of, summed
from tests.support.parity_models import BigTransfer, Inputs, OnX

NEVER, ALWAYS = 0.0, 1e9  # how large a gradient may be to be kept


class Twice(nn.Module):
    """One standardised layer at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = StdConv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.gelu(self.conv(x)))


class StandardisedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.unsqueeze(0), None, None, training=True, momentum=0.0, eps=1e-3)
        return F.linear(input, weight.view_as(self.weight), self.bias)


def frozen(module: nn.Module, name: str) -> nn.Module:
    module.get_parameter(name).requires_grad_(False)
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: OnX(StdConv2d(4, 8, 3, padding=1)),
    "stride and groups": lambda: OnX(StdConv2d(4, 8, 3, stride=2, groups=2, bias=True)),
    "each channel by itself": lambda: OnX(StdConv2d(4, 4, 3, padding=1, groups=4)),
    "one pixel": lambda: OnX(StdConv2d(4, 8, 1), nn.GELU(), StdConv2d(8, 6, 1, stride=2)),
    "dynamic padding": lambda: OnX(StdConv2dSame(4, 8, 3, stride=2), nn.GELU(), StdConv2dSame(8, 4, 2, stride=3)),
    "gain": lambda: OnX(ScaledStdConv2d(4, 8, 3, padding=1), nn.GELU(), ScaledStdConv2d(8, 4, 1)),
    "gain, padding": lambda: OnX(ScaledStdConv2dSame(4, 8, 3, stride=2, groups=2, gamma=1.7, eps=0.1)),
    "gain alone": lambda: OnX(frozen(ScaledStdConv2d(4, 8, 3), "weight")),
    "without its gain": lambda: OnX(frozen(ScaledStdConv2d(4, 8, 3), "gain")),
    "twice": lambda: OnX(Twice()),
    "linear": lambda: OnX(nn.Flatten(2), StandardisedLinear(49, 5)),
}
FOUND_CASES = {name: Case(make, dense(4, 7, 7)) for name, make in MODULES.items()} | {
    "BiT": Case(BigTransfer, pictures(16, label=label))
}


def clip_of(model: nn.Module, rule: ClipRule, hold: float, precision: Any = "fp32", **how: Any) -> BookKeepingClip:
    clip = BookKeepingClip(rule, precision, hold, **how)
    clip.prepare(model)
    return clip


def error_of(name: str, hold: float) -> float:
    """Of the sum of seven records, some clipped, in fp64: the largest of all parameters' own."""
    case = FOUND_CASES[name]
    model, inputs = case.model(torch.float64), case.batch(7, torch.float64)
    everyone = torch.ones(7, dtype=torch.bool)
    records = brute_force.records_of(model, inputs)
    bound, _, expected = judged(records, everyone)
    totals, _ = summed(clip_of(model, rule_of("flat", bound), hold), model, [(inputs, everyone)], double=True)
    return max(relative_error({each: totals[each]}, {each: expected[each]}) for each in expected)


@pytest.mark.parametrize("hold", [NEVER, ALWAYS])
@pytest.mark.parametrize("name", FOUND_CASES)
def test_clipped_sums_are_those_of_plain_autograd(name: str, hold: float) -> None:
    assert error_of(name, hold) <= 1e-9


def test_few_records_are_added_up_before_parts_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that each may be LARGEST times as long, so that `rounding_allowance` holds for fewer of them."""
    added: list[int] = []
    honest = ViaStandardisation.add_weighted

    def watched(self: ViaStandardisation, *rest: Any) -> None:
        added.append(self.records)
        honest(self, *rest)

    monkeypatch.setattr(ViaStandardisation, "add_weighted", watched)
    case, records = FOUND_CASES["plain"], RECORDS_AT_ONCE
    model = case.model(torch.float32)
    batch = case.batch(records, torch.float32)
    summed(clip_of(model, rule_of("flat", 1.0), NEVER), model, [(batch, torch.ones(records, dtype=torch.bool))])
    assert sum(added) == records
    most = max(added)
    assert (records / most) ** 2 >= LARGEST and (records / most) ** 1.5 >= LARGEST


def test_parts_are_taken_away_from_a_sum_in_fp64() -> None:
    """In fp32, they would leave their rounding behind beside that of the sum, for which alone there is an allowance."""
    seen: dict[str, torch.dtype] = {}

    class Watched(ExactSums):
        def add(self, name: str, value: Tensor) -> None:
            seen[name] = value.dtype
            super().add(name, value)

    case = FOUND_CASES["plain"]
    model, batch = case.model(torch.float32), case.batch(4, torch.float32)
    sums = Watched(trainable_shapes(model), torch.device("cpu"))
    clip_of(model, rule_of("flat", 1.0), NEVER).add_clipped(model, batch, torch.ones(4, dtype=torch.bool), sums)
    (weight,) = (name for name, shape in trainable_shapes(model).items() if len(shape) == 4)
    assert seen[weight] == torch.float64


@pytest.mark.parametrize("name", ["plain", "gain, padding", "one pixel", "linear", "BiT"])
def test_no_gradient_goes_through_autograd_record_by_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains are small and may; the weights may not."""
    used: list[Any] = []
    honest = ViaReparametrisation.instances

    def watched(self: ViaReparametrisation, *rest: Any) -> Tensor:
        used.append(self.inner)
        return honest(self, *rest)

    monkeypatch.setattr(ViaReparametrisation, "instances", watched)
    error_of(name, NEVER)
    assert all(isinstance(inner, Dense) for inner in used)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (name, fault)
        for name in ("plain", "gain, padding", "one pixel", "twice", "BiT")
        for fault in ("no mean", "no direction", "not scaled", "norm of the made weight")
        if (name, fault) != ("twice", "norm of the made weight")  # of several uses, gradients are written out
    ],
)
def test_a_part_that_is_forgotten_is_found(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def back(self: Standardisation, gradient: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        own = gradient.reshape(-1, *self.shape).to(dtype or gradient.dtype)
        found = own if fault == "no mean" else own - own.mean(2, keepdim=True)
        if fault != "no direction":
            found = found - (own * self.direction).mean(2, keepdim=True) * self.direction
        return found if fault == "not scaled" else found * self.scale[:, None]

    if fault == "norm of the made weight":
        honest = Standardisation.squares
        monkeypatch.setattr(Standardisation, "squares", lambda self, sums: (honest(self, sums)[1],) * 2)
    else:
        monkeypatch.setattr(Standardisation, "back", back)
    assert error_of(name, NEVER) > 1e-6


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4), elements=st.integers(2, 40), eps=st.sampled_from([1e-12, 1e-3, 1.0]), gain=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_the_jacobian_is_autograd_s(rows: int, elements: int, eps: float, gain: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, rows, elements, dtype=torch.float64, generator=draw).requires_grad_()
    factor = torch.randn(rows, dtype=torch.float64, generator=draw) if gain else None
    gradient = torch.randn(rows, elements, dtype=torch.float64, generator=draw)
    made = F.batch_norm(weight, None, None, factor, None, True, 0.0, eps)
    (expected,) = torch.autograd.grad(made, weight, gradient[None])
    by = Standardisation.of(weight.detach(), factor, eps)
    assert torch.allclose(by.back(gradient[None]), expected, rtol=1e-9, atol=1e-9 * float(by.scale.abs().max()))
    sums = torch.stack([gradient.square().sum(1), gradient.sum(1), (gradient * by.direction).sum(1)])[:, None]
    square, whole = by.squares(sums)
    before = (gradient * by.scale[:, None]).square().sum()
    assert float(whole) == pytest.approx(float(before), rel=1e-12)
    assert float(square) == pytest.approx(float(expected.square().sum()), abs=1e-12 * float(before))


@pytest.mark.parametrize("eps", [1e-8, 1e-6, 1e-3])
@pytest.mark.parametrize(("level", "spread"), [(1000.1, 0.0), (0.3, 0.0), (100.0, 0.01), (7.7, 1e-5), (0.0, 0.0)])
def test_a_row_that_is_nearly_constant_has_the_norm_of_what_is_added(level: float, spread: float, eps: float) -> None:
    """Rounding leaves it a mean, along which gradients may lie."""
    draw = torch.Generator().manual_seed(0)
    by = Standardisation.of(level + spread * torch.randn(1, 3, 64, generator=draw), None, eps)
    for gradient in (torch.ones(3, 64), by.direction + 1, torch.randn(3, 64, generator=draw)):
        square, whole = by.squares(by.row_sums(gradient[None].double()))
        added = by.back(gradient[None].double()).square().sum()
        assert abs(float(square) - float(added)) <= 1e-9 * float(whole)


@settings(max_examples=40, deadline=None)
@given(
    elements=st.sampled_from([3, 64, 147, 513, 521, 1153, 2304]), drowned=st.sampled_from([0.0, 1.0, 30.0, 1e4, 1e7]),
    tokens=st.integers(1, 9), seed=st.integers(0, 1000),
)  # fmt: skip
def test_the_bound_holds_whatever_is_taken_away(elements: int, drowned: float, tokens: int, seed: int) -> None:
    """Activations of a large common part, and gradients of outputs all alike: then g is nearly parallel to ones."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, 5, elements, generator=draw)
    by = Standardisation.of(weight, None, 1e-6)
    left, right = torch.rand(3, tokens, 5, generator=draw), torch.randn(3, tokens, elements, generator=draw)
    right[1:] += drowned
    right[2] += drowned * by.direction[0]
    inner = OuterProduct("", left, right, by.shape)
    piece = ViaStandardisation("w", inner, weight[0], by)
    exact = piece.instances(slice(None), torch.float64).flatten(1).square().sum(1)
    before = piece.scaled().instances(slice(None), torch.float64).flatten(1).square().sum(1)
    found = measure([piece])
    assert found.doubt is not None and bool(((found.square - exact).abs() <= found.doubt).all())
    beyond = before > LARGEST**2 * exact
    assert bool((found.doubt > TOLERANCE * exact)[beyond].all()), "too much is taken away to be added up in fp32"


def test_tokens_that_cancel_leave_the_doubt_of_their_lengths() -> None:
    draw, tokens = torch.Generator().manual_seed(0), 300
    by = Standardisation.of(torch.randn(1, 5, 64, generator=draw), None, 1e-6)
    left, right = torch.ones(3, tokens, 5), 8 * torch.randn(3, 1, 64, generator=draw).expand(3, tokens, 64)
    left[:, ::2] = -1
    piece = ViaStandardisation("w", OuterProduct("", left, right.clone(), by.shape), torch.zeros(5, 64), by)
    found, scaled = measure([piece]), piece.scaled()
    assert isinstance(scaled, OuterProduct) and found.doubt is not None
    length = (scaled.left.double().norm(dim=2) * scaled.right.double().norm(dim=2)).sum(1)
    error = tokens * torch.finfo(torch.float32).eps * length
    assert bool((found.doubt >= (2 * found.square.clamp(min=0.0).sqrt() + error) * error).all())


def test_stretches_of_a_row_are_short_and_leave_nothing_out() -> None:
    for elements in (1, 7, 64, 147, 512, 513, 521, 1153, 4608):
        sizes: list[int] = []

        def reduce(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.shape[-1])
            return x.sum(-1)

        values = torch.arange(2.0 * elements).double().view(2, elements)
        assert torch.equal(along(values, reduce).sum(-1), values.sum(-1)) and max(sizes) <= ALONG


class ReadConv(nn.Module):
    """A loss whose gradient with respect to the layer's output is an input."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, inputs: Inputs) -> Tensor:
        return (self.conv(inputs["x"]).float() * inputs["g"]).sum((1, 2, 3))


def hostile(model: ReadConv, count: int, left: float) -> Inputs:
    """Images that are nearly constant, of which standardisation takes away all but `left`; gradients all alike, so that
    rounding adds up. The last one is nearly parallel to the first row of the standardised weight instead."""
    conv = model.conv
    assert isinstance(conv, nn.Conv2d)
    draw = torch.Generator().manual_seed(3)
    shape = conv.in_channels, *conv.kernel_size
    x = (1 + left * torch.randn(count, *shape, generator=draw)) * (1 + torch.rand(count, 1, 1, 1, generator=draw))
    row = conv.weight[0].detach()
    x[-1] = (row - row.mean()) / row.std() + left * torch.randn(shape, generator=draw)
    g = 3 * (1 + 0.1 * torch.rand(count, conv.out_channels, 1, 1, generator=draw))
    g[-1, 1:] = 0
    return {"x": x, "g": g}


def moved(left: float, kernel: int = 3) -> tuple[float, int]:
    """By how much a record moves the sum of 64 aligned hostile ones, in units of C, at worst; and how many were in
    doubt."""
    torch.manual_seed(0)
    model, allowance = ReadConv(StdConv2d(64, 16, kernel, padding=0)), rounding_allowance(64)
    inputs, worst, doubtful = hostile(model, 64, left), 0.0, 0
    norm = brute_force.records_of(model.double(), {n: t.double() for n, t in inputs.items()})[0].norm()
    model.float()
    c = 0.01 * norm
    clip = clip_of(model, ClipRule("flat", c / (1 + allowance), allowance), NEVER)
    found: list[Tensor] = []
    for absent in (None, 0, 31, 62, 63):
        present = torch.ones(64, dtype=torch.bool)
        if absent is not None:
            present[absent] = False
        sums = ExactSums(trainable_shapes(model), torch.device("cpu"))
        seen = clip.add_clipped(model, inputs, present, sums)
        doubtful = max(doubtful, 0 if seen.doubtful is None else int(seen.doubtful.sum()))
        found.append(sums.totals["conv.weight"].clone())
    worst = max(float((found[0] - without).norm()) / c for without in found[1:])
    return worst, doubtful


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("left", [1.0, 0.3, 0.15, 0.1, 1e-2, 1e-4, 1e-6, 0.0])
def test_a_record_of_which_almost_all_is_taken_away_moves_the_sum_by_at_most_c(left: float, kernel: int) -> None:
    worst, doubtful = moved(left, kernel)
    assert worst <= 1.0
    assert (doubtful >= 63) == (0 < left <= 0.1) or left == 0.0


@pytest.mark.parametrize("kernel", [1, 3])
def test_without_a_doubt_what_is_taken_away_would_leave_its_rounding(
    monkeypatch: pytest.MonkeyPatch, kernel: int
) -> None:
    """Of the sum, even if norms were exact."""

    def in_fp64(self: ViaStandardisation) -> Tensor:
        written = self.inner.instances(slice(None), torch.float64)
        return self.by.row_sums(written.view(-1, *self.by.shape))

    monkeypatch.setattr(ViaStandardisation, "row_sums", in_fp64)
    monkeypatch.setattr(norms, "taken", lambda piece, whole, tolerance: torch.zeros_like(whole))
    monkeypatch.setattr(norms, "_added", lambda piece: 0.0)
    monkeypatch.setattr(norms, "_roundoff", lambda piece: 0.0)
    monkeypatch.setattr(norms, "_unit", lambda piece: 0.0)
    assert moved(1e-6, kernel)[0] > 1.1


def test_constant_images_add_nothing_that_is_not_theirs() -> None:
    """All of the gradient is taken away but for the border: what a record adds is never above C, alone or not."""
    model = CASES["big_transfer"].model()
    inputs = CASES["big_transfer"].batch(6)
    inputs["images"][1], inputs["images"][2], inputs["images"][3] = 1.0, 0.0, 1e4
    clip = clip_of(model, rule_of("flat", 1e-3), NEVER)
    sizes = [contribution(clip, model, inputs, row) for row in range(6)]
    assert max(sizes) <= 1e-3 * (1 + 1e-5) and min(sizes) >= 1e-3 * (1 - 1e-5)


@pytest.mark.parametrize("hold", [NEVER, 1.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_in_half_precision_a_record_adds_what_was_measured(rounded: bool, hold: float) -> None:
    model, inputs = CASES["big_transfer"].model(), CASES["big_transfer"].batch(6)
    everyone = torch.ones(6, dtype=torch.bool)
    clip = clip_of(model, rule_of("flat", 1e30), hold, "bf16", round_operands=rounded)
    if not rounded:
        check_gradients(clip, model, inputs, everyone)
    _, (seen,) = summed(clip, model, [(inputs, everyone)])
    for row in range(6):
        size = contribution(clip, model, inputs, row)
        assert size <= float(seen.norms[row]) * (1 + 1e-5)
        assert rounded or size == pytest.approx(float(seen.norms[row]), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 0, 1), (2, 3, 2)])
def test_gradients_as_products_with_patches(stride: int, padding: int, dilation: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    geometry = Geometry([stride] * 2, [padding] * 2, [dilation] * 2, 1)
    x, shape = torch.randn(3, 4, 9, 8, generator=draw).to(dtype), torch.Size((6, 4, 3, 2))
    out = geometry.forward(x, torch.zeros(shape, dtype=dtype), None)
    gradient = torch.randn(out.shape, generator=draw).to(dtype)
    found = geometry.from_patches(x, shape, gradient)
    expected = [geometry.weight_gradient(x[[i]].double(), shape, gradient[[i]].double()) for i in range(3)]
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_as_on_a_gpu_gradients_in_half_precision_are_those_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sums whether convolutions are written in fp32 or as products of their operands in half precision."""
    model, inputs = CASES["big_transfer"].model(), CASES["big_transfer"].batch(6)
    everyone, used = torch.ones(6, dtype=torch.bool), Counter[str]()
    honest = Geometry.from_patches

    def watched(self: Geometry, *operands: Any) -> Tensor:
        used["patches"] += 1
        return honest(self, *operands)

    monkeypatch.setattr(Geometry, "from_patches", watched)
    clip = clip_of(model, rule_of("flat", 0.1), NEVER, "bf16")
    here, _ = summed(clip, model, [(inputs, everyone)])
    assert not used
    have_only(monkeypatch)
    there, _ = summed(clip, model, [(inputs, everyone)])
    assert used["patches"] >= 3 and relative_error(there, {n: t.double() for n, t in here.items()}) <= 1e-5


class Called(TorchDispatchMode):
    """How many operations PyTorch is asked for, and how many elements they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        self.elements += sum(x.numel() for x in (*args, out) if isinstance(x, Tensor))
        return out


def called(model: nn.Module, inputs: Mapping[str, Tensor]) -> Called:
    clip = clip_of(model, rule_of("flat", 1.0), 1.0)
    with Called() as count:
        clip.add_clipped(model, dict(inputs), torch.ones(8, dtype=torch.bool), Float32Sums(trainable_shapes(model)))
    return count


def test_it_takes_fewer_operations_than_the_chain_rule_by_record(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = CASES["big_transfer"].model(), CASES["big_transfer"].batch(8)
    with_rule = called(model, inputs)
    monkeypatch.setattr(tracker, "_has_rows", lambda inner, by: False)
    without = called(model, inputs)
    # What both ask for alike, such as views of all records' tensors, is no part of the saving.
    saved = without.operations - with_rule.operations
    assert saved > 300 and with_rule.elements < 0.6 * without.elements, (
        with_rule.operations, without.operations, with_rule.elements, without.elements,
    )  # fmt: skip
    assert math.isfinite(with_rule.elements)
