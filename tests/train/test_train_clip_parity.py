"""Clip engines against a loop over single records, for every way a parameter can enter a loss."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.pairwise import all_of
from tests.support.parity_cases import CASES, two_micro_batches
from tests.support.parity_engines import (
    ENGINES,
    Scaled,
    Shifted,
    alone,
    contribution,
    factor_of,
    judged,
    median_norm,
    only,
    prepared,
    rule_of,
    summed,
)

# Clipping; automatic clipping; and the latter without gamma, which is plain normalisation.
KINDS = ("flat", "automatic", "normalised")
GROUPINGS = ("block", "layer")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
SCALES = (1.0, 0.0, 1e-25, 1e-12, 1e12, 1e19, math.nan, math.inf, -math.inf, 3.0)
# vmap cannot see through activation checkpointing, which saves tensors by hooks.
UNSUPPORTED = {("reference", "checkpointed"), ("reference", "dropping_checkpoints")}


def unsupported(engine: str, case: str, *_: str) -> bool:
    return (engine, case) in UNSUPPORTED


DEAR = {"dropping_mae", "dropping_captioner", "dropping_checkpoints", "checkpointed", "big_transfer"}


def dear(engine: str, case: str, kind: str = "flat") -> bool:
    """The core compares the sums of both engines with a loop for every model, and leaves these to `make test-full`."""
    return engine == "reference" or case in DEAR or kind == "automatic"


@pytest.mark.parametrize(
    ("engine", "name", "kind", "precision"), all_of(ENGINES, CASES, KINDS, DTYPES, unless=unsupported)
)
def test_sums_over_micro_batches_equal_a_loop_over_records(engine: str, name: str, kind: str, precision: str) -> None:
    dtype = DTYPES[precision]
    model = CASES[name].model(dtype)
    inputs, present = two_micro_batches(CASES[name], dtype)
    records = brute_force.records_of(model, inputs)
    bound, factors, expected = judged(records, present, kind)
    halves = [(only(inputs, rows), present[rows]) for rows in (slice(0, 5), slice(5, 10))]
    clip = prepared(engine, rule_of(kind, bound), model)
    totals, seen = summed(clip, model, halves, double=dtype == torch.float64)

    assert relative_error(totals, expected) <= TOLERANCE[dtype]
    for parameter, tensor in expected.items():
        # Each parameter by itself too: a small one must not hide behind a large one.
        assert relative_error({parameter: totals[parameter]}, {parameter: tensor}) <= 20 * TOLERANCE[dtype], parameter
    assert torch.cat([s.factors for s in seen]).tolist() == pytest.approx(factors, rel=1e-5)
    for row in present.nonzero().flatten().tolist():
        loss, norm = float(seen[row // 5].losses[row % 5].detach()), float(seen[row // 5].norms[row % 5])
        if math.isfinite(records[row].loss):
            assert loss == pytest.approx(records[row].loss, rel=1e-4, abs=1e-5)
            assert norm == pytest.approx(records[row].norm(), rel=1e-5)
    assert kind != "flat" or 0 < sum(factor == 1 for factor in factors) < int(present.sum())
    assert all(p.grad is None for p in model.parameters()), "sums go to the sums, not to .grad"


def groups_by_hand(names: list[str], grouping: str) -> dict[str, list[str]]:
    """A layer is what holds the parameter; a block is the first numbered part of a name, all else one group."""
    found: dict[str, list[str]] = {}
    for name in names:
        layer = name.rpartition(".")[0] or name
        block = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
        found.setdefault(layer if grouping == "layer" else block.group() if block else "", []).append(name)
    return found


@pytest.mark.parametrize(
    ("name", "kind", "grouping"),
    all_of(("mae", "captioner", "classifier", "odd_layers"), ("flat", "automatic"), GROUPINGS),
)
def test_groups_are_clipped_each_by_its_own_norm(name: str, kind: str, grouping: str) -> None:
    model = CASES[name].model()
    inputs, present = two_micro_batches(CASES[name], torch.float32)
    records = brute_force.records_of(model, inputs)
    bound = median_norm(records, present)
    groups = groups_by_hand(list(records[0].gradient), grouping)
    share = bound / math.sqrt(len(groups))
    expected = brute_force.grouped_sum(records, present, {g: (n, factor_of(kind, share)) for g, n in groups.items()})
    rule = replace(rule_of(kind, bound), grouping=grouping)
    clip = prepared("book-keeping", rule, model)
    totals, _ = summed(clip, model, [(inputs, present)])
    assert relative_error(totals, expected) <= 1e-5
    assert max(contribution(clip, model, inputs, row) for row in range(10)) <= bound * (1 + 1e-5)
    assert rule.sensitivity == bound


@pytest.mark.parametrize(
    ("engine", "name", "kind"),
    all_of(
        ENGINES,
        CASES,
        ("flat", "automatic"),
        unless=unsupported,
        rest=dear,
    ),
)
def test_norms_of_any_size_are_clipped_and_leave_the_neighbours_alone(engine: str, name: str, kind: str) -> None:
    model = Scaled(CASES[name].model())
    inputs: dict[str, Tensor] = {**CASES[name].batch(len(SCALES)), "scale": torch.ones(len(SCALES))}
    ordinary = brute_force.records_of(model, inputs)
    bound = 0.7 * statistics.median(r.norm() for r in ordinary)
    hostile = inputs | {"scale": torch.tensor(SCALES)}
    records = brute_force.records_of(model, hostile)
    everyone = torch.ones(len(SCALES), dtype=torch.bool)
    factors = brute_force.factors_of(records, everyone, factor_of(kind, bound))
    clip = prepared(engine, rule_of(kind, bound), model)

    totals, (seen,) = summed(clip, model, [(hostile, everyone)])
    assert relative_error(totals, brute_force.clipped_sum(records, factors)) <= 1e-5
    for row, scale in enumerate(SCALES):
        added = alone(clip, model, hostile, row)
        assert all(bool(t.isfinite().all()) for t in added.values()), scale
        assert brute_force.size(added.values()) <= bound * (1 + 1e-5), scale
        expected = brute_force.clipped_sum([records[row]], [factors[row]])
        assert factors[row] or not brute_force.size(added.values()), scale
        # 1e-25 times a small number is subnormal in fp32 and has few digits.
        assert relative_error(added, expected) <= (1e-5 if scale != 1e-25 else 1e-2), scale
    _, (before,) = summed(clip, model, [(inputs, everyone)])
    for field in ("norms", "losses", "factors"):
        assert torch.equal(getattr(seen, field)[[0]], getattr(before, field)[[0]]), field


@pytest.mark.parametrize(("engine", "name"), all_of(ENGINES, CASES, unless=unsupported, rest=dear))
def test_a_record_adds_the_same_in_any_row_beside_anyone(engine: str, name: str) -> None:
    case, order = CASES[name], torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    model, inputs = case.model(), case.batch(8)
    bound = 0.5 * statistics.median(r.norm() for r in brute_force.records_of(model, inputs))
    clip = prepared(engine, rule_of("flat", bound), model)
    everyone = torch.ones(8, dtype=torch.bool)
    here, (first,) = summed(clip, model, [(inputs, everyone)])
    there, (second,) = summed(clip, model, [(only(inputs, order), everyone)])
    assert torch.allclose(first.norms[order], second.norms, rtol=1e-6, atol=0)
    assert relative_error(there, {n: t.double() for n, t in here.items()}) <= 1e-6
    shuffled, other = only(inputs, order), only(inputs, [0] * 8)
    for row in (0, 3, 7):
        added = {n: t.double() for n, t in alone(clip, model, inputs, row).items()}
        moved = alone(clip, model, shuffled, int((order == row).nonzero()))
        assert relative_error(moved, added) <= 1e-6, "its row"
        crowd = {n: torch.cat([t[:3], inputs[n][row : row + 1]]) for n, t in other.items()}
        assert relative_error(alone(clip, model, crowd, 3), added) <= 1e-6, "its neighbours and the batch's size"
        assert contribution(clip, model, inputs, row) <= bound * (1 + 1e-5)


@pytest.mark.parametrize(("engine", "name"), all_of(ENGINES, CASES, unless=unsupported, rest=dear))
def test_an_absent_record_leaves_no_trace_in_any_bit(engine: str, name: str) -> None:
    case = CASES[name]
    model, inputs = case.model(), case.batch(4)
    clip = prepared(engine, rule_of("flat", 1.0), model)
    present = torch.tensor([True, False, True, False])
    clean, _ = summed(clip, model, [(inputs, present)])
    for rubbish in (math.nan, math.inf, 1e30, 0.0):
        changed = {name: tensor.clone() for name, tensor in inputs.items()}
        for tensor in changed.values():
            if tensor.is_floating_point():
                tensor[~present] = rubbish
        found, _ = summed(clip, model, [(changed, present)])
        assert all(torch.equal(found[n], clean[n]) for n in clean), rubbish
    nobody, (seen,) = summed(clip, model, [(changed, torch.zeros(4, dtype=torch.bool))])
    assert not any(bool(t.any()) for t in nobody.values()) and not seen.factors.any()


@pytest.mark.core
@pytest.mark.parametrize("name", ["mae", "captioner", "one_token"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_is_not_finite_adds_nothing_though_its_gradient_is(engine: str, name: str) -> None:
    model = Shifted(CASES[name].model())
    inputs = {**CASES[name].batch(4), "shift": torch.tensor([0.0, math.nan, math.inf, 0.0])}
    records = brute_force.records_of(model, inputs)
    assert all(math.isfinite(r.norm()) for r in records)
    clip = prepared(engine, rule_of("flat", 1.0), model)
    everyone = torch.ones(4, dtype=torch.bool)
    totals, (seen,) = summed(clip, model, [(inputs, everyone)])
    factors = brute_force.factors_of(records, everyone, brute_force.flat(1.0))
    assert factors[1:3] == [0.0, 0.0] == seen.factors[1:3].tolist()
    assert relative_error(totals, brute_force.clipped_sum(records, factors)) <= 1e-5


class Unused(nn.Module):
    """Holds a trainable layer that the loss never meets."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.used(inputs["x"]).square().sum(1)


@pytest.mark.core
@pytest.mark.parametrize("engine", ENGINES)
def test_a_trainable_parameter_that_is_never_met_is_an_error_or_adds_nothing(engine: str) -> None:
    """What must not happen: its total is missing or rubbish, and nobody is told."""
    model, inputs = Unused(), {"x": torch.randn(3, 4)}
    try:
        clip = prepared(engine, rule_of("flat", 1.0), model)
        totals, _ = summed(clip, model, [(inputs, torch.ones(3, dtype=torch.bool))])
    except ValueError as refusal:
        assert "unused" in str(refusal)
        return
    assert not any(bool(t.any()) for n, t in totals.items() if n.startswith("unused"))
