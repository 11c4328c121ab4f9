"""Slots with several rows, against the definition: the rows' own gradients, weighed, added up, then clipped as one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import pytest
import torch
from torch import Tensor

from murmuration.data.draw.micro_batch import ROW_SHARE
from murmuration.train.clip import bookkeeping, losses
from murmuration.train.clip.check import check_gradients
from murmuration.train.clip.rule import RECORDS_AT_ONCE, ClipError, ClipRule, stretches
from tests.support import brute_force
from tests.support.brute_force import Record, relative_error
from tests.support.pairwise import pairwise
from tests.support.parity_cases import CASES, Case
from tests.support.parity_engines import ENGINES, Scaled, judged, prepared, rule_of, summed

Inputs = dict[str, Tensor]
# Rows that hold something, of each slot; the rows of a micro-batch's slots are as many as the most of these.
LAYOUTS = {
    "two views": (2, 2, 2, 2, 2), "eight views": (8, 8, 8, 8, 8), "uneven units": (1, 9, 4, 2, 7),
    "one slot": (3,),
}  # fmt: skip
ABSENT, POISONED = 3, 2
UNSUPPORTED = {("reference", "checkpointed"), ("reference", "dropping_checkpoints")}


def shares_of(held: tuple[int, ...], reduce: str) -> Tensor:
    rows = max(held)
    return torch.tensor([
        (1 / count if reduce == "mean" else 1.0) if row < count else 0.0 for count in held for row in range(rows)
    ])  # fmt: skip


def laid_out(case: Case, held: tuple[int, ...], reduce: str, dtype: torch.dtype = torch.float64) -> Inputs:
    """Rows without a share hold zeros, as a reader leaves them."""
    share = shares_of(held, reduce)
    inputs = case.batch(len(share), dtype)
    for tensor in inputs.values():
        tensor[share == 0] = 0
    return inputs | {ROW_SHARE: share.to(dtype)}


def spoiled(inputs: Inputs, held: tuple[int, ...]) -> tuple[Inputs, Tensor]:
    """One slot has a row that is not finite; another is absent and full of rubbish."""
    present = torch.ones(len(held), dtype=torch.bool)
    found = {name: tensor.clone() for name, tensor in inputs.items()}
    if len(held) > ABSENT:
        present[ABSENT] = False
        for name, tensor in found.items():
            if tensor.is_floating_point() and name != ROW_SHARE:
                tensor[ABSENT * max(held)] = math.nan
                tensor[POISONED * max(held) + 1, ..., 0] = math.inf
    return found, present


def units_of(model: torch.nn.Module, inputs: Mapping[str, Tensor], slots: int) -> list[Record]:
    """Each row by itself, in a batch of one."""
    rest = {name: tensor for name, tensor in inputs.items() if name != ROW_SHARE}
    rows, share = brute_force.records_of(model, rest), inputs[ROW_SHARE].tolist()
    found, count = [], len(rows) // slots
    for slot in range(slots):
        own = [(rows[i], share[i]) for i in range(slot * count, (slot + 1) * count) if share[i]]
        gradient = {name: sum(weight * row.gradient[name] for row, weight in own) for name in rows[0].gradient}
        found.append(Record(sum(weight * row.loss for row, weight in own), gradient))
    return found


@pytest.mark.parametrize(
    ("engine", "name", "layout", "reduce", "kind"),
    pairwise([
        row for row in product(ENGINES, CASES, LAYOUTS, ("mean", "sum"), ("flat", "automatic"))
        if row[:2] not in UNSUPPORTED
    ]),
)  # fmt: skip
def test_the_sum_is_that_of_the_units_own_gradients(
    engine: str, name: str, layout: str, reduce: str, kind: str
) -> None:  # fmt: skip
    held, model = LAYOUTS[layout], CASES[name].model(torch.float64)
    inputs, present = spoiled(laid_out(CASES[name], held, reduce), held)
    units = units_of(model, inputs, len(held))
    bound, factors, expected = judged(units, present, kind)
    totals, (seen,) = summed(prepared(engine, rule_of(kind, bound), model), model, [(inputs, present)], double=True)
    assert relative_error(totals, expected) <= 1e-9
    assert seen.factors.tolist() == pytest.approx(factors, rel=1e-9), "one factor for each unit"
    for unit, loss in zip(units, seen.losses.tolist(), strict=True):
        assert loss == pytest.approx(unit.loss, rel=1e-9) or not math.isfinite(unit.loss)
    assert len(held) == 1 or (factors[ABSENT] == 0 and any(0 < f < 1 for f in factors))


@pytest.mark.parametrize("name", CASES)
def test_in_fp32_and_with_layers_that_share_kernels(name: str) -> None:
    held, model = LAYOUTS["uneven units"], CASES[name].model()
    inputs, present = laid_out(CASES[name], held, "mean", torch.float32), torch.ones(len(held), dtype=torch.bool)
    units = units_of(model, inputs, len(held))
    bound, _, expected = judged(units, present)
    clip = prepared("book-keeping", ClipRule("flat", bound, 0.0), model)
    assert relative_error(summed(clip, model, [(inputs, present)])[0], expected) <= 1e-5
    clip.together = True  # pyright: ignore[reportAttributeAccessIssue]
    assert relative_error(summed(clip, model, [(inputs, present)])[0], expected) <= 1e-5
    check_gradients(clip, model, inputs, present)


@pytest.mark.parametrize("name", ["mae", "captioner", "classifier", "big_transfer", "tied"])
def test_neither_the_order_of_units_nor_that_of_their_rows_changes_the_sum(name: str) -> None:
    held, model = LAYOUTS["uneven units"], CASES[name].model(torch.float64)
    inputs, present = laid_out(CASES[name], held, "mean"), torch.ones(len(held), dtype=torch.bool)
    clip = prepared("book-keeping", ClipRule("flat", 1.0, 0.0), model)
    first, (seen,) = summed(clip, model, [(inputs, present)], double=True)
    draw = torch.Generator().manual_seed(3)
    units, rows = torch.randperm(len(held), generator=draw), torch.randperm(max(held), generator=draw)
    moved = {n: t.unflatten(0, (len(held), -1))[units][:, rows].flatten(0, 1) for n, t in inputs.items()}
    again, (other,) = summed(clip, model, [(moved, present)], double=True)
    assert relative_error(again, first) <= 1e-12
    assert torch.allclose(other.norms, seen.norms[units], rtol=1e-12)


HOSTILE = (0.0, 1e-25, 1e3, 1e19, -1e19, math.nan, math.inf)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("name", ["mae", "captioner", "classifier", "big_transfer"])
def test_a_unit_of_the_most_hostile_rows_moves_the_sum_by_at_most_c(name: str, reduce: str, precision: str) -> None:
    """However many rows it has and whatever they hold; its neighbours stay what they are."""
    rows, model = len(HOSTILE), Scaled(CASES[name].model())
    inputs = laid_out(CASES[name], (rows,) * 3, reduce, torch.float32)
    bound, present = 0.25, torch.ones(3, dtype=torch.bool)
    clip = prepared("book-keeping", ClipRule("flat", bound, 0.0), model, precision)  # pyright: ignore[reportArgumentType]
    plain = inputs | {"scale": torch.ones(3 * rows)}
    without = summed(clip, model, [(plain, torch.tensor([True, False, True]))])[0]
    for own in ((1e19,) * rows, (1e3, -1e3) + (1.0,) * (rows - 2), HOSTILE, (*HOSTILE[:5], 1.0, 1.0)):
        scale = torch.cat([torch.ones(rows), torch.tensor(own), torch.ones(rows)])
        moved = summed(clip, model, [(inputs | {"scale": scale}, present)])[0]
        distance = brute_force.size([moved[n].double() - without[n].double() for n in without])
        assert distance <= bound * 1.0061, "FACTOR_ROUNDING is what C is lowered by"
        assert distance > 0.99 * bound or not all(map(math.isfinite, own)), "one that is finite adds C"


def test_rows_that_are_clipped_one_by_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the definition above, by the check at every start, and by the bound itself where rows are added up."""
    held, case = (4, 4, 4), CASES["classifier"]
    model, present = case.model(), torch.ones(3, dtype=torch.bool)
    inputs, rule = laid_out(case, held, "sum", torch.float32), ClipRule("flat", 0.01, 0.0)
    clip = prepared("book-keeping", rule, model)
    check_gradients(clip, model, inputs, present)
    whole = type(clip).add_clipped

    def one_by_one(self, model, inputs, present, sums, rule=None):
        rest = {name: tensor for name, tensor in inputs.items() if name != ROW_SHARE}
        seen = whole(self, model, rest, present.repeat_interleave(4) & (inputs[ROW_SHARE] > 0), sums, rule)
        return type(seen)(*(x.view(-1, 4).sum(1) for x in (seen.losses, seen.norms, seen.factors)), seen.sensitivity)

    monkeypatch.setattr(type(clip), "add_clipped", one_by_one)
    assert brute_force.size(summed(clip, model, [(inputs, torch.arange(3) == 0)])[0].values()) > 1.5 * rule.bound
    with pytest.raises(ClipError, match="off by"):
        check_gradients(clip, model, inputs, present)


@pytest.mark.parametrize("fault", ["no share", "share of the wrong row", "rows of other slots"])
def test_shares_that_are_lost_or_mixed_up_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, model = LAYOUTS["uneven units"], CASES["captioner"].model(torch.float64)
    inputs, present = laid_out(CASES["captioner"], held, "mean"), torch.ones(len(held), dtype=torch.bool)
    units = units_of(model, inputs, len(held))
    bound, _, expected = judged(units, present)

    def wrong(model, inputs, slots):
        rest = dict(inputs)
        share = rest.pop(ROW_SHARE)
        losses = model(rest)
        if fault == "no share":
            return losses.view(slots, -1).mean(1)
        return (losses * share.roll(1)).view(slots, -1).sum(1)

    if fault == "rows of other slots":
        honest = losses.losses_of

        def mixed(model, inputs, slots, tracker=None):
            swapped = {name: x.unflatten(0, (-1, slots)).transpose(0, 1).flatten(0, 1) for name, x in inputs.items()}
            return honest(model, swapped, slots, tracker)

        monkeypatch.setattr(bookkeeping, "losses_of", mixed)
    else:
        monkeypatch.setattr(losses, "slot_losses", wrong)
    clip = prepared("book-keeping", ClipRule("flat", bound, 0.0), model)
    with pytest.raises((AssertionError, RuntimeError, ClipError)):
        totals, (seen,) = summed(clip, model, [(inputs, present)], double=True)
        assert relative_error(totals, expected) <= 1e-3
        assert seen.losses.tolist() == pytest.approx([unit.loss for unit in units])


def test_a_model_that_averages_the_rows_itself_is_refused() -> None:
    """In which order it did so could not be told."""

    class Averaging(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs["x"]).view(2, -1).mean(1)

    inputs = {"x": torch.randn(6, 4), ROW_SHARE: torch.full((6,), 1 / 3)}
    for engine in ENGINES:
        model = Averaging(4, 1)
        with pytest.raises((ClipError, RuntimeError), match=r"for \d rows|invalid"):
            summed(prepared(engine, rule_of("flat", 1.0), model), model, [(inputs, torch.ones(2, dtype=torch.bool))])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_callers_autocast_rounds_no_norm_and_no_sum(precision: str) -> None:
    """Measurements run within one."""
    case, held = CASES["many_tokens"], (2, 2)
    model, present = case.model(), torch.ones(2, dtype=torch.bool)
    inputs = laid_out(case, held, "mean", torch.float32)
    clip = prepared("book-keeping", ClipRule("flat", 1.0, 0.0), model, precision)  # pyright: ignore[reportArgumentType]
    outside, (seen,) = summed(clip, model, [(inputs, present)])
    with torch.autocast("cpu", torch.bfloat16):
        within, (other,) = summed(clip, model, [(inputs, present)])
    assert torch.equal(other.norms, seen.norms) and all(torch.equal(within[n], outside[n]) for n in outside)


def test_a_stretch_has_as_many_rows_as_one_of_records_with_one_row() -> None:
    """What rounding may add is bounded by the rows that one fp32 product adds up."""
    for records, rows in ((300, 1), (300, 4), (5, 16), (3, 500)):
        parts = stretches(records, rows)
        assert [n for part in parts for n in range(part.start, part.stop)] == list(range(records))
        assert all((part.stop - part.start) * rows <= max(RECORDS_AT_ONCE, rows) for part in parts)


def test_many_rows_in_stretches_are_the_whole() -> None:
    case, slots, rows = CASES["one_token"], 40, 8
    model = case.model()
    inputs, present = laid_out(case, (rows,) * slots, "mean", torch.float32), torch.ones(slots, dtype=torch.bool)
    units = units_of(model, inputs, slots)
    expected = brute_force.clipped_sum(units, brute_force.factors_of(units, present, brute_force.flat(1.0)))
    clip = prepared("book-keeping", ClipRule("flat", 1.0, 0.0), model)
    assert relative_error(summed(clip, model, [(inputs, present)])[0], expected) <= 1e-6
