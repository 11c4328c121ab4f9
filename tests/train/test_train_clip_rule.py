"""The rule by which a norm becomes a factor, and what sums and products it takes for granted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from murmuration.train.clip.engine import assert_exact_matmul
from murmuration.train.clip.rule import ClipError, ClipRule, rounding_allowance

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
    assert_exact_matmul()
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with pytest.raises(ClipError, match="reduced precision"):
        assert_exact_matmul()


def test_the_allowance_covers_the_chains_of_both_worlds() -> None:
    for size in (64, 128, 512, 5000):
        records = min(size, 128)
        chain = records * 2.0**-24 / (1 - records * 2.0**-24)
        assert rounding_allowance(size) == pytest.approx(2 * records * chain + 1e-3, rel=1e-12)


def test_automatic_clipping_without_gamma_does_not_lift_what_has_vanished() -> None:
    norms = torch.tensor([1e-35, 1e-25, 2.0], dtype=torch.float64)
    factors = ClipRule("automatic", 1.0, 0.0, gamma=0.0).factors(norms)
    assert factors.tolist() == [0.0, pytest.approx(1e25), 0.5]
