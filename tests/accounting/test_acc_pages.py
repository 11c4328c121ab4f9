"""What pages, picture and registry entry say is what the certificate says, with bounds rounded up."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any
from xml.etree import ElementTree

import pytest

from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.explain import (
    BARS,
    Attacks,
    explain,
    percent,
    strength,
    up_to_three,
)
from murmuration.accounting.certificate.limits import allowed
from murmuration.accounting.certificate.pages import (
    html_page,
    markdown,
    model_card,
    percent_of,
    registry_entry,
    trade_off_svg,
)
from murmuration.accounting.cli.epsilon import SAFE_SPREADS, _cap_note
from murmuration.accounting.cli.main import main
from murmuration.accounting.epsilon.accountant import epsilon, round_up
from murmuration.accounting.epsilon.trade_off import GRID, TradeOff, of_point
from murmuration.accounting.epsilon.tuning import Declared, Tuning
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.history import History
from murmuration.accounting.metrics import HeldOutAccuracy
from murmuration.accounting.unit import RECORD
from tests.support.acc_world import PLAN, begin, certified, document_of, reopen, train, whole_run

PROVED = [(alpha, of_point(1.0, 1e-6).power(alpha)) for alpha in GRID]
ATTACKS = Attacks.of_curve(of_point(1.0, 1e-6))
ALONE = [(alpha, of_point(2.0, 1e-6).power(alpha)) for alpha in GRID]


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    journal = whole_run(tmp_path)
    about = {"data": "Scans of one hospital", "owner": "Its data office"}
    return document_of(journal, {"about": about})


@pytest.mark.parametrize("share", [0.0, 1e-9, 0.5, 0.1234, 0.12341, 0.668499, 0.99991, 0.999999, 1.0])
def test_shares_that_are_limits_are_rounded_up(share: float) -> None:
    told = float(percent(share).removesuffix(" %"))
    assert 100 * share <= told + 1e-12 and told < 100 * share + 0.0100001 and told <= 100


@pytest.mark.parametrize("value", [1.234e-9, 0.0251, 0.5, 0.99951, 1.0, 2.001, 12.301, 999.2, 1_000_001.0])
def test_numbers_of_records_are_rounded_up(value: float) -> None:
    assert value * (1 - 1e-9) <= float(up_to_three(value)) <= value * 1.01


@pytest.mark.parametrize(
    ("curve", "delta", "n", "word"),
    [
        (of_point(0.0, 1e-6), 1e-6, None, "strong"),
        (of_point(1.0, 1e-6), 1e-6, 10_000, "strong"),
        (of_point(1.0, 1e-6), 1e-6, 10_000_000, "weak"),  # delta would permit to publish ten records
        (of_point(2.0, 1e-6), 1e-6, None, "moderate"),
        (of_point(8.0, 1e-6), 1e-6, None, "weak"),  # of one point nothing better is known
        (of_point(0.0, 0.5), 0.5, None, "weak"),
        (of_point(0.0, 0.5), 0.5, 60, "weak"),
    ],
)
def test_the_verdict_follows_the_curve_and_delta(curve: TradeOff, delta: float, n: int | None, word: str) -> None:
    attacks = Attacks.of_curve(curve)
    text = explain(1.0, delta, RECORD, attacks, n=n)
    assert strength(attacks, delta, n) == word and f"calls the promise {word}" in text
    if word in BARS:  # what the sentence says of the limits follows from them
        assert attacks.best_guess <= BARS[word].best_guess
        assert attacks.at_one_in_a_thousand <= BARS[word].at_one_in_a_thousand
    if n is not None:
        told = re.search(r"(\S+) of the ([\d,]+) on average", text)
        assert told is not None and float(told[1]) >= n * delta * (1 - 1e-9) and told[2] == f"{n:,}"


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ("--n 60 --batch 20 --steps 4 --sigma 20 --delta 0.5", "weak"),
        ("--n 60 --epsilon 8", "weak"),
        ("--n 60000 --batch 256 --steps 100 --sigma 8", "strong"),
    ],
)
def test_the_command_reads_its_verdict_off_the_curve(asked: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *asked.split()]) == 0
    said = capsys.readouterr().out
    assert f"calls the promise {word}" in said
    assert not any(each in said for each in ("nothing at all can be learned", "recover little", "almost as likely"))


@pytest.mark.parametrize("sigma", [0.5, 1.0, 5.0])
def test_the_sentence_about_every_probability_holds_for_the_mechanism(sigma: float) -> None:
    """A record moves a sum by 1: the sets that tell most are those beyond a threshold. Without the added delta, in a
    share of more than delta of the cases the factor is passed, so nothing may be said of shares of cases."""
    delta = 1e-5
    spent = epsilon([Event(1.0, sigma, 1)], delta)
    text = explain(round_up(spent), delta, RECORD, ATTACKS)
    told = re.search(r"at most (\S+) times its probability without, plus (\S+),", text)
    assert told is not None
    factor, more = float(told[1].replace(",", "").replace("10^", "1e")), float(told[2])
    beyond = NormalDist().cdf
    for place in range(-100, 101):
        at = place / 10
        with_it, without = beyond((1 - at) / sigma), beyond(-at / sigma)
        assert with_it <= factor * without + more and 1 - without <= factor * (1 - with_it) + more
    passed = 1 - beyond((sigma**2 * spent - 0.5) / sigma)  # of the losses with the record, those above epsilon
    assert passed > delta


def test_the_false_alarms_of_the_table_are_those_of_the_limits() -> None:
    assert [percent_of(share) for share in (1e-4, 1e-3, 0.01, 0.1)] == ["0.01 %", "0.1 %", "1 %", "10 %"]


def numbers(line: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = [pair.split(",") for pair in line.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in pairs]


def place(alpha: float, found: float) -> tuple[float, float]:
    """By the ticks of the axes, six decades wide and from 0 to 100 % high."""
    left, right, top, bottom = pages.LEFT, pages.WIDTH - pages.RIGHT, pages.TOP, pages.HEIGHT - pages.BOTTOM
    return (left + (right - left) * max(0.0, (math.log10(alpha) + 6) / 6), bottom - (bottom - top) * found)


def test_the_picture_draws_every_curve_where_its_numbers_are() -> None:
    drawn = ElementTree.fromstring(trade_off_svg(PROVED, ALONE))
    diagonal, alone, proved = (each for each in drawn.iter() if each.tag.endswith("polyline"))
    expected = [place(*point) for point in [*PROVED, (1.0, 1.0)]]
    assert numbers(proved) == [pytest.approx(point, abs=0.06) for point in expected]
    assert numbers(alone) == [pytest.approx(place(*point), abs=0.06) for point in ALONE]
    shares = [10.0 ** (-6 + step / 10) for step in range(61)]
    assert numbers(diagonal) == [pytest.approx(place(share, share), abs=0.06) for share in shares]
    circles = [
        (float(each.attrib["cx"]), float(each.attrib["cy"])) for each in drawn.iter() if each.tag.endswith("circle")
    ]
    assert circles == [pytest.approx(place(*point), abs=0.06) for point in PROVED if point[0] in (1e-3, 1e-2)]
    ticks = [float(each.attrib["x1"]) for each in drawn.iter() if "x1" in each.attrib]
    decades = [place(10.0**power, 0.0)[0] for power in range(-6, 1)]
    assert ticks[: len(decades)] == [pytest.approx(x, abs=0.06) for x in decades]


def test_pages_name_data_and_owner_and_held_out_records(document: dict[str, Any]) -> None:
    document["phases"][0]["plan"]["metrics"] = [asdict(HeldOutAccuracy.of(5.0, 0.125))]
    for page in (markdown(document), html_page(document)):
        assert page.count("Scans of one hospital") >= 3, "claim, NIST and registry"
        assert "held out in private: 12.500" in page
    del document["about"]
    for page in (markdown(document), html_page(document)):
        assert "Scans" not in page and page.count("not stated") >= 4


def test_the_registry_entry_promises_what_the_certificate_promises(document: dict[str, Any], tmp_path: Path) -> None:
    entry = registry_entry(document)["deployment"]
    assert entry["dp_flavor"]["name"] == "Approximate DP" and entry["dp_flavor"]["bound_on_input_distance"] == 1
    loss = entry["privacy_loss"]
    assert loss["privacy_parameters"]["epsilon"] == document["claim"]["epsilon_claimed"]
    assert loss["privacy_parameters"]["delta"] >= document["claim"]["delta"]
    assert loss["privacy_parameters_description"] == document["claim"]["statement"]
    tuning = "pre_processing_eda_hyperparameter_tuning"
    assert entry["implementation"][tuning] == "nothing was declared"
    twins = registry_entry(document | {"siblings": [{"id": "a", "run": "twin", "private": False}]})["deployment"]
    assert "runs without noise on the same records: twin" in twins["implementation"][tuning]
    assert "every checkpoint" in entry["model"]["release_type"]
    journal = begin(tmp_path / "debug", debug=True)
    journal.declare_tuning(Declared("rates by hand", Tuning(2, fixed=True)))
    train(journal, range(1, 3))
    without = registry_entry(document_of(journal))["deployment"]
    assert without["dp_flavor"]["name"] == "none" and "privacy_parameters" not in without["privacy_loss"]
    assert without["privacy_loss"]["privacy_parameters_description"].startswith("NOT PRIVATE")
    assert without["implementation"][tuning].startswith("rates by hand (charged")


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_is_not_private_leaves_an_attacker_every_power(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = begin(tmp_path, debug=True)
    train(journal, range(1, 3))
    journal.ledger.close()
    found = asked(capsys, "explain", str(tmp_path))
    powers = [found[name] for name in ("best_guess", "attack_power_at_1_percent", "attack_power_at_0.1_percent")]
    assert (found["private"], found["epsilon"], found["delta"], powers) == (False, None, None, [1.0] * 3)


def test_a_run_without_a_promise_states_no_limit_and_claims_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certified(whole_run(tmp_path / "kept"))
    journal = begin(tmp_path / "debug", replace(PLAN, steps=3), debug=True)
    train(journal, range(1, 4))
    journal.finish()
    certified(journal)
    limits = (
        "claimed at δ",
        "Limits on every attack",
        "A guess at even odds",
        "records of one person",
        "for a person with 2",
    )
    for name, promises in (("kept", True), ("debug", False)):
        page = (tmp_path / name / "certificate.md").read_text()
        assert [each in page for each in limits] == [promises] * len(limits), name
        main(["verify", str(tmp_path / name)])
        assert ("it claims ε = 0.1659 at δ = 0.001" in capsys.readouterr().out) == promises


def test_a_claim_stands_beside_the_delta_at_which_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    journal.declare_plan(1, "second", PLAN, {})
    journal.finish()
    certified(journal)
    main(["verify", str(tmp_path)])
    assert "it claims ε = 4 at δ = 0.002" in capsys.readouterr().out
    assert "ε = 4.0 claimed at δ = 0.002" in (tmp_path / "certificate.md").read_text()


@pytest.mark.parametrize("tuning", [Tuning(10, fixed=True), Tuning(10, 1.0)], ids=["fixed", "random"])
def test_a_run_that_was_chosen_is_explained_by_what_it_may_claim(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tuning: Tuning
) -> None:
    journal = begin(tmp_path)
    journal.declare_tuning(Declared("rates", tuning))
    train(journal, range(1, 41))
    journal.ledger.close()
    before = asked(capsys, "explain", str(tmp_path))
    assert before["epsilon"] >= tuning.epsilon(allowed(History.read(tmp_path / "ledger.jsonl")[0]), PLAN.delta)
    assert of_point(before["epsilon"], PLAN.delta).best_guess() >= before["best_guess"] > 0.8
    journal = reopen(tmp_path)
    journal.finish()
    document = certified(journal)
    claim = document["claim"]["epsilon_claimed"]
    assert ("accountant: PLD, and PLD or RDP for the choice" in model_card(document)) == (not tuning.fixed)
    assert before["epsilon"] >= asked(capsys, "explain", str(tmp_path))["epsilon"] == claim > 1.5


def test_the_plan_lists_ten_points_up_to_the_last_step_and_a_noise_for_each_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = asked(capsys, "plan", "--n", "1000", "--batch", "1000", "--steps", "40", "--epsilon", "2", "--sigma", "20")
    assert [row["steps"] for row in found["epsilon_over_steps"]] == list(range(4, 41, 4))
    assert [row["batch"] for row in found["sigma_over_batch"]] == [250.0, 500.0, 1000.0]
    for row in found["sigma_over_batch"]:
        assert row["noise_per_record"] == row["sigma"] / row["batch"]


@pytest.mark.parametrize(("n", "rate"), [(10_000, 0.5), (1_000_000, 0.01)])
def test_a_cap_is_called_harmless_from_eight_deviations_on(n: int, rate: float) -> None:
    least = math.ceil(n * rate + SAFE_SPREADS * math.sqrt(n * rate * (1 - rate)))
    assert "harmless" in _cap_note(n, rate, least) and f"a cap of {least} or more" in _cap_note(n, rate, least - 1)


def test_a_set_of_one_record_can_be_calibrated_and_an_empty_one_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    one = ("--batch", "1", "--steps", "1", "--epsilon", "1", "--delta", "1e-3")
    assert asked(capsys, "calibrate", "--n", "1", *one)["sigma"] > 0
    assert main(["calibrate", "--n", "0", *one]) == 2 and "must be at least 1" in capsys.readouterr().err
    assert main(["epsilon", "--n", "10", "--batch", "1", "--steps", "5", "--sigma", "0", "--sampling", "shuffled"]) == 2
    assert "noise multiplier" in capsys.readouterr().err
