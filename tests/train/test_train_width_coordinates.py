"""The coordinate check under noise, as a test: what noise moves does not grow with width, and would without the
factors. Widths, pictures and keys are fixed, and slopes are far from both bounds on any processor."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from murmuration.train.config.optimizer import Optimizer, OptimizerParams, WidthTransfer

WIDTHS, BASE = (32, 64, 128, 256), 64
FLAT, GROWS = 0.15, 0.35
"""Bounds on slopes that should be 0 and 1/2."""
NOISE = ("hidden noise features", "output noise logits")
RATES = {"AdamW": 3e-3, "SGD": 1e-2}


@pytest.fixture
def slopes(benchmark: Callable[[str], ModuleType]) -> Callable[..., dict[str, float]]:
    checks = benchmark("width_coordinates")

    def measured(kind: Any, transfer: WidthTransfer | None) -> dict[str, float]:
        params = OptimizerParams() if kind == "SGD" else OptimizerParams(betas=(0.9, 0.95))
        optimizer = Optimizer(type=kind, params=params, width_transfer=transfer)
        check = checks.Check(rate=RATES[kind])
        told = [[checks.changes(width, optimizer, check, 0)] for width in WIDTHS]
        return {name: each["slope"] for name, each in checks.summary(WIDTHS, told).items()}

    return measured


@pytest.mark.parametrize("kind", list(RATES))
def test_what_noise_moves_stays_the_same_and_grows_without_the_factors(
    slopes: Callable[..., dict[str, float]], kind: Any
) -> None:
    off, on = slopes(kind, None), slopes(kind, WidthTransfer(width=BASE))
    for name in NOISE:
        assert abs(on[name]) < FLAT and off[name] > GROWS, (name, on[name], off[name])
    # Tokens, biases and norms need no factor, and have none.
    assert abs(on["vectors noise features"]) < FLAT and abs(off["vectors noise features"]) < FLAT
    # What signal does to the output through the matrices neither grows nor vanishes as features do.
    assert off["hidden signal logits"] - on["hidden signal logits"] > 0.5
