"""A bias whose per-record gradients come from the kernel that measures its weight: the same sums, in every case where
that kernel runs, by the old way where it does not, and clipped by their own norm whatever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from murmuration.train.clip import norms, per_record
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.rule import ClipRule
from tests.support import brute_force, gram_in_torch
from tests.support.kernel_doubles import have_none, have_only
from tests.support.parity_cases import CASES
from tests.support.parity_engines import contribution, summed
from tests.support.parity_models import OnX

TOKENS, WIDTH = 5, 64
U = torch.finfo(torch.float32).eps / 2


class Twice(nn.Module):
    """Its weight and its bias are each the sum of two uses, and no kernel sees both."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.own(x).tanh())


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(7)
    bodies: dict[str, list[nn.Module]] = {
        "linear": [nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)],
        "flipped": [Conv1D(48, WIDTH), nn.GELU(), Conv1D(WIDTH, 48)],
        "twice": [Twice()],
        "narrow": [nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, WIDTH)],
    }
    return OnX(*bodies[kind])


def batch(records: int = 6, tokens: int = TOKENS) -> dict[str, Tensor]:
    return {"x": torch.randn(records, tokens, WIDTH, generator=torch.Generator().manual_seed(1))}


class CountedKernel:
    """The kernel, which counts how often it was asked for sums, and may get them wrong."""

    def __init__(self, times: float = 1.0) -> None:
        self.calls, self.sums, self.times = 0, 0, times

    def __call__(self, left: Tensor, right: Tensor, part: int, bounds: Any, over: bool) -> tuple[Tensor, ...]:
        self.calls, self.sums = self.calls + 1, self.sums + over
        square, doubt, length, *sums = gram_in_torch.gram(left, right, part, bounds, over)
        return square, doubt, length, *(each * self.times for each in sums)


def clipped(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, inputs: dict[str, Tensor], asked: CountedKernel | None,
    clip: BookKeepingClip | None = None,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """Totals and norms, as on a GPU if there is a kernel."""
    if asked is None:
        have_none(monkeypatch)
    else:
        have_only(monkeypatch, gram=asked)
    clip = clip or BookKeepingClip(ClipRule("flat", 0.5, 0.0), "bf16", hold=0.0)
    clip.prepare(model)
    everyone = torch.ones(len(next(iter(inputs.values()))), dtype=torch.bool)
    totals, (seen,) = summed(clip, model, [(inputs, everyone)])
    return totals, seen.norms


@pytest.mark.parametrize(
    ("kind", "calls", "sums"), [("linear", 2, 2), ("flipped", 2, 2), ("twice", 2, 0), ("narrow", 0, 0)]
)
def test_sums_are_the_kernel_s_where_it_measures_the_weight_and_the_same_anywhere(
    monkeypatch: pytest.MonkeyPatch, kind: str, calls: int, sums: int
) -> None:
    model, asked, taken = model_of(kind), CountedKernel(), 0
    honest = per_record.over_tokens

    def watched(x: Tensor) -> Tensor:
        nonlocal taken
        taken += 1
        return honest(x)

    plain, plain_norms = clipped(monkeypatch, model, batch(), None)
    monkeypatch.setattr(per_record, "over_tokens", watched)
    fused, fused_norms = clipped(monkeypatch, model, batch(), asked)
    assert (asked.calls, asked.sums, taken) == (calls, sums, 2 - sums), "each output gradient is read once"
    for name, total in plain.items():
        assert float((fused[name] - total).norm()) <= 1e-5 * float(total.norm()), name
    assert torch.allclose(fused_norms, plain_norms, rtol=1e-5)
    wrong, _ = clipped(monkeypatch, model, batch(), CountedKernel(1.001))
    biases = [name for name in plain if name.endswith("bias")]
    far = max(float((wrong[name] - plain[name]).norm() / plain[name].norm()) for name in biases)
    assert (far > 1e-4) == bool(sums), "a kernel that is one in a thousand off is seen"


@pytest.mark.parametrize("name", ["mae", "captioner", "attention", "many_tokens", "four_dimensions", "tied"])
def test_so_are_those_of_whole_models(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, inputs, asked = CASES[name].model(), dict(CASES[name].batch(4)), CountedKernel()
    plain, plain_norms = clipped(monkeypatch, model, inputs, None)
    fused, fused_norms = clipped(monkeypatch, model, inputs, asked)
    assert brute_force.relative_error(fused, {n: t.double() for n, t in plain.items()}) <= 1e-5
    assert torch.allclose(fused_norms, plain_norms, rtol=1e-5)
    assert (asked.sums > 0) == (name in ("mae", "captioner", "attention"))


@pytest.mark.parametrize("times", [1.0, 100.0, 1e30, float("nan"), float("inf")])
def test_whatever_the_sums_are_no_record_adds_more_than_c(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """What is measured is what is added, so no error of theirs is part of a record's doubt."""
    model, inputs, bound = model_of("linear"), batch(), 1e-3
    clip = BookKeepingClip(ClipRule("flat", bound, 0.0), "bf16", hold=0.0)
    clipped(monkeypatch, model, inputs, CountedKernel(times), clip)
    added = [contribution(clip, model, inputs, row) for row in range(6)]
    assert max(added) <= bound * (1 + 1e-5)
    assert min(added) >= 0.99 * bound or not times < 1e30, "all are clipped"
    assert max(added) == 0.0 or times < torch.inf


class Twofold(per_record.Dense):
    """Adds twice what was measured."""

    def operands(self, weights: per_record.ClipWeights) -> tuple[Tensor, Tensor]:
        left, right = super().operands(weights)
        return left, 2 * right


def test_other_numbers_than_were_measured_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, bound = model_of("linear"), batch(), 1e-3
    clip = BookKeepingClip(ClipRule("flat", bound, 0.0), "bf16", hold=0.0)
    honest = per_record.TokenSum.taken
    twofold = lambda self, sums=None: Twofold(self.name, honest(self, sums).value)  # noqa: E731
    monkeypatch.setattr(per_record.TokenSum, "taken", twofold)
    clipped(monkeypatch, model, inputs, CountedKernel(100.0), clip)
    assert max(contribution(clip, model, inputs, row) for row in range(6)) > 1.5 * bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [2, 197, 1500])
def test_the_way_without_a_kernel_keeps_the_bound_too(dtype: torch.dtype, tokens: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    over = (torch.randn(3, tokens, 9, generator=draw) + 1).to(dtype)
    found = per_record.TokenSum("b", over, torch.Size((9,))).taken()
    assert found.value.dtype == per_record.wide(dtype) and found.value.shape == (3, 9)
    exact, size = over.double().sum(1), over.double().abs().sum(1)
    steps = (tokens - 1) * U
    assert bool(((found.value - exact).abs() <= steps / (1 - steps) * size).all())
    in_half = over.to(torch.bfloat16).cumsum(1)[:, -1]  # each sum rounded: a planted fault
    assert not bool(((in_half - exact).abs() <= steps / (1 - steps) * size).all())


def test_the_doubt_is_the_same_on_whichever_side_the_sums_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operands so small that what vanishes in fp32 is most of the doubt, and so unlike that sides matter."""
    have_only(monkeypatch, gram=gram_in_torch.gram)
    draw = torch.Generator().manual_seed(3)
    left = (1e-19 * torch.randn(4, TOKENS, 16, generator=draw)).bfloat16()
    right = torch.randn(4, TOKENS, WIDTH, generator=draw).bfloat16()
    piece = per_record.OuterProduct("w", left, right, torch.Size([16, WIDTH]))
    bare, of_left, of_right = (norms.measure([piece], over=over) for over in (None, left, right))
    assert bare.sums is None and bare.doubt is not None
    for found in (of_left, of_right):
        assert found.sums is not None and found.doubt is not None
        torch.testing.assert_close(found.doubt, bare.doubt, rtol=1e-9, atol=0.0)
        torch.testing.assert_close(found.square, bare.square, rtol=1e-5, atol=0.0)
