"""TAN: planned noise on the mean of a fraction of the batch, true ε in the ledger, NOT PRIVATE at the target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from murmuration.accounting.certificate.pages import markdown
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.make_plan import stand_in
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import Poisson
from tests.support.acc_world import begin, certified, reopen, train

TARGET = PrivacyPlan(
    records=10_000, sampling=Poisson(round(0.04 * 2**32)), clip_norm=1.0, noise_multiplier=1.6, steps=30, delta=5e-5,
    epsilon_budget=2.0,
)  # fmt: skip


def test_noise_on_the_mean_is_the_planned_one_and_epsilon_is_that_of_what_runs() -> None:
    cheap = stand_in(TARGET, 4.0)
    assert cheap.divisor == pytest.approx(TARGET.divisor / 4, rel=1e-6)
    assert cheap.noise_std / cheap.divisor == pytest.approx(TARGET.noise_std / TARGET.divisor, rel=1e-6)
    assert (cheap.steps, cheap.delta, cheap.records, cheap.clip_norm) == (30, 5e-5, 10_000, 1.0)
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(0.4))
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, 30))
    assert cheap.epsilon_budget == pytest.approx(accountant.get_epsilon(5e-5), rel=0.02)
    assert cheap.epsilon_budget > 3 * TARGET.epsilon_budget


def test_ledger_and_certificate_tell_both_and_neither_can_be_taken_for_the_other(tmp_path: Path) -> None:
    cheap = stand_in(replace(TARGET, steps=12), 4.0)
    journal = begin(tmp_path, cheap)
    train(journal, range(1, cheap.steps + 1), cheap)
    journal.checkpointed(0, cheap.steps, "digest")
    journal.finish()
    document = certified(journal)
    assert reopen(tmp_path).history.plans[0] == cheap, "the mark survives the ledger"

    claim = document["claim"]
    assert not claim["private"] and claim["statement"].startswith("NOT PRIVATE at ε = 2: a TAN simulation")
    assert f"what was run has ({claim['epsilon_claimed']}, " in claim["statement"]
    assert 3 * TARGET.epsilon_budget < claim["epsilon"] <= cheap.epsilon_budget
    text = markdown(document)
    assert "No promise is made" not in text and "what was run" in text
    verdict = verify(tmp_path)
    assert verdict.epsilon == claim["epsilon"] and (verdict.objection or "").startswith("NOT PRIVATE at ε = 2")

    forged = json.loads((tmp_path / "certificate.json").read_text())
    forged["claim"]["statement"] = "(2.0, 5e-05)-differential privacy for everything"
    (tmp_path / "certificate.json").write_text(json.dumps(forged))
    with pytest.raises(CertificateError, match="statement"):
        verify(tmp_path)
