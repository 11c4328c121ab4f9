"""What a study says that its runs cost the records together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from murmuration.accounting.certificate.signature import public_key
from murmuration.accounting.plan import StandIn
from murmuration.evaluation.study.outcome import cost_in_words, cost_of
from tests.support.acc_world import DATA, KEY, PLAN, begin, reopen, train, whole_run


def whole(folder: Path) -> Path:
    whole_run(folder, PLAN.steps).ledger.close()
    return folder


def test_a_run_counts_with_its_claim_whichever_comes_first(tmp_path: Path) -> None:
    """One that was ended early claims its budget, however little it has charged."""
    one, early = whole(tmp_path / "whole"), tmp_path / "early"
    journal = begin(early)
    train(journal, range(1, 4))
    journal.finish()
    journal.ledger.close()
    cost = cost_of([early, one])
    assert cost is not None and cost == cost_of([one, early]) and cost["runs"] == 2
    assert cost["epsilon_sum"] == pytest.approx(2 * PLAN.epsilon_budget)


def test_no_number_is_given_where_one_run_keeps_no_promise(tmp_path: Path) -> None:
    one, simulated = whole(tmp_path / "whole"), tmp_path / "simulated"
    whole_run(simulated, PLAN.steps, replace(PLAN, stands_for=StandIn(1.0, 4.0))).ledger.close()
    for folders in ([one, simulated], [simulated, one], [simulated]):
        cost = cost_of(folders)
        assert cost is not None and cost["epsilon_sum"] is None and "is not known" in cost_in_words(cost)


@pytest.mark.parametrize("public", [True, False])
def test_runs_without_noise_on_private_records_are_named_beside_the_cost(tmp_path: Path, public: bool) -> None:
    journal = reopen(tmp_path / "bare")
    journal.start_run("bare", KEY.check_value(), False, {}, "hmac-sha256", public_key(KEY))
    journal.declare_nonprivate(0, "bare", public, DATA)
    journal.ledger.close()
    cost = cost_of([whole(tmp_path / "whole"), tmp_path / "bare"])
    assert ("1 more trained without noise" in cost_in_words(cost)) == (not public)
    assert cost_of([tmp_path / "bare"]) is None
