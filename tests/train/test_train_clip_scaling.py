"""Scaled gradients: clipped, summed and noised in the space of the scales, against brute force; and led back."""

from __future__ import annotations

import pytest
import torch

from murmuration.train.clip.scaling import Scaling
from tests.support import brute_force
from tests.support.brute_force import relative_error
from tests.support.parity_cases import CASES, two_micro_batches
from tests.support.parity_engines import (
    ENGINES,
    factor_of,
    median_norm,
    only,
    prepared,
    rule_of,
    summed,
)
from tests.support.scaling_world import random_table, scaled
from tests.train.test_train_clip_parity import UNSUPPORTED

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_gradients_scaled_one_by_one(name: str, dtype: torch.dtype) -> None:
    model = CASES[name].model(dtype)
    inputs, present = two_micro_batches(CASES[name], dtype)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    table = random_table(model, but=trained[1:2])
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
