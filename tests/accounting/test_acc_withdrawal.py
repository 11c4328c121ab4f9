"""What `account.py statement` says of withdrawn records is never below the truth, and follows from the ledger."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import brentq
from scipy.stats import binom, norm

from murmuration.accounting.certificate.signature import fault_of
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.certificate.withdrawal import EDPB, NIST, _not_covered
from murmuration.accounting.cli.main import main
from murmuration.accounting.epsilon.neighbours import group_curve, replacement_curve
from murmuration.accounting.event import Event
from murmuration.accounting.keys import RunKey, store
from murmuration.accounting.ledger.history import History
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import Poisson, RandomAllocation
from murmuration.accounting.unit import Unit, adjacency_in_words, unit_in_words
from tests.support.acc_world import KEY, PLAN, SIGNER, Change, begin, certified, to, train, whole_run

SAMPLED = replace(PLAN, sampling=Poisson(2**29), noise_multiplier=1.0)
PATIENT = Unit("patient_id")
PATIENTS = replace(PLAN, units=PATIENT, unit=unit_in_words(PATIENT), adjacency=adjacency_in_words(PATIENT))


def stated(folder: Path, *arguments: str, plan: PrivacyPlan = PLAN, steps: int = 1) -> dict[str, Any]:
    certified(whole_run(folder, steps, plan))
    assert main(["statement", str(folder), *arguments]) == 0
    (path,) = folder.glob("statement-*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("records", [1, 3, 40])
@pytest.mark.parametrize("steps", [1, 25])
def test_without_sampling_it_is_one_gaussian(tmp_path: Path, records: int, steps: int) -> None:
    bound = stated(tmp_path, "--records", str(records), steps=steps)["bound"]
    mu = records * math.sqrt(steps) / PLAN.noise_multiplier

    def excess(epsilon: float) -> float:
        first, second = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        return norm.cdf(first) - math.exp(epsilon + norm.logcdf(second)) - PLAN.delta

    assert bound["epsilon"] == pytest.approx(brentq(excess, 0, 200), rel=1e-3)
    for point, alpha in zip(bound["true_positives"], (0.001, 0.01), strict=True):
        truth = norm.sf(norm.isf(alpha) - mu)
        assert point["false_alarms"] == alpha and truth <= point["at_most"] <= truth + 1e-9
    truth = 2 * norm.cdf(mu / 2) - 1
    assert truth <= bound["advantage"] <= truth + 1e-9 and bound["best_guess"] == 0.5 + bound["advantage"] / 2


@pytest.mark.parametrize("records", [2, 10, 60])
def test_of_one_sampled_step_no_test_finds_more(tmp_path: Path, records: int) -> None:
    """The likelihood ratio grows with the output, so the best test is a threshold on it."""
    bound = stated(tmp_path, "--records", str(records), plan=SAMPLED)["bound"]
    drawn = np.arange(records + 1)
    shares = binom.pmf(drawn, records, SAMPLED.sampling_rate)
    for point in bound["true_positives"]:
        truth = float(shares @ norm.sf(norm.isf(point["false_alarms"]) - drawn))
        assert truth <= point["at_most"] <= 1.02 * truth
    places = np.linspace(-10, records + 10, 40_001)
    truth = float((shares @ norm.sf(places - drawn[:, None]) - norm.sf(places)).max())
    assert truth <= bound["advantage"] <= 1.2 * truth  # at epsilon = 0 the accountant's delta is this loose


@pytest.mark.parametrize(("rate", "sigma", "steps", "records"), [(0.05, 0.8, 20, 2), (0.01, 0.7, 50, 3)])
def test_the_curve_of_a_group_lies_between_dp_accountings_bounds(
    rate: float, sigma: float, steps: int, records: int
) -> None:
    curve = group_curve([Event(rate, sigma, steps)], 1e-5, records)
    below, above = (
        pld.from_mixture_gaussian_mechanism(
            sigma, np.arange(records + 1.0), binom.pmf(np.arange(records + 1), records, rate),
            pessimistic_estimate=pessimistic, value_discretization_interval=5e-3,
        ).self_compose(steps)
        for pessimistic in (False, True)
    )  # fmt: skip
    for epsilon, delta in list(zip(curve.epsilons, curve.deltas, strict=True))[:-1:12]:
        assert below.get_delta_for_epsilon(epsilon) <= delta <= 1.2 * above.get_delta_for_epsilon(epsilon)


def test_an_exchanged_record_moves_twice_as_far_without_sampling() -> None:
    exchanged = replacement_curve([Event(1.0, 5.0, 1)], 1e-5)
    assert exchanged.power(0.01) == pytest.approx(norm.sf(norm.isf(0.01) - 2 / 5), abs=1e-9)
    sampled = replacement_curve([Event(0.1, 1.0, 1)], 1e-5)

    def share(place: float, moved: int) -> float:
        return 0.9 * norm.sf(place) + 0.1 * norm.sf(place - moved)

    place = brentq(lambda each: share(each, -1) - 0.01, 0, 5)
    assert share(place, 1) <= sampled.power(0.01) <= 1.02 * share(place, 1)


def test_every_number_in_words_is_one_of_the_bound_rounded_up(tmp_path: Path) -> None:
    found = stated(tmp_path, "--records", "3", plan=SAMPLED, steps=4)
    bound, page = found["bound"], (tmp_path / "statement-3-records.html").read_text()
    assert f"at most {math.ceil(math.exp(bound['epsilon'])):,} in either direction" in found["statement"]
    low, high = (math.ceil(1e4 * point["at_most"]) / 100 for point in bound["true_positives"])
    for number in (low, high, math.ceil(1e4 * bound["advantage"]) / 100):
        assert f"<td>{number:g} %</td>" in page
    assert f"{low:g} % at 0.1 %, {high:g} % at 1 %" in json.dumps(found["answers"][EDPB], ensure_ascii=False)
    assert ["Neighbouring data sets", json.loads((tmp_path / "certificate.json").read_text())["adjacency"]] in found[
        "answers"
    ][NIST]
    assert "script>" not in page and "Not signed" in page


def test_one_record_has_the_numbers_of_the_certificate(tmp_path: Path) -> None:
    bound = stated(tmp_path, "--records", "1", plan=SAMPLED, steps=4)["bound"]
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    limits = {p["false_alarms"]: p["at_most"] for p in certificate["limits"]["true_positives"]}
    assert {p["false_alarms"]: p["at_most"] for p in bound["true_positives"]}.items() <= limits.items()
    assert bound["epsilon"] == certificate["claim"]["epsilon_claimed"]
    assert bound["best_guess"] == certificate["limits"]["best_guess"]
    told = json.loads((tmp_path / "statement-1-records.json").read_text())
    assert "1 records" not in json.dumps(told) and "one record" in json.dumps(told["answers"])
    assert any("is exchanged for another one: that has ε = " in each for each in told["not_covered"])


def test_of_a_unit_records_are_exchanged_and_units_are_counted(tmp_path: Path) -> None:
    certificate = certified(whole_run(tmp_path, 3, PATIENTS))
    told = {}
    for arguments in (("7",), ("1", "--unit"), ("2", "--unit")):
        assert main(["statement", str(tmp_path), "--records", *arguments]) == 0
        name = f"statement-{arguments[0]}-{'units' if '--unit' in arguments else 'records'}.json"
        told[arguments] = json.loads((tmp_path / name).read_text())
    limits = certificate["limits"]
    assert told["7",]["bound"]["epsilon"] == pytest.approx(limits["replacement"]["epsilon"], rel=1e-9)
    assert told["1", "--unit"]["bound"]["epsilon"] == certificate["claim"]["epsilon_claimed"]
    assert told["2", "--unit"]["bound"]["epsilon"] == pytest.approx(limits["groups"][0]["epsilon"], rel=1e-9)
    assert "7 records of one person that belong to one unit" in told["7",]["statement"]
    # Records of a unit have the bound of an exchanged unit already.
    exchanged = {key: any("is exchanged for another one" in each for each in found["not_covered"])
                 for key, found in told.items()}  # fmt: skip
    assert exchanged == {("7",): False, ("1", "--unit"): True, ("2", "--unit"): True}


def test_other_runs_on_the_same_records_are_named(tmp_path: Path) -> None:
    certificate = certified(whole_run(tmp_path))
    told = _not_covered(certificate | {"siblings": [{"run": "first", "epsilon": 1.0}, "second"]}, "record", 1, False)
    assert any(each.startswith("Other runs on the same records: first, second were known") for each in told)
    added = {"composition": {"epsilon_sum": 9.0, "delta_sum": 3.0001e-5}, "siblings": [{"run": "first"}]}
    told = _not_covered(certificate | added, "record", 1, False)
    assert any("they have ε = 9.0, δ = 3.01e-05 for one record, the sums of all claims" in each for each in told)


def test_an_epsilon_above_a_hundred_is_not_rounded_down(tmp_path: Path) -> None:
    told = stated(tmp_path, "--records", "100", steps=40)
    shown = re.search(r"e\^ε, ε = ([\d.]+)\)", told["statement"])
    assert shown and 100 < told["bound"]["epsilon"] <= float(shown[1]) <= told["bound"]["epsilon"] + 1e-4


def late(folder: Path) -> None:
    """A plan is declared after private steps had run: one (ε, δ) is proved."""
    journal = begin(folder)
    train(journal, range(1, 41))
    journal.declare_plan(1, "second", replace(PLAN, steps=1), {})
    journal.finish()
    certified(journal)


@pytest.mark.parametrize(
    ("plan", "arguments", "why"),
    [
        (PLAN, "--records 2 --unit", "knows no units; leave --unit out"),
        (PLAN, "--records 0", "give 1 to 100, of 100 records"),
        (PLAN, "--records 101", "give 1 to 100, of 100 records"),
        (replace(PLAN, records=10**4, delta=1e-5), "--records 1001", "give 1 to 1000"),
        (replace(PLAN, sampling=RandomAllocation(2), steps=4), "--records 2", "nothing is proved"),
    ],
)
def test_what_cannot_be_said_is_refused_in_a_sentence(
    tmp_path: Path, plan: PrivacyPlan, arguments: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    certified(whole_run(tmp_path, 4, plan))
    assert main(["statement", str(tmp_path), *arguments.split()]) == 2
    assert why in capsys.readouterr().err and not list(tmp_path.glob("statement-*"))


def test_runs_that_promise_nothing_or_do_not_verify_get_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(name: str) -> tuple[int, str]:
        code = main(["statement", str(tmp_path / name), "--records", "1"])
        return code, capsys.readouterr().err

    whole_run(tmp_path / "unfinished").ledger.close()
    assert refused("unfinished") == (2, f"error: {tmp_path / 'unfinished'} has no certificate yet; statements are made "
                                     "of runs that have ended\n")  # fmt: skip
    journal = begin(tmp_path / "debug", debug=True)
    train(journal, range(1, 41))
    journal.finish()
    certified(journal)
    code, told = refused("debug")
    assert code == 2 and "so nothing limits" in told
    certified(whole_run(tmp_path / "forged"))
    ledger = tmp_path / "forged" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"records":100', b'"records":101', 1))
    code, told = refused("forged")
    assert code == 5 and told.count("\n") == 1


FORGED: dict[str, Change] = {
    "epsilon": to({"bound.epsilon": 0.01}),
    "epsilon as a word": to({"bound.epsilon": "0.2"}),
    "a number more": to({"bound.epsilon_of_two": 0.1}),
    "found": to({"bound.true_positives.0.at_most": 0.001}),
    "advantage": to({"bound.advantage": 0.0}),
    "steps": to({"bound.holds_for": "all"}),
    "records": to({"withdrawn.records": 30}),
    "many records": to({"withdrawn.records": 10**9}),
    "no records": lambda document: document.pop("withdrawn"),
    "words": to({"statement": "Nothing can be found."}),
    "not covered": lambda document: document["not_covered"].pop(),
    "answers": lambda document: document["answers"][EDPB].pop(),
    "more": to({"note": "anonymous"}),
    "format": to({"format": "murmuration-statement/2"}),
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest")
    stated(folder, "--records", "3", plan=SAMPLED, steps=4)
    return folder


@pytest.mark.parametrize("what", FORGED)
def test_verify_finds_a_forged_statement(honest: Path, tmp_path: Path, what: str) -> None:
    for path in honest.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert "statement-3-records.json follows from ledger and certificate" in verify(tmp_path).attached.checked
    statement = tmp_path / "statement-3-records.json"
    document = json.loads(statement.read_text())
    FORGED[what](document)
    statement.write_text(json.dumps(document))
    with pytest.raises(CertificateError, match=r"statement-3-records\.json does not follow .* make it again"):
        verify(tmp_path)


def test_verify_finds_a_renamed_one_and_an_altered_page(honest: Path, tmp_path: Path) -> None:
    for path in honest.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    page = tmp_path / "statement-3-records.html"
    page.write_text(page.read_text().replace("at most", "surely"))
    assert any("believe statement-3-records.json alone" in each for each in verify(tmp_path).attached.unchecked)
    (tmp_path / "statement-3-records.json").rename(tmp_path / "statement-1-records.json")
    with pytest.raises(CertificateError, match="its words are others"):
        verify(tmp_path)


def test_it_is_signed_by_the_runs_own_key_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, own, other = tmp_path / "run", tmp_path / "own" / "run.key", tmp_path / "other" / "run.key"
    certified(whole_run(run))
    store(KEY, own)
    store(RunKey(bytes(32)), other)
    assert main(["statement", str(run), "--records", "2", "--key", str(other)]) == 2
    assert "is not the key of this run" in capsys.readouterr().err
    assert main(["statement", str(run), "--records", "2", "--key", str(own)]) == 0
    path = run / "statement-2-records.json"
    document = json.loads(path.read_text())
    assert fault_of(document, SIGNER) is None and SIGNER in (run / "statement-2-records.html").read_text()
    verify(run)
    path.write_text(json.dumps({**document, "signature": {**document["signature"], "value": "00" * 64}}))
    with pytest.raises(CertificateError, match="was changed after it was signed"):
        verify(run)


def test_where_one_point_is_proved_one_record_has_that_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late(tmp_path)
    assert History.read(tmp_path / "ledger.jsonl")[0].late_plans
    assert main(["statement", str(tmp_path), "--records", "1"]) == 0
    assert main(["statement", str(tmp_path), "--records", "2"]) == 2
    assert "nothing but the (ε, δ) of the claim is proved" in capsys.readouterr().err
