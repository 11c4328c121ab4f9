"""What an audit says of a run: a lower bound is rounded down, the claim up, and each with its own confidence."""

from __future__ import annotations

from murmuration.accounting.epsilon.audit_evidence import AuditBound, Bound
from murmuration.train.audit.checks import Check
from murmuration.train.audit.result import AuditReport
from tests.support.acc_world import PLAN


def report(p_value: float) -> AuditReport:
    tried = (Bound("one-run (ε, δ)", 2.99996, guesses=100, correct=99), Bound("pairs", 3.99996, "it is Gaussian"))
    bound = AuditBound(200, 100, 1e-5, 0.95, 3, tried)
    fine = Check({"all": 0.5})
    return AuditReport(
        "private", "gradient", 2.00001, bound, p_value, PLAN, "DeepSpeed", 2, None, 20.0, fine, fine, fine,
        {0.3: 1.0, 0.9: 0.1},
    )  # fmt: skip


def test_bounds_are_rounded_away_from_a_refutation_and_name_their_confidence() -> None:
    (told,) = report(1e-9).refuted
    assert told == "epsilon is at least 3.999 with 95% confidence, and 2.0001 is claimed (p = 1e-09 for the claim)"
    text = report(0.5).as_text()
    assert "ε ≤ 2.0001 at δ = 1e-05" in text and "ε ≥ 2.999 (" in text and "ε ≥ 3.999 (" in text
    assert "of 200 such audits, simulated, 100.0% detect noise of 0.3·σ, 10.0%" in text
    assert "each accuses an honest run at most once in a million" in text
