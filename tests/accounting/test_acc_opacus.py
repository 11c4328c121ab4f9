"""Opacus as a third opinion: its own numbers, and a sentence wherever it cannot give any."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from murmuration.accounting.epsilon.accountant import AccountingError, Event
from murmuration.accounting.epsilon.gaussian import gaussian_epsilon
from murmuration.accounting.epsilon.opacus_check import opacus_epsilon

STEPS = [Event(1.0, 4.0, 3)]


def test_both_of_its_accountants_answer_for_the_events_that_were_asked() -> None:
    """At a rate of 1 three steps are one Gaussian, which RDP prices from above and Opacus' PRV to its own error."""
    found = opacus_epsilon(STEPS, 1e-5)
    exact = gaussian_epsilon(4.0 / math.sqrt(3), 1e-5)
    assert exact < found["opacus_rdp"] < 1.3 * exact
    assert found["opacus_prv"] == pytest.approx(exact, abs=0.02)
    assert isinstance(found["opacus"], str)


@pytest.mark.parametrize(
    ("package", "reason"),
    [("raise ImportError('no such wheel')", "no such wheel"), ("import os; os._exit(3)", "no message")],
)
def test_a_package_that_is_broken_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, reason: str
) -> None:
    (tmp_path / "opacus.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(AccountingError, match=rf"Opacus cannot be asked \(.*{reason}\); install it or drop"):
        opacus_epsilon(STEPS, 1e-5)


def test_what_one_of_its_accountants_refuses_stands_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "opacus").mkdir()
    (tmp_path / "opacus" / "__init__.py").write_text("__version__ = '0'\nprint('a word of its own')\n")
    (tmp_path / "opacus" / "accountants.py").write_text(
        "class RDPAccountant:\n    def get_epsilon(self, delta): return self.history[0][2] + delta\n"
        "class PRVAccountant:\n    def get_epsilon(self, delta): raise RuntimeError('too small')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert opacus_epsilon(STEPS, 0.25) == {
        "opacus_rdp": 3.25, "opacus_prv": "refused: RuntimeError: too small", "opacus": "0",
    }  # fmt: skip
