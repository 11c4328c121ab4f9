"""What several runs on the same records cost together: as one accountant gives it, and as their claims add up."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from murmuration.accounting.certificate.composition import SUMS, composed, known_runs, total
from murmuration.accounting.certificate.pages import write
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.statement import compose
from murmuration.accounting.certificate.verify import CertificateError, _check_composition, verify
from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.epsilon.tuning import Declared, Tuning
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.history import History
from tests.support.acc_world import CONFIG, DATA, KEY, PLAN, begin, reopen, train, whole_run


def logged(folder: Path, epsilon: float | None = PLAN.epsilon_budget, **more: Any) -> dict[str, Any]:
    run_id = History.read(folder / "ledger.jsonl")[0].run_id
    return {"id": run_id, "run": folder.name, "phase": "private", "epsilon_budget": epsilon, "delta": PLAN.delta,
            "folder": str(folder), **more}  # fmt: skip


def finished(folder: Path, sigma: float, steps: int) -> Path:
    whole_run(folder, steps, replace(PLAN, noise_multiplier=sigma)).ledger.close()
    return folder


def of(folder: Path, *others: dict[str, Any]) -> dict[str, Any]:
    history, entries = History.read(folder / "ledger.jsonl")
    return composed(history, entries, history.epsilon(), known_runs(others))


def test_ledgers_at_hand_are_composed_and_claims_are_added(tmp_path: Path) -> None:
    one, two = finished(tmp_path / "one", 20.0, 30), finished(tmp_path / "two", 25.0, 10)
    gone = logged(two, 3.0) | {"folder": str(tmp_path / "nowhere"), "id": "gone"}
    found = of(one, logged(two), gone)
    both = epsilon([Event(1.0, 20.0, 30), Event(1.0, 25.0, 10)], PLAN.delta)
    assert found["epsilon_together"] == pytest.approx(both + 3.0, abs=1e-12)
    alone = epsilon([Event(1.0, 20.0, 30)], PLAN.delta)
    assert alone < both < alone + PLAN.epsilon_budget
    assert found["epsilon_sum"] == pytest.approx(alone + PLAN.epsilon_budget + 3.0)
    assert found["delta_sum"] == pytest.approx(3 * PLAN.delta) and found["delta_together"] == 2 * PLAN.delta
    assert [run["by"] for run in found["runs"]] == ["ledger", "ledger", "claim"]
    again = total(json.loads(json.dumps(found["runs"])), found["events"], found["delta"])
    assert again == found, "a reader can do the same from what is stated"


def test_the_phases_of_a_run_without_a_ledger_add_up_in_delta_too(tmp_path: Path) -> None:
    """Only the ledger tells whether one of them was planned by the outputs of another."""
    gone = logged(finished(tmp_path / "one", 20.0, 30)) | {"folder": str(tmp_path / "nowhere"), "id": "gone"}
    (run,) = known_runs([gone | {"phase": "first"}, gone | {"phase": "second"}])
    assert (run.epsilon, run.delta) == (2 * PLAN.epsilon_budget, 2 * PLAN.delta)


def test_a_fork_counts_what_both_share_once(tmp_path: Path) -> None:
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    journal = begin(trunk)
    train(journal, range(1, 11))
    journal.checkpointed(0, 10, "ten")
    journal.ledger.close()
    shutil.copytree(trunk, branch)
    for folder, last in ((trunk, 40), (branch, 25)):
        journal = reopen(folder)
        if folder is branch:
            journal.note_copied("a copy")
            journal.begin_segment(0, CONFIG, DATA, 10, "a copy")
        train(journal, range(11, last + 1))
        journal.finish()
        journal.ledger.close()
    for here, there in ((trunk, branch), (branch, trunk)):
        found = of(here, logged(there))
        # The branch claims its budget, so all that it would have allowed: of these steps 10 are the trunk's.
        count = 40 + allowed() - 10
        assert found["events"] == [{"rate": 1.0, "sigma": PLAN.noise_multiplier, "count": count}]
        assert found["epsilon_together"] == epsilon([Event(1.0, PLAN.noise_multiplier, count)], PLAN.delta)


def allowed(sigma: float = PLAN.noise_multiplier) -> int:
    """The first number of steps that passes the budget, or up to 0.2 % more."""
    exact = next(n for n in range(1, 10**6) if epsilon([Event(1.0, sigma, n)], PLAN.delta) > PLAN.epsilon_budget)
    assert exact < 500, "so that 0.2 % are no step"
    return exact


def test_a_run_that_may_go_on_counts_as_far_as_its_budget_leads(tmp_path: Path) -> None:
    one = finished(tmp_path / "one", 20.0, 5)
    other = tmp_path / "other"
    journal = begin(other, replace(PLAN, noise_multiplier=30.0))
    train(journal, range(1, 3), replace(PLAN, noise_multiplier=30.0))
    journal.ledger.close()
    assert {"rate": 1.0, "sigma": 30.0, "count": allowed(30.0)} in of(one, logged(other))["events"]


def claims_of(folder: Path) -> float:
    history, entries = History.read(folder / "ledger.jsonl")
    return compose(history, entries, {})["claim"]["epsilon_claimed"]


def chosen(folder: Path, tuning: Tuning | None, steps: int) -> Path:
    journal = begin(folder)
    if tuning is not None:
        journal.declare_tuning(Declared("several rates", tuning))
    train(journal, range(1, steps + 1))
    journal.finish()
    journal.ledger.close()
    return folder


@pytest.mark.parametrize(
    "tuning, steps", [(None, 3), (Tuning(5, fixed=True), PLAN.steps), (Tuning(2.0, 1.0), PLAN.steps)],
    ids=["ended early", "fixed number of runs", "drawn number of runs"],
)  # fmt: skip
def test_no_composition_is_less_than_what_one_of_its_runs_claims(
    tmp_path: Path, tuning: Tuning | None, steps: int
) -> None:
    """A run that was stopped or chosen by outputs claims more than its steps; so do all runs together."""
    one, other = chosen(tmp_path / "one", tuning, steps), finished(tmp_path / "other", 20.0, 1)
    claimed = claims_of(one)
    history, entries = History.read(one / "ledger.jsonl")
    own = composed(history, entries, claimed, known_runs([logged(other)]))
    theirs = of(other, logged(one))
    for found in (own, theirs):
        assert min(found["epsilon_together"], found["epsilon_sum"]) > claimed - 1e-4, "which is rounded up"
    document = compose(history, entries, {"siblings": [], "composition": own})
    write(signed(document, KEY), one)
    assert verify(one).claimed == claimed
    document["composition"] = own | {"runs": [run for run in own["runs"] if run["id"] != history.run_id]}
    write(signed(document, KEY), one)
    with pytest.raises(CertificateError, match="leaves this run out"):
        verify(one)
    for name in SUMS:
        with pytest.raises(CertificateError, match=rf"says composition\.{name} = .*, but its own events give"):
            _check_composition({"composition": own | {name: 0.99 * own[name]}}, history, claimed)
    document["composition"] = own | {"events": []}
    document["composition"] |= total(own["runs"], [], PLAN.delta)
    write(signed(document, KEY), one)
    if own["events"] and own["runs"][0]["by"] == "ledger":
        with pytest.raises(CertificateError, match="leaves out steps of this run"):
            verify(one)


def test_a_run_without_noise_leaves_no_number(tmp_path: Path) -> None:
    one = finished(tmp_path / "one", 20.0, 5)
    twin = {"id": "twin", "run": "its twin", "phase": "private", "private": False, "epsilon_budget": None}
    found = of(one, twin)
    assert found["epsilon_sum"] is None and "its twin trained on these records without" in found["because"]
    json.dumps(found, allow_nan=False)
    debug = tmp_path / "debug"
    begin(debug, debug=True).ledger.close()
    assert of(one, logged(debug))["epsilon_sum"] is None, "a run that is NOT PRIVATE promises nothing to add"
