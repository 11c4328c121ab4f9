"""Gradients scaled by public powers of two: measured, clipped and summed in that space, as brute force does it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.accounting.scale_table import ScaleTable
from murmuration.train.clip.check import check_gradients
from murmuration.train.clip.choose import make_clip
from murmuration.train.clip.engine import Precision, clipped_totals
from murmuration.train.clip.per_record import PerRecordGradient, Recomputed
from murmuration.train.clip.rule import ClipError, ClipRule
from murmuration.train.clip.scaling import Scaling
from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.parity_cases import CASES, Case, two_micro_batches, words
from tests.support.parity_engines import (
    ENGINES,
    Scaled,
    contribution,
    factor_of,
    median_norm,
    only,
    prepared,
    rule_of,
    summed,
)
from tests.support.scaling_world import random_table, scaled
from tests.train.test_train_clip_parity import UNSUPPORTED, groups_by_hand

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


class SeenOtherwise(nn.Module):
    """Weights that layers use in another shape than they have: whose rows are not theirs."""

    def __init__(self, outputs: int = 3, width: int = 6) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(2, outputs, width) / width**0.5)
        self.words = nn.Parameter(torch.randn(2, 4, width))

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        hidden = F.embedding(inputs["ids"], self.words.reshape(8, -1))
        return F.linear(hidden, self.heads.flatten(0, 1)).tanh().square().sum((1, 2))


ALL = CASES | {
    "seen_otherwise": Case(SeenOtherwise, words(5, 8)),
    # Too large to be kept for each record: written out for the norms alone, and added up as a product.
    "seen_otherwise_and_wide": Case(lambda: SeenOtherwise(64, 48), words(5, 8)),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", ALL)
def test_sums_are_those_of_gradients_scaled_one_by_one(name: str, dtype: torch.dtype) -> None:
    model = ALL[name].model(dtype)
    inputs, present = two_micro_batches(ALL[name], dtype)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    table = random_table(model, but=trained[2:3])
    plain = brute_force.records_of(model, inputs)
    records = scaled(plain, table)
    bound = median_norm(records, present)
    factors = brute_force.factors_of(records, present, factor_of("flat", bound))
    expected = brute_force.clipped_sum(records, factors)
    halves = [(only(inputs, rows), present[rows]) for rows in (slice(0, 5), slice(5, 10))]
    for engine in ENGINES if dtype == torch.float32 else ("book-keeping",):
        if (engine, name) in UNSUPPORTED:
            continue
        clip = prepared(engine, rule_of("flat", bound), model)
        clip.scaling = Scaling(table)  # pyright: ignore[reportAttributeAccessIssue]
        totals, seen = summed(clip, model, halves, double=dtype == torch.float64)
        assert relative_error(totals, expected) <= TOLERANCE[dtype]
        for parameter, tensor in expected.items():
            apart = relative_error({parameter: totals[parameter]}, {parameter: tensor})
            assert apart <= 20 * TOLERANCE[dtype], parameter
        assert torch.cat([s.factors for s in seen]).tolist() == pytest.approx(factors, rel=1e-5)
    unscaled = brute_force.factors_of(plain, present, factor_of("flat", bound))
    assert relative_error(brute_force.clipped_sum(plain, unscaled), expected) > 0.1, "the scales make no difference"


@pytest.mark.parametrize("name", ("captioner", "convolutions", "tied"))
def test_layers_are_clipped_to_their_shares_in_the_space_of_the_scales(name: str) -> None:
    model = CASES[name].model()
    inputs, present = two_micro_batches(CASES[name], torch.float32)
    table = random_table(model)
    records = scaled(brute_force.records_of(model, inputs), table)
    bound = median_norm(records, present)
    groups = groups_by_hand(list(records[0].gradient), "layer")
    share = factor_of("flat", bound / math.sqrt(len(groups)))
    expected = brute_force.grouped_sum(records, present, {name: (own, share) for name, own in groups.items()})
    clip = make_clip("book-keeping", ClipRule("flat", bound, 0.0, grouping="layer"), "fp32", "lean", Scaling(table))
    totals, _ = summed(clip, model, [(inputs, present)])
    assert relative_error(totals, expected) <= 1e-6
    # A step's own C, as where it adapts: all shares follow it.
    halved = factor_of("flat", bound / 2 / math.sqrt(len(groups)))
    expected = brute_force.grouped_sum(records, present, {name: (own, halved) for name, own in groups.items()})
    totals, _ = clipped_totals(clip, model, inputs, present, rule=clip.rule.at(bound / 2))
    assert relative_error(totals, expected) <= 1e-6


@pytest.mark.parametrize("precision", ("bf16", "fp16"))
@pytest.mark.parametrize("name", ("one_token", "many_tokens", "convolutions", "norms", "hf_conv1d"))
def test_powers_of_two_round_nothing_in_half_precision(name: str, precision: Precision) -> None:
    """What is added for a record is what is added without scales, multiplied by them: to the last bit in bf16."""
    model = CASES[name].model()
    inputs, present = CASES[name].batch(4), torch.ones(4, dtype=torch.bool)
    scaling = Scaling(random_table(model))
    loose = ClipRule("flat", 1e30, 0.0)
    plain, _ = clipped_totals(make_clip("book-keeping", loose, precision, "lean"), model, inputs, present)
    found, _ = clipped_totals(make_clip("book-keeping", loose, precision, "lean", scaling), model, inputs, present)
    for parameter, total in plain.items():
        expected = scaling.times(parameter, total)
        if precision == "bf16":
            assert torch.equal(found[parameter], expected), parameter
        else:  # products of operands in fp32 are added up by another kernel
            assert torch.allclose(found[parameter], expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
        assert not torch.equal(total, expected) or parameter.endswith("bias"), "the scales make no difference"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_most_hostile_record_moves_the_scaled_sum_by_at_most_c(engine: str) -> None:
    model = Scaled(CASES["four_dimensions"].model())
    scale = [1.0, 1e-25, 1e-12, 1e12, 1e19, 1e28, math.nan, math.inf, 3.0]
    inputs = CASES["four_dimensions"].batch(len(scale)) | {"scale": torch.tensor(scale)}
    clip = prepared(engine, rule_of("flat", 0.5), model)
    plain = [contribution(clip, model, inputs, row) for row in range(len(scale))]
    clip.scaling = Scaling(random_table(model, reach=6))  # pyright: ignore[reportAttributeAccessIssue]
    moved = [contribution(clip, model, inputs, row) for row in range(len(scale))]
    assert max(moved) <= 0.5 * (1 + 1e-5)
    assert moved[4] == pytest.approx(0.5, rel=1e-5) and moved[6] == moved[7] == 0.0
    # Clipped before they are scaled, gradients would be bounded in the wrong space.
    totals = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
    sums, _ = clipped_totals(prepared(engine, rule_of("flat", 0.5), model), model, inputs, torch.arange(9) == 4)
    wrong = brute_force.size([clip.scaling.times(n, sums.get(n, zero)) for n, zero in totals.items()])
    assert max(plain) <= 0.5 * (1 + 1e-5) < 1.0 < wrong


def test_doubts_about_a_norm_grow_with_the_scales() -> None:
    """By the terms that may cancel, of a gradient that is written out: exactly where all scales are one, and never less
    than they are."""
    model = CASES["convolutions"].model()
    pieces: list[PerRecordGradient] = []

    class Kept(Scaling):
        def of(self, found: list[PerRecordGradient]) -> list[PerRecordGradient]:
            pieces.extend(piece for piece in found if isinstance(piece, Recomputed) and piece.terms is not None)
            return found

    table = random_table(model)
    inputs = CASES["convolutions"].batch(3)
    clip = make_clip("book-keeping", ClipRule("flat", 1.0, 0.0), "fp32", "lean", Kept(table))
    clipped_totals(clip, model, inputs, torch.ones(3, dtype=torch.bool))
    assert len(pieces) > 1
    for piece in pieces:
        rows, columns = table.weights[piece.name]
        even = Scaling(ScaleTable({piece.name: ((2,) * len(rows), (1,) * len(columns))}))
        assert torch.equal(even.of([piece])[0].spread(), 64 * piece.spread())
        (own,) = Scaling(table).of([piece])
        most = 4.0 ** (max(rows) + max(columns))
        assert torch.equal(own.spread(), most * piece.spread())
        gradient = Scaling(table).times(piece.name, piece.instances(slice(None), torch.float32))
        assert torch.equal(own.instances(slice(None), torch.float32), gradient)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_check_at_every_start_holds_scaled_gradients_against_scaled_ones(engine: str) -> None:
    model, inputs, present = CASES["mae"].model(), CASES["mae"].batch(4), torch.ones(4, dtype=torch.bool)
    clip = prepared(engine, rule_of("flat", 1.0), model)
    table = random_table(model)
    clip.scaling = Scaling(table)  # pyright: ignore[reportAttributeAccessIssue]
    check_gradients(clip, model, inputs, present)

    class Forgets(Scaling):
        """Measures and sums a weight as it is."""

        def of(self, pieces):
            return [p if "qkv.weight" in p.name else q for p, q in zip(pieces, super().of(pieces), strict=True)]

    if engine == "book-keeping":
        clip.scaling = Forgets(table)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ClipError, match="off by"):
            check_gradients(clip, model, inputs, present)


def test_scales_of_another_model_are_refused() -> None:
    model = CASES["one_token"].model()
    table = random_table(model)
    rows, columns = table.weights["body.0.weight"]
    wrong = ScaleTable(dict(table.weights) | {"body.0.weight": (columns, rows)})
    strange = ScaleTable({"elsewhere": ((1,), (1,))})
    rule = ClipRule("flat", 1.0, 0.0)
    for engine in ("book-keeping", "reference"):
        make_clip(engine, rule, "fp32", "lean", Scaling(table)).prepare(model)
        with pytest.raises(ClipError, match=r"9 rows and 7 columns, but it is \[7, 9\]"):
            make_clip(engine, rule, "fp32", "lean", Scaling(wrong)).prepare(model)
        with pytest.raises(ClipError, match="none of the trained weights"):
            make_clip(engine, rule, "fp32", "lean", Scaling(strange)).prepare(model)
    with pytest.raises(ClipError, match="Opacus engine scales no gradients"):
        make_clip("opacus", rule, "fp32", "lean", Scaling(table))
