"""Numbers of docs/proof.md and docs/auditing.md that are constants of the code, beside those that test_acc_sentences.py
computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from murmuration.accounting import errors
from murmuration.data.draw import samplers
from murmuration.train.clip import check, rule, standardised, sums
from murmuration.train.recipe import record_names
from murmuration.train.self_test import self_test

DOCS = Path(__file__).parents[2] / "docs"
PAGE = " ".join(((DOCS / "proof.md").read_text() + (DOCS / "auditing.md").read_text()).split())


@pytest.mark.parametrize(
    ("sentence", "holds"),
    [
        ("Products of at most 128 records are computed in fp32", lambda: rule.RECORDS_AT_ONCE == 128),
        (
            "C is lowered by at most 0.81 %",
            lambda: round(100 * max(map(rule.rounding_allowance, (1, 64, 128, 10**6))), 2) == 0.81,
        ),
        (
            "shifts the difference between neighbouring sums by at most 5e-4·C, proved for all records and included in",
            lambda: 5e-4 == rule.WINDOW_ROUNDING <= rule.FACTOR_ROUNDING,
        ),
        ("they accumulate at most 1,024 tokens of such a gradient", lambda: sums.AT_ONCE == 1024),
        (
            "Standardised weights** accumulate at most 32 records",
            lambda: rule.RECORDS_AT_ONCE // standardised.FEWER == 32,
        ),
        ("gradient the standardisation shrinks more than eightfold", lambda: standardised.LARGEST == 8),
        ("from 2²⁶ records on the ids of a step's draw", lambda: samplers.SHARED_FROM == 2**26),
        ("σ is within 5 % of the plan", lambda: self_test.SIGMA_TOLERANCE == 0.05),
        ("match plain autograd to 0.1 % in fp32", lambda: check.EXACT == 1e-3),
        ("and with autograd to 2 %", lambda: 0.019 < check.ROUNDED <= 0.02),
        (
            "may be off by ten times plain autograd's fp32 error, and never more than 30 %",
            lambda: (check.AMPLIFIED, check.MOST_AMPLIFIED) == (10, 0.3),
        ),
        ("if fewer than a hundredth of the records counted have it", lambda: record_names.SHARE == 0.01),
        ("or fewer than 10.", lambda: record_names.FEWEST == 10),
        ("With fewer than 20 records, nothing is concluded", lambda: record_names.TELLING == 20),
        ("the run ends here (exit code 3)", lambda: errors.BUDGET_SPENT == 3),
        ("the run does not start (exit code 4)", lambda: errors.SELF_TEST_FAILED == 4),
        ("with 5 if something is not as it was certified", lambda: errors.REFUSED == 5),
    ],
)
def test_every_constant_of_the_pages_is_that_of_the_code(sentence: str, holds: Callable[[], bool]) -> None:
    assert sentence in PAGE
    assert holds()
