"""Totals of a logical step: exact beside micro-batch products, whatever their number, and handed over unchanged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from murmuration.train.clip import sums as sums_of
from murmuration.train.clip.accumulator import add_in_stretches
from murmuration.train.clip.per_record import (
    ClipWeights,
    Dense,
    OuterProduct,
    PerRecordGradient,
    Recomputed,
    ViaReparametrisation,
)
from murmuration.train.clip.rule import FACTOR_ROUNDING, RECORDS_AT_ONCE, ClipRule, rounding_allowance, stretches
from murmuration.train.clip.sums import ExactSums, Float32Sums, OnlyIf, product, products
from murmuration.train.engines.forward import GradientInjector
from tests.support.train_helpers import on_ranks, plan_for

CPU = torch.device("cpu")


def test_the_rule_lowers_c_by_what_rounding_may_add() -> None:
    rule = ClipRule.of(plan_for(records=20_000, batch=1000, clip_norm=0.5), "flat", 0.01, 64)
    assert rule.allowance == rounding_allowance(64) > FACTOR_ROUNDING
    assert rule.bound < 0.5 and rule.sensitivity == pytest.approx(0.5, rel=1e-12)
    fact = rule.fact()
    assert (fact.rule, fact.sensitivity) == ("flat", rule.sensitivity)
    changed = ClipRule("flat", 2 * rule.bound, rule.allowance)
    assert changed.fact().sensitivity == pytest.approx(1.0, rel=1e-12), "stated from the bound in use"


def test_neither_the_logical_batch_nor_a_large_micro_batch_costs_more() -> None:
    huge = ClipRule.of(plan_for(records=10**9, batch=5e6), "flat", 0.01, 64)
    assert huge.allowance == rounding_allowance(64) < 7e-3
    assert ClipRule.of(plan_for(), "flat", 0.01, 4096).allowance == rounding_allowance(RECORDS_AT_ONCE) < 8.1e-3


def total_of(draw: list[Tensor], factors: Tensor, micro_batch: int) -> Tensor:
    sums = ExactSums({"w": draw[0].shape[1:]}, CPU)
    for number, rows in enumerate(draw):
        chosen = factors[number * micro_batch : (number + 1) * micro_batch]
        add_in_stretches(Dense("w", rows), ClipWeights(chosen, None), sums)
    return sums.totals["w"]


@pytest.mark.parametrize(("count", "micro_batch"), [(4_096, 64), (131_072, 64), (131_072, 2048)])
def test_a_record_moves_an_aligned_sum_by_c_at_most_however_large_the_batch(count: int, micro_batch: int) -> None:
    """Aligned gradients, all of them clipped, and one zeroed in the first slot, in the middle, or in the last one.

    The same products kept in fp32 over as many micro-batches are off by many times what is allowed.
    """
    width, c = 48, 1.0
    allowance = rounding_allowance(micro_batch)
    generator = torch.Generator().manual_seed(3)
    direction = torch.rand(width, generator=generator) + 0.5
    scales = torch.rand(count, generator=generator) * 3 + 1.01
    factors = ClipRule("flat", c / (1 + allowance), allowance).factors(direction.double().norm() * scales.double())
    draw = [scales[start : start + micro_batch, None] * direction for start in range(0, count, micro_batch)]

    whole = total_of(draw, factors, micro_batch)
    for zeroed in (0, count // 2, count - 1):
        without = factors.clone()
        without[zeroed] = 0.0
        moved = float((whole - total_of(draw, without, micro_batch)).norm())
        assert c * (1 - 2 * allowance) - 1e-3 < moved <= c
    rounded = torch.zeros(width)
    for number, rows in enumerate(draw):
        rounded += torch.tensordot(factors[number * micro_batch : (number + 1) * micro_batch], rows, dims=1)
    if count > 100_000 and micro_batch == 64:
        assert float((rounded - whole).norm()) > 10 * 1e-3 * c


@pytest.mark.parametrize("records", [1, 128, 129, 300])
@pytest.mark.parametrize("kind", ["dense", "product", "embedding", "function"])
def test_a_micro_batch_in_stretches_is_the_whole_one(records: int, kind: str) -> None:
    """Each record once, with its own factor, and none that is not to be touched."""
    draw = torch.Generator().manual_seed(records)
    left, right = torch.randn(records, 5, 4, generator=draw), torch.randn(records, 5, 3, generator=draw)
    ids = torch.randint(0, 4, (records, 5), generator=draw)
    one_hot = nn.functional.one_hot(ids, 4).float()
    written = (one_hot if kind == "embedding" else left).transpose(1, 2) @ right
    pieces: dict[str, PerRecordGradient] = {
        "dense": Dense("w", written), "product": OuterProduct("w", left, right, torch.Size((4, 3))),
        "embedding": OuterProduct("w", ids, right, torch.Size((4, 3))),
        "function": Recomputed(
            "w", (left,), right, torch.Size((4, 3)), lambda x, g: x[0].transpose(1, 2) @ g,
            lambda x, g: (x[0].transpose(1, 2) @ g).sum(0),
        ),
    }  # fmt: skip
    keep = torch.rand(records, generator=draw) < 0.7
    factors = torch.rand(records, generator=draw) * keep
    sums = ExactSums({"w": torch.Size((4, 3))}, CPU)
    add_in_stretches(pieces[kind], ClipWeights(factors, keep), sums)
    expected = torch.tensordot(factors.double(), written.double(), dims=1)
    assert torch.allclose(sums.totals["w"], expected, rtol=1e-5, atol=1e-5)


class Asked:
    """Sums that only note over how many rows a product may be, and how often something else is added."""

    def __init__(self) -> None:
        self.products: list[tuple[int, int | None]] = []
        self.others = 0

    def add(self, name: str, value: Tensor) -> None:
        self.others += 1

    def add_product(self, name: str, left: Tensor, right: Tensor, at_once: int | None = None) -> None:
        assert len(left) == len(right)
        self.products.append((len(left), at_once))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["dense", "half", "wide", "many tokens", "narrow"])
def test_no_product_is_over_more_than_a_stretch(kind: str, masked: bool, rows: int) -> None:
    """However many stretches share a call. They do where operands are smaller than the product, and whether some record
    is left out or not, which nobody may see from how the others are added."""
    records, tokens = 1000, {"many tokens": 4, "narrow": 3}.get(kind, 1)
    left, right, shape = {
        "wide": (999, 888, torch.Size((999, 888))), "many tokens": (700, 600, torch.Size((700, 600))),
        "narrow": (2, 4, torch.Size((2, 4))),
    }.get(kind, (1, 1, torch.Size((2,))))  # fmt: skip
    piece = OuterProduct("w", torch.ones(records, tokens, left), torch.ones(records, tokens, right), shape)
    written = torch.ones(records, 2, dtype=torch.bfloat16 if kind == "half" else torch.float32)
    asked = Asked()
    keep = torch.ones(records, dtype=torch.bool) if masked else None
    add_in_stretches(
        Dense("w", written) if kind in ("dense", "half") else piece, ClipWeights(torch.ones(records), keep), asked, rows
    )
    assert sum(taken for taken, _ in asked.products) == records * tokens and not asked.others
    assert {at_once for _, at_once in asked.products} == {RECORDS_AT_ONCE // rows * tokens}
    several = {("wide", 1): 3, ("wide", 4): 14, ("many tokens", 4): 2}
    together = several.get((kind, rows), 1) * RECORDS_AT_ONCE // rows
    assert max(taken for taken, _ in asked.products) == together * tokens


@pytest.mark.parametrize("kind", ["embedding", "function", "fp64", "reparametrised"])
def test_nor_is_anything_else_that_is_added_up_in_fp32(kind: str) -> None:
    records, draw = 300, torch.Generator().manual_seed(3)
    left, right = torch.randn(records, 5, 4, generator=draw), torch.randn(records, 5, 3, generator=draw)
    leaf = torch.ones(4, 3, requires_grad=True)
    shape = leaf.shape
    pieces: dict[str, PerRecordGradient] = {
        "embedding": OuterProduct("w", torch.randint(0, 4, (records, 5), generator=draw), right, shape),
        "function": Recomputed(
            "w", (left,), right, shape, lambda x, g: x[0].transpose(1, 2) @ g,
            lambda x, g: (x[0].transpose(1, 2) @ g).sum(0),
        ),
        "fp64": OuterProduct("w", left.double(), right.double(), shape),
        "reparametrised": ViaReparametrisation("w", OuterProduct("", left, right, shape), 2 * leaf, leaf),
    }  # fmt: skip
    asked = Asked()
    add_in_stretches(pieces[kind], ClipWeights(torch.ones(records, dtype=pieces[kind].dtype), None), asked)
    tokens = 5 if kind == "fp64" else 1
    assert asked.others == (3 if kind in ("embedding", "function") else 0)
    assert [taken for taken, _ in asked.products] == ([] if asked.others else [128 * tokens, 128 * tokens, 44 * tokens])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_stretches_that_share_a_call_keep_their_own_factors(masked: bool, rows: int) -> None:
    """Bit by bit what each stretch adds alone."""
    records, draw = 1000, torch.Generator().manual_seed(9)
    left, right = torch.randn(records, 2, 700, generator=draw), torch.randn(records, 2, 900, generator=draw)
    piece, shapes = OuterProduct("w", left, right, torch.Size((700, 900))), {"w": torch.Size((700, 900))}
    keep = torch.rand(records, generator=draw) < 0.9 if masked else None
    weights = ClipWeights(torch.rand(records, generator=draw), keep)
    found, expected = ExactSums(shapes, CPU), ExactSums(shapes, CPU)
    add_in_stretches(piece, weights, found, rows)
    for part in stretches(records, rows):
        piece.part(part).add_weighted(weights.part(part), expected)
    assert torch.equal(found.totals["w"], expected.totals["w"])


def test_the_product_of_each_stretch_is_added_in_fp64() -> None:
    draw, shapes = torch.Generator().manual_seed(4), {"w": torch.Size((70, 50))}
    left, right = torch.randn(300, 70, generator=draw), torch.randn(300, 50, generator=draw)
    expected = torch.zeros(70, 50, dtype=torch.float64)
    for start in (0, 128, 256):
        expected += product(left[start : start + 128], right[start : start + 128])
    exact, below = ExactSums(shapes, CPU), ExactSums(shapes, CPU)
    exact.add_product("w", left, right, 128)
    OnlyIf(below, torch.tensor(True)).add_product("w", left, right, 128)
    assert torch.equal(exact.totals["w"], expected) and torch.equal(below.totals["w"], expected)
    assert not torch.equal(product(left, right).double(), expected)


def test_two_thousand_micro_batches_err_by_less_than_a_thousandth_of_c() -> None:
    """Against the same fp32 products added up without any rounding (math.fsum)."""
    generator = torch.Generator().manual_seed(5)
    sums = ExactSums({"w": torch.Size([4])}, CPU)
    kept: list[list[float]] = [[], [], [], []]
    for _ in range(2_000):
        value = torch.rand(4, generator=generator) * 64
        sums.add("w", value)
        for column, number in zip(kept, value.tolist(), strict=True):
            column.append(number)
    exact = torch.tensor([math.fsum(column) for column in kept], dtype=torch.float64)
    assert float((sums.totals["w"] - exact).norm()) < 1e-9


def test_products_of_any_operands_are_accumulated_in_fp32() -> None:
    generator = torch.Generator().manual_seed(7)
    left, right = torch.randn(4096, 3, generator=generator), torch.randn(4096, 5, generator=generator)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b = left.to(dtype), right.to(dtype)
        exact = a.double().t() @ b.double()
        found = product(a, b)
        assert found.dtype == torch.float32
        assert float((found.double() - exact).norm() / exact.norm()) < 2e-6
    assert product(left.double(), right.double()).dtype == torch.float64
    for sums in (ExactSums({"w": torch.Size([3, 5])}, CPU), Float32Sums({"w": torch.Size([3, 5])})):
        sums.add_product("w", left, right)
        sums.add_product("w", left, right)
        assert torch.allclose(sums.totals["w"].double(), 2 * (left.double().t() @ right.double()), rtol=1e-5, atol=1e-4)
        sums.add("w", torch.ones(3, 5))
    with pytest.raises(TypeError, match="would round records away"):
        ExactSums({"w": torch.Size([1])}, CPU).add("w", torch.ones(1, dtype=torch.bfloat16))


def truncating(out: Tensor, left: Tensor, right: Tensor) -> None:
    """A tensor core that adds 16 products at a time to what it has, and cuts off what fp32 does not hold."""
    total = np.zeros(out.shape)
    for start in range(0, left.shape[1], 16):
        few = slice(start, start + 16)
        exact = total + (left[:, few].double().transpose(1, 2) @ right[:, few].double()).numpy()
        kept = exact.astype(np.float32)
        beyond = np.abs(kept.astype(np.float64)) > np.abs(exact)
        total = np.where(beyond, np.nextafter(kept, np.float32(0)), kept).astype(np.float64)
    out.copy_(torch.from_numpy(total))


def test_products_of_many_tokens_survive_that_tensor_cores_truncate(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a record adds on one half of a picture, it takes away on the other."""
    tokens = 112 * 112
    torch.manual_seed(0)
    sign = torch.ones(1, tokens, 1)
    sign[:, tokens // 2 :] = -1
    left = (1 + torch.rand(1, tokens, 3)).bfloat16()
    right = (sign * (1 + torch.rand(1, tokens, 2))).bfloat16()
    exact = left.double().transpose(1, 2) @ right.double()
    monkeypatch.setattr(sums_of, "products_into", truncating)
    independent = 4 * tokens**0.5 * 2.0**-24 * (left.double().transpose(1, 2).square() @ right.double().square()).sqrt()

    def error() -> Tensor:
        return (products(left, right).double() - exact).abs() / independent

    assert error().max() < 1
    monkeypatch.setattr(sums_of, "AT_ONCE", tokens)
    assert error().max() > 10, "the fault that is guarded against"


def test_the_totals_arrive_as_gradients_whatever_scales_the_loss() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.free = nn.Parameter(torch.zeros(3))
            self.first, self.frozen = nn.Linear(2, 3), nn.Linear(2, 2)
            self.frozen.requires_grad_(False)
            self.again = self.first

    model = Reused()
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    sums = ExactSums(shapes, CPU)
    for number, (name, shape) in enumerate(shapes.items()):
        sums.add(name, torch.full(shape, number + 1 / 3))
    handover = GradientInjector(model)
    assert list(handover.parameters()) == [], "parameters stay with their own modules"
    (handover(sums.totals) * 0.125).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and torch.equal(parameter.grad, sums.totals[name].float())
        else:
            assert parameter.grad is None
    sums.clear()
    assert not any(bool(total.any()) for total in sums.totals.values())


def test_one_reduction_adds_the_totals_of_all_ranks() -> None:
    def totals(ranks: Any) -> list[float]:
        sums = ExactSums({"a": torch.Size([2]), "b": torch.Size([1])}, CPU)
        sums.add("a", torch.tensor([1.0, 2.0 + ranks.rank]))
        sums.add("b", torch.tensor([1e-9]) * (ranks.rank + 1))
        sums.reduce(ranks)
        return torch.cat(list(sums.totals.values())).tolist()

    assert on_ranks(3, totals) == [[3.0, 9.0, pytest.approx(6e-9)]] * 3
