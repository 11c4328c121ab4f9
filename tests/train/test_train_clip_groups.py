"""Groups with equal budgets or with their own: each clipped to C_k, Σ C_k² = C², against brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from murmuration.model.build import build
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.groups import group_of, groups_of
from murmuration.train.clip.rule import ClipError
from murmuration.train.config.privacy import Clip
from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.parity_cases import CASES, two_micro_batches
from tests.support.parity_engines import contribution, factor_of, median_norm, prepared, rule_of, summed
from tests.support.train_helpers import SHAPE

# The first that fits takes a parameter; the third group gets what is left.
BUDGETS = (("*bias", 1.0), ("*norm*", 0.25), ("*", 5.0))


def by_hand(names: list[str]) -> list[list[str]]:
    biases = [name for name in names if name.endswith("bias")]
    norms = [name for name in names if "norm" in name and name not in biases]
    return [biases, norms, [name for name in names if name not in biases and name not in norms]]


@pytest.mark.parametrize("kind", ("flat", "automatic"))
@pytest.mark.parametrize("engine", ("book-keeping", "reference"))
@pytest.mark.parametrize("name", ("mae", "captioner", "classifier"))
def test_unequal_budgets_are_those_of_brute_force_and_keep_the_sensitivity(name: str, engine: str, kind: str) -> None:
    model = CASES[name].model()
    inputs, present = two_micro_batches(CASES[name], torch.float32)
    records = brute_force.records_of(model, inputs)
    bound = 0.5 * median_norm(records, present)
    whole = math.sqrt(1 + 0.25**2 + 25)
    budgets = [bound * budget / whole for _, budget in BUDGETS]
    groups = by_hand(list(records[0].gradient))
    assert all(groups)
    expected = brute_force.grouped_sum(
        records, present, {str(k): (groups[k], factor_of(kind, budgets[k])) for k in range(3)}
    )
    rule = replace(rule_of(kind, bound), grouping=BUDGETS)
    clip = prepared(engine, rule, model)
    totals, _ = summed(clip, model, [(inputs, present)])
    assert relative_error(totals, expected) <= 1e-5
    equal, _ = summed(prepared(engine, replace(rule, grouping="all"), model), model, [(inputs, present)])
    assert relative_error(equal, expected) > 1e-3, "the groups make no difference here"
    added = [contribution(clip, model, inputs, row) for row in present.nonzero().flatten().tolist()]
    assert max(added) <= bound * (1 + 1e-5) and rule.sensitivity == bound
    full = [r for r in records if all(r.norm(g) > c for g, c in zip(groups, budgets, strict=True))]
    assert kind != "flat" or not full or max(added) == pytest.approx(bound, rel=1e-5), "no group uses its budget"


@pytest.mark.parametrize("engine", ("book-keeping", "reference"))
@pytest.mark.parametrize(
    ("grouping", "said"),
    [
        ((("*weight", 1.0),), "no pattern for"),
        ((("*", 1.0), ("*bias", 1.0)), "'[*]bias'"),
        ((("*", 1.0), ("nothing", 1.0)), "'nothing'"),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused(engine: str, grouping: Any, said: str) -> None:
    with pytest.raises(ClipError, match=said):
        prepared(engine, replace(rule_of("flat", 1.0), grouping=grouping), CASES["mae"].model())


def test_the_config_names_groups_in_their_order() -> None:
    groups = [{"names": "*bias", "budget": 1.0}, {"names": "*", "budget": 2.0}]
    assert Clip.model_validate({"groups": groups}).grouping == (("*bias", 1.0), ("*", 2.0))
    one, other = (Clip.model_validate({"groups": order}).model_dump() for order in (groups, groups[::-1]))
    assert one != other, "the order decides who gets what, so it is part of the run's identity"
    assert Clip.model_validate({"groups": "layer"}).grouping == "layer"
    for wrong in ([], [{"names": "*", "budget": 0.0}], [{"names": "*", "budget": math.inf}], "blocks"):
        with pytest.raises(ValidationError):
            Clip.model_validate({"groups": wrong})


def test_groups_follow_blocks_and_layers() -> None:
    assert group_of("blocks.3.attn.qkv.weight", "block") == "blocks.3"
    assert group_of("decoder.layers.0.norm1.bias", "block") == "decoder.layers.0"
    assert group_of("cls_token", "block") == group_of("norm.weight", "block") == ""
    assert group_of("blocks.3.attn.qkv.weight", "layer") == group_of("blocks.3.attn.qkv.bias", "layer")
    assert group_of("cls_token", "layer") == "cls_token"
    names = [name for name, _ in build(SHAPE, "mae").named_parameters()]
    assert set(groups_of(names, "all").values()) == {0}
    assert 1 < len(set(groups_of(names, "block").values())) < len(set(groups_of(names, "layer").values()))


@pytest.mark.parametrize("engine", ("book-keeping", "reference"))
def test_each_call_clips_by_the_groups_of_its_own_rule(engine: str) -> None:
    """The rule is a value of the step: what an engine found out under one rule says nothing of the next."""
    model = CASES["captioner"].model()
    inputs, present = two_micro_batches(CASES["captioner"], torch.float32)
    bound = 0.5 * median_norm(brute_force.records_of(model, inputs), present)
    rules = [replace(rule_of("flat", bound), grouping=grouping) for grouping in ("all", "layer", BUDGETS, "all")]
    clip = prepared(engine, rules[0], model)
    for rule in rules:
        found, seen = clipped_totals(clip, model, inputs, present, rule=rule)
        expected, _ = clipped_totals(prepared(engine, rule, model), model, inputs, present)
        assert relative_error(found, expected) == 0 and seen.sensitivity == rule.sensitivity
