"""A promise about units of several records: in plan, ledger, certificate and pages, and never about anything else."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from murmuration.accounting.certificate.composition import composed, known_runs
from murmuration.accounting.certificate.pages import html_page, markdown, model_card, registry_entry
from murmuration.accounting.certificate.provenance import Provenance
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.cli.main import main
from murmuration.accounting.epsilon.accountant import describe
from murmuration.accounting.epsilon.tuning import Declared, Tuning
from murmuration.accounting.errors import PlanError
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.lines import Origin
from murmuration.accounting.metrics import HeldOutAccuracy
from murmuration.accounting.plan import ADJACENCY, UNIT, PrivacyPlan
from murmuration.accounting.sampling import Poisson
from murmuration.accounting.strict_json import read
from murmuration.accounting.unit import Unit, adjacency_in_words, contribution_in_words, unit_in_words
from tests.support.acc_world import KEY, PLAN, begin, certified, document_of, on, rewritten, to, train, whole_run

PATIENTS = Unit("patient_id", 4, "mean", "table")


def of_units(units: Unit = PATIENTS, **changes: Any) -> PrivacyPlan:
    told = dict(units=units, unit=unit_in_words(units), adjacency=adjacency_in_words(units))
    return replace(PLAN, **(told | changes))


def test_ledger_certificate_and_pages_name_the_unit(tmp_path: Path) -> None:
    document = certified(whole_run(tmp_path, plan=of_units()))
    assert (
        "differential privacy for one unit (all records that have the same 'patient_id'; a record without one"
        in (document["claim"]["statement"])
    )
    assert document["adjacency"] == "zero-out: one unit is replaced by a unit that is drawn alike and contributes " \
        "exactly zero"  # fmt: skip
    assert document["phases"][0]["plan"]["units"] == {"by": "patient_id", "rows": 4, "reduce": "mean", "table": "table"}
    assert [row["units"] for row in document["limits"]["groups"]] == [2, 5, 10]
    assert verify(tmp_path).certified == document["claim"]["epsilon"]
    (origin,) = Provenance.of(History.read(tmp_path / "ledger.jsonl")[0]).origins
    assert origin.unit == document["unit"], "later runs on the weights know whose they are"
    for page in (markdown(document), html_page(document).partition("<script")[0]):
        assert "the mean over at most 4 of its records" in page and "10 units of one person" in page
        assert "units.rows" not in page and "records of one person" not in page and "this one record" not in page
    assert 'unit: "one unit (all records' in model_card(document)
    loss = registry_entry(document)["deployment"]["privacy_loss"]
    assert loss["privacy_unit"] == "User-level" and "patient_id" in loss["privacy_unit_description"]


def test_weights_carry_the_whole_claim_of_their_run(tmp_path: Path) -> None:
    chosen, late = begin(tmp_path / "chosen"), begin(tmp_path / "late")
    chosen.declare_tuning(Declared("rates", Tuning(20, fixed=True)))
    train(chosen, range(1, 41))
    train(late, range(1, 3))
    late.declare_plan(1, "second", PLAN, {})
    for journal in (chosen, late):
        journal.finish()
        claim = certified(journal)["claim"]
        (origin,) = Provenance.of(History.read(journal.ledger.path)[0]).origins
        assert (origin.epsilon, origin.delta) == (claim["epsilon_claimed"], claim.get("delta_claimed", PLAN.delta))
        assert origin.epsilon > PLAN.epsilon_budget


def test_what_names_no_unit_is_about_records_to_the_letter(tmp_path: Path) -> None:
    document = certified(whole_run(tmp_path))
    line = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[1])
    assert "units" not in line["plan"] and line["plan"]["unit"] == UNIT == document["unit"]
    assert document["adjacency"] == ADJACENCY and "unit: one record" in model_card(document)
    assert UNIT == "one record (what the data set has as one: an image, an image with its caption, a text, a row)"
    assert "per-record gradients" in document["mechanism"] and "10 records of one person" in markdown(document)


OTHERS: list[dict[str, Any]] = [
    {"unit": unit_in_words(Unit("person"))}, {"unit": UNIT}, {"adjacency": ADJACENCY}, {"mechanism": "per-record"},
    {"claim.statement": "(2, 1e-3)-differential privacy for one patient"},
    {"limits.groups": [{"records": 2, "epsilon": 0.1}]},
]  # fmt: skip


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_a_certificate_that_names_another_unit_than_the_ledger_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    forged = copy.deepcopy(certified(whole_run(tmp_path, plan=of_units())))
    to(change)(forged)
    (tmp_path / "certificate.json").write_text(json.dumps(signed(forged, KEY)))
    with pytest.raises(CertificateError):
        verify(tmp_path)


def test_a_ledger_whose_words_and_units_differ_is_refused(tmp_path: Path) -> None:
    certified(whole_run(tmp_path))
    rewritten(tmp_path, on("plan", {"plan.units": asdict(PATIENTS)}))
    with pytest.raises(LedgerError, match="promises something for 'one record"):
        verify(tmp_path)


@pytest.mark.parametrize("change", [{"by": "person"}, {"rows": 5}, {"reduce": "sum"}, {"table": "other"}], ids=str)
def test_a_frozen_plan_keeps_its_units(tmp_path: Path, change: dict[str, Any]) -> None:
    journal = begin(tmp_path, of_units())
    with pytest.raises(LedgerError, match=r"is frozen in the ledger, but .*units.* changed"):
        journal.declare_plan(0, "private", of_units(replace(PATIENTS, **change)), describe("pld"))


def test_phases_with_different_units_are_refused(tmp_path: Path) -> None:
    journal = begin(tmp_path, of_units())
    journal.declare_plan(1, "same", of_units(Unit("patient_id", 1, "sum", "another table")), describe("pld"))
    for other in (PLAN, of_units(Unit("person"))):
        with pytest.raises(LedgerError, match="no one claim"):
            journal.declare_plan(2, "other", other, describe("pld"))
    assert History.read(tmp_path / "ledger.jsonl")[0].plans.keys() == {0, 1}, "nothing of it was written"


def test_units_and_single_records_held_out_do_not_go_together() -> None:
    with pytest.raises(PlanError, match="the latter measures single records"):
        of_units(metrics=(HeldOutAccuracy.of(5.0, 0.1),))


def test_epsilon_of_a_run_that_protects_patients_by_dp_accounting_alone(tmp_path: Path) -> None:
    """From the numbers in the certificate's JSON, without any code of ours."""
    plan = of_units(records=400, sampling=Poisson(2**32 // 40), noise_multiplier=0.8, epsilon_budget=20.0)
    document = json.loads(json.dumps(certified(whole_run(tmp_path, plan=plan))))
    stated = document["phases"][0]["plan"]
    sampled = dp_accounting.PoissonSampledDpEvent(
        stated["sampling"]["threshold"] / 2**32, dp_accounting.GaussianDpEvent(stated["noise_multiplier"])
    )
    theirs = PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4
    ).compose(dp_accounting.SelfComposedDpEvent(sampled, stated["steps"])).get_epsilon(stated["delta"])  # fmt: skip
    assert document["claim"]["epsilon"] == pytest.approx(theirs, rel=2e-3)
    assert document["claim"]["epsilon"] <= document["claim"]["epsilon_claimed"]


def test_runs_that_protect_different_units_are_not_added_up(tmp_path: Path) -> None:
    for name, plan in (("patients", of_units()), ("others", of_units(Unit("patient_id", 1, "sum", "part"))),
                       ("records", PLAN)):  # fmt: skip
        whole_run(tmp_path / name, plan=plan).ledger.close()

    def logged(name: str, **more: Any) -> dict[str, Any]:
        run = History.read(tmp_path / name / "ledger.jsonl")[0].run_id
        return {"id": run, "run": name, "epsilon_budget": 2.0, "delta": 1e-3, "folder": str(tmp_path / name), **more}

    history, entries = History.read(tmp_path / "patients" / "ledger.jsonl")
    found = composed(history, entries, 1.0, known_runs([logged("others")]))
    assert found["epsilon_sum"] == 3.0
    for other in (logged("records"), logged("others") | {"folder": "gone", "unit": UNIT},
                  logged("others") | {"folder": "gone"}):  # fmt: skip
        found = composed(history, entries, 1.0, known_runs([other]))
        assert found["epsilon_sum"] is None and "something else" in found["because"]
    told = logged("others") | {"folder": "gone", "unit": unit_in_words(PATIENTS)}
    assert composed(history, entries, 1.0, known_runs([told]))["epsilon_sum"] == 3.0
    history, entries = History.read(tmp_path / "records" / "ledger.jsonl")
    assert composed(history, entries, 1.0, known_runs([logged("patients")]))["epsilon_sum"] is None


def test_records_per_person_are_asked_of_runs_that_protect_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certified(whole_run(tmp_path / "patients", plan=of_units()))
    certified(whole_run(tmp_path / "records"))
    assert main(["explain", str(tmp_path / "records"), "--records-per-person", "3"]) == 0
    assert "For a person with 3 records" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "patients")]) == 0
    assert (
        "The promise protects one unit (all records that have the same 'patient_id'; a record without one"
        in capsys.readouterr().out
    )
    assert main(["explain", str(tmp_path / "patients"), "--records-per-person", "3"]) == 2
    assert "however many records that has" in capsys.readouterr().err


@pytest.mark.parametrize("theirs", [None, unit_in_words(PATIENTS)])
@pytest.mark.parametrize("plan", [PLAN, of_units()], ids=["record", "patient"])
def test_a_warm_start_says_what_it_cannot_add(tmp_path: Path, plan: PrivacyPlan, theirs: str | None) -> None:
    origin = Origin("before", "f" * 64, 1.0, 1e-6, ("d" * 64,), theirs)
    assert ("unit" in origin.as_dict()) == (theirs is not None) and read(Origin, origin.as_dict()) == origin
    journal = begin(tmp_path, plan)
    assert journal.declare_origin(origin)
    told = document_of(journal)["known_deviations"][-1]
    alike = (theirs or UNIT) == plan.unit
    assert ("no more than the sum of both" in told) == alike
    assert (f"nothing by both together, since this run protects {plan.unit}" in told) == (not alike)


def test_what_a_unit_adds_is_one_record_or_the_mean_or_sum_of_several() -> None:
    assert contribution_in_words(Unit("patient", rows=1)) == "one of its records, chosen anew by key at each step"
    for reduce in ("mean", "sum"):
        told = contribution_in_words(Unit("patient", rows=2, reduce=reduce))
        assert told == f"the {reduce} over at most 2 of its records, chosen anew by key at each step"
