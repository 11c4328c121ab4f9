"""Autocast to half precision: sums stay near those of full precision, and no record adds more than is promised.

Norms must be of the very numbers that are summed: rounding of operands moves both alike, rounding between them does
not. What the engine's operands may add is stated beforehand, and C lowered by it.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmuration.model.build import build
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.engine import Precision, clipped_totals
from murmuration.train.clip.rule import FACTOR_ROUNDING, ClipRule
from tests.support import brute_force
from tests.support.clip_world import FLAT, apart, size
from tests.support.parity_cancel import READERS, WIDTHS, hostile, mutated
from tests.support.parity_cases import CASES
from tests.support.parity_engines import contribution, only, prepared, summed
from tests.support.train_helpers import SHAPE, nano_inputs

PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16")
MODELS = ("mae", "captioner", "classifier", "attention", "hf_conv1d", "low_rank", "tied", "used_twice", "norms",
          "convolutions", "few_places", "four_dimensions", "one_token", "many_tokens", "big_transfer",
          "last_layer")  # fmt: skip
PROMISE = 1 + 1e-5


def rule_for(precision: Precision, c: float) -> ClipRule:
    allowance = FACTOR_ROUNDING
    assert allowance < 7e-3, "C is lowered by little"
    return ClipRule("flat", c / (1 + allowance), allowance)


@pytest.mark.core
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_no_record_of_a_model_adds_more_than_promised(name: str, precision: Precision) -> None:
    model, inputs = CASES[name].model(), CASES[name].batch(8)
    records = brute_force.records_of(model, inputs)
    bound = 0.3 * min(r.norm() for r in records)
    clip = prepared("book-keeping", rule_for(precision, bound), model, precision)
    totals, (seen,) = summed(clip, model, [(inputs, torch.ones(8, dtype=torch.bool))])
    added = [contribution(clip, model, inputs, row) / bound for row in range(8)]
    assert max(added) <= PROMISE and min(added) > 0.99, "all are clipped, so all add C"
    assert all(t.dtype == torch.float32 for t in totals.values())
    everyone = torch.ones(8, dtype=torch.bool)
    factors = brute_force.factors_of(records, everyone, brute_force.flat(bound))
    expected = brute_force.clipped_sum(records, factors)
    # Half precision itself moves the gradients of small models so far; the loop over records is in full precision.
    assert brute_force.relative_error(totals, expected) <= (0.3 if name == "big_transfer" else 0.1)
    assert torch.allclose(seen.factors.double(), torch.tensor(factors, dtype=torch.float64), rtol=0.3)


def worst(reader: str, width: int, rounds: int, measured: int) -> float:
    """The largest addition, in units of C, of records whose tokens cancel; children of the worst are tried next."""
    model, draw = READERS[reader](width), torch.Generator().manual_seed(11)
    bound = 0.1
    clip = prepared("book-keeping", rule_for("bf16", bound), model, "bf16")
    pool, found = hostile(measured, width, draw), 0.0
    for _ in range(rounds):
        added = torch.tensor([contribution(clip, model, only(pool, [row]), 0) for row in range(measured)]) / bound
        assert not added.isnan().any()  # which `max` would pass over
        found = max(found, float(added.max()))
        parents = only(pool, added.argsort(descending=True)[: measured // 2])
        fresh = hostile(measured - measured // 2, width, draw)
        children = mutated(parents, draw)
        pool = {name: torch.cat([children[name], fresh[name]]) for name in pool}
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("reader", READERS)
def test_no_cancelling_record_adds_more_than_promised(reader: str, width: int) -> None:
    assert worst(reader, width, rounds=2, measured=24) <= PROMISE


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("reader", READERS)
def test_no_cancelling_record_of_many_thousands_adds_more_than_promised(reader: str, width: int) -> None:
    """10⁴ and more over all ways in."""
    assert worst(reader, width, rounds=8, measured=100) <= PROMISE


def test_the_loss_scale_moves_no_norm_and_keeps_gradients_that_fp16_does_not_have() -> None:
    """The norms that are reported and clipped are those without the scale."""
    model, inputs = CASES["mae"].model(), CASES["mae"].batch(6)
    norms = [r.norm() for r in brute_force.records_of(model, inputs)]
    clip = prepared("book-keeping", ClipRule("flat", 1.0, 0.0), model, "fp16")
    _, (seen,) = summed(clip, model, [(inputs, torch.ones(6, dtype=torch.bool))])
    assert float(seen.norms.median()) == pytest.approx(statistics.median_low(norms), rel=0.05)
    clip, small = BookKeepingClip(ClipRule("flat", 1.0, 0.0), "fp16"), 1e-8
    given = {"x": torch.ones(1, 2, 6), "g": torch.full((1, 2, 4), small)}
    _, seen = clipped_totals(clip, Given(4, 6), given, torch.ones(1, dtype=torch.bool))
    assert float(seen.norms) == pytest.approx(2 * small * math.sqrt(24), rel=0.01)


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
        assert math.isfinite(size(totals))
        largest = max(largest, size(totals) / bound if float(seen.factors[0]) < 1 else 0.0)
        exact, _ = clipped_totals(BookKeepingClip(clip.rule, "bf16", hold=0.0), model, inputs, one)
        assert size(exact) <= bound * (1 + 1e-4), trial
    assert 0.5 < largest <= 1 + 1e-6
