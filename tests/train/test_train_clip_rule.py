"""The rule by which a norm becomes a factor, and what sums and products it takes for granted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from murmuration.train.clip.engine import assert_exact_matmul
from murmuration.train.clip.rule import (
    FACTOR_ROUNDING,
    LONGEST_ROW,
    UNIT_ROUNDOFF,
    ClipError,
    ClipRule,
    rounding_allowance,
)

KINDS = ["flat", "automatic"]
GAMMA = 0.01


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    bound=st.floats(1e-3, 1e3),
    norm=st.one_of(st.floats(min_value=0), st.just(math.nan), st.just(math.inf), st.floats(1e-50, 1e50)),
)
def test_no_norm_times_its_factor_exceeds_the_bound(kind: str, bound: float, norm: float) -> None:
    rule = ClipRule(kind, bound, 0.0, GAMMA)  # pyright: ignore[reportArgumentType]
    factor = rule.factors(torch.tensor([norm], dtype=torch.float64))
    assert factor.dtype == torch.float32
    value = float(factor)
    assert value >= 0 and math.isfinite(value)
    if not math.isfinite(norm) or norm == 0:
        assert value == 0
    else:
        assert value * norm <= bound * (1 + 2.0**-23)
        if 1e-30 < norm < 1e30:
            expected = min(1.0, bound / norm) if kind == "flat" else bound / (norm + GAMMA)
            assert value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("norm", [3e38, 1e40, 1e42, 7.3e44, 1e45, 1e300])
def test_factors_too_small_for_fp32_are_zero_and_not_rounded_up(norm: float) -> None:
    for kind in KINDS:
        factor = float(ClipRule(kind, 1.0, 0.0).factors(torch.tensor([norm], dtype=torch.float64)))  # pyright: ignore[reportArgumentType]
        assert factor * norm <= 1 + 1e-6


def test_reduced_precision_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    switches = [
        (matmul, "allow_tf32"), (matmul, "allow_bf16_reduced_precision_reduction"),
        (matmul, "allow_fp16_reduced_precision_reduction"), (convolutions, "allow_tf32"),
    ]  # fmt: skip
    for owner, name in switches:
        setattr(owner, name, True)
    assert_exact_matmul()
    for owner, name in switches:
        assert not getattr(owner, name), name
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with pytest.raises(ClipError, match="reduced precision"):
        assert_exact_matmul()


def test_the_allowance_covers_the_chains_of_both_worlds() -> None:
    for size in (64, 128, 512, 5000):
        records = min(size, 128)
        chain = records * 2.0**-24 / (1 - records * 2.0**-24)
        assert rounding_allowance(size) == pytest.approx(2 * records * chain + 6.1e-3, rel=1e-12)


def test_automatic_clipping_without_gamma_does_not_lift_what_has_vanished() -> None:
    norms = torch.tensor([1e-35, 1e-25, 2.0], dtype=torch.float64)
    factors = ClipRule("automatic", 1.0, 0.0, gamma=0.0).factors(norms)
    assert factors.tolist() == [0.0, pytest.approx(1e25), 0.5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "grouping, parts",
    [
        ("all", [1.0]), ("layer", [1.0]), ("block", [0.5**0.5] * 2), ("layer", [3**-0.5] * 3),
        ((("head.*", 3.0), ("*", 4.0)), [0.6, 0.8]), ((("a*", 2.0), ("b*", 3.0), ("*", 6.0)), [2 / 7, 3 / 7, 6 / 7]),
    ],
)  # fmt: skip
def test_all_groups_together_stay_within_the_bound_and_each_within_its_share(
    kind: str, grouping: Any, parts: list[float]
) -> None:
    rule = ClipRule(kind, 0.7, 0.0, GAMMA, grouping)  # pyright: ignore[reportArgumentType]
    draw = torch.Generator().manual_seed(3)
    norms = torch.exp(8 * torch.randn(len(parts), 300, generator=draw, dtype=torch.float64))
    scaled = norms * rule.group_factors(norms)
    assert float(scaled.square().sum(0).sqrt().max()) <= 0.7 * (1 + 2.0**-23)
    long = torch.full((len(parts), 1), 1e9, dtype=torch.float64)
    shares = (long * rule.group_factors(long)).flatten().tolist()
    assert shares == pytest.approx([0.7 * part for part in parts], rel=1e-6)


def test_the_longest_row_of_fp32_squares_errs_by_less_than_what_is_left_for_rounding() -> None:
    """A unit roundoff at each addition along the row, half of it after the root."""
    assert LONGEST_ROW * UNIT_ROUNDOFF / 2 < FACTOR_ROUNDING
