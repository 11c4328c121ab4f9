"""What a certificate says beside its epsilon: it follows from the ledger, and no row is better than the headline."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.limits import BUDGET, DELTAS, GROUPS, SPENT, claimed_events, curve_of
from murmuration.accounting.certificate.pages import html_page, html_sections, markdown, model_card, registry_entry
from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.cli.main import main
from murmuration.accounting.epsilon import trade_off
from murmuration.accounting.epsilon.accountant import epsilon, gaussian_epsilon
from murmuration.accounting.epsilon.neighbours import group_epsilon
from murmuration.accounting.epsilon.tuning import Declared, Tuning
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.journal import Journal
from murmuration.accounting.plan import PrivacyPlan
from murmuration.accounting.sampling import Poisson, threshold_for
from tests.support.acc_world import CONFIG, DATA, PLAN, begin, document_of, train

# As the demo has them: q = 0.05, 50 steps, epsilon 8 at 1/(2n).
DEMO = PrivacyPlan(
    records=20_000, sampling=Poisson(threshold_for(20_000, 1000)), clip_norm=1.0, noise_multiplier=0.60742, steps=50,
    delta=2.5e-5, epsilon_budget=8.0,
)  # fmt: skip
ABOUT = {"about": {"data": "Drawn shapes with captions", "owner": "Office of the owner"}, "model": "captioner, custom"}


def demo(folder: Path, steps: int = 50) -> tuple[Journal, dict]:
    journal = begin(folder, DEMO)
    train(journal, range(1, steps + 1), DEMO)
    journal.finish()
    document = document_of(journal, ABOUT)
    pages.write(document, folder)
    return journal, document


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("demo")
    journal, document = demo(folder)
    journal.ledger.close()
    return folder, document


def test_the_demo_promises_what_its_losses_prove(finished: tuple[Path, dict]) -> None:
    folder, document = finished
    limits = document["limits"]
    found = {point["false_alarms"]: point["at_most"] for point in limits["true_positives"]}
    assert limits["best_guess"] == pytest.approx(0.6685, abs=1e-3) and found[0.01] == pytest.approx(0.1227, abs=1e-3)
    assert limits["holds_for"] == SPENT
    assert [each["records"] for each in limits["groups"]] == list(GROUPS)
    for each in limits["groups"]:
        assert each["epsilon"] > each["records"] * document["claim"]["epsilon"], "not k times the epsilon"
    assert document["claim"]["epsilon"] < limits["replacement"]["epsilon"] < limits["groups"][0]["epsilon"]
    assert [each["delta"] for each in limits["other_deltas"]] == list(DELTAS)
    verdict = verify(folder)
    assert verdict.certified == document["claim"]["epsilon"]


def no_better_than_the_headline(document: dict) -> None:
    claim, limits = document["claim"], document["limits"]
    events = [Event(**each) for each in limits["events"]]
    assert epsilon(events, limits["delta"]) >= claim["epsilon_claimed"] - 1e-4  # it is rounded up
    assert all(row["epsilon"] > claim["epsilon_claimed"] for row in (*limits["groups"], limits["replacement"]))
    spent = trade_off.of_events(events, limits["delta"])
    assert limits["best_guess"] == pytest.approx(spent.best_guess(), rel=1e-6)


@pytest.mark.parametrize(
    "why", ["ended early", "kept by a metric", "new segment", "new segment, and more allowed than planned"]
)
def test_where_the_budget_is_claimed_the_limits_are_of_all_that_it_allows(tmp_path: Path, why: str) -> None:
    plan = replace(DEMO, steps=20) if why == "new segment, and more allowed than planned" else DEMO
    journal = begin(tmp_path, plan)
    train(journal, range(1, 11), plan)
    if why.startswith("new segment"):
        journal.checkpointed(0, 10, "a")
        journal.begin_segment(0, CONFIG, DATA, 10, "a better rate")
        train(journal, range(11, 16), plan)
    elif why == "kept by a metric":
        journal.declare_choice("public_loss")
    journal.finish()
    document = document_of(journal)
    assert document["claim"]["epsilon_claimed"] == plan.epsilon_budget > document["claim"]["epsilon"]
    limits = document["limits"]
    assert limits["holds_for"] == BUDGET
    (event,) = limits["events"]
    assert event["count"] >= plan.steps
    no_better_than_the_headline(document)
    # And not needlessly more: some steps fewer would have been within the budget.
    fewer = Event(event["rate"], event["sigma"], int(event["count"] / 1.02))
    assert event["count"] == plan.steps or epsilon([fewer], plan.delta) <= plan.epsilon_budget
    pages.write(document, tmp_path)
    verify(tmp_path)


def test_two_phases_are_each_held_to_their_own_budget(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.declare_plan(1, "second", replace(PLAN, noise_multiplier=30.0), {})
    train(journal, range(1, 4))
    journal.begin_segment(1, CONFIG, DATA, 0, "first")
    train(journal, range(1, 6), replace(PLAN, noise_multiplier=30.0), phase=1)
    journal.finish()
    document = document_of(journal)
    events = {event["sigma"]: event["count"] for event in document["limits"]["events"]}
    for sigma, count in events.items():
        assert epsilon([Event(1.0, sigma, count)], PLAN.delta) > PLAN.epsilon_budget
    # Twice the variance at a higher multiplier: closed form, k records move the sum k times as far.
    joined = sum(count / sigma**2 for sigma, count in events.items()) ** -0.5
    assert document["limits"]["groups"][0]["epsilon"] == pytest.approx(gaussian_epsilon(joined / 2, PLAN.delta))


def test_what_is_spent_is_what_limits_are_made_of_without_a_choice(tmp_path: Path) -> None:
    journal, document = demo(tmp_path)
    no_better_than_the_headline(document)
    events, _ = claimed_events(journal.history)
    assert events == journal.history.charged()
    going_on, holds_for = claimed_events(journal.history, finished=False)
    assert going_on is not None and going_on[0].count >= DEMO.steps and holds_for == BUDGET


def test_runs_that_were_all_charged_multiply_and_runs_that_were_drawn_leave_one_point(tmp_path: Path) -> None:
    journal = begin(tmp_path, replace(PLAN, steps=3))
    journal.declare_tuning(Declared("two batches", Tuning(2, fixed=True)))
    journal.declare_tuning(Declared("three rates", Tuning(3, fixed=True)))
    train(journal, range(1, 4), replace(PLAN, steps=3))
    journal.finish()
    document = document_of(journal)
    assert document["limits"]["events"] == [{"rate": 1.0, "sigma": 20.0, "count": 9}]
    no_better_than_the_headline(document)
    journal.declare_tuning(Declared("more, by a drawn number", Tuning(5.0)))
    document = document_of(journal)
    limits = document["limits"]
    assert limits["events"] is None and "alone" in limits["holds_for"]
    assert all(row["epsilon"] is None for row in (*limits["groups"], limits["replacement"], *limits["other_deltas"]))
    alone = trade_off.of_point(document["claim"]["epsilon_claimed"], PLAN.delta)
    assert limits["best_guess"] == pytest.approx(alone.best_guess(), abs=1e-3)
    assert "not proved" in markdown(document)
    pages.write(document, tmp_path)
    verify(tmp_path)


def test_late_plans_leave_the_point_at_their_own_delta(tmp_path: Path) -> None:
    journal = begin(tmp_path, replace(PLAN, steps=2))
    train(journal, range(1, 3), replace(PLAN, steps=2))
    journal.declare_plan(1, "later", PLAN, {})
    document = document_of(journal)
    assert document["limits"]["events"] is None and document["limits"]["delta"] == 2 * PLAN.delta
    pages.write(document, tmp_path)
    verify(tmp_path)


def test_of_the_claim_alone_the_curve_is_that_of_its_point() -> None:
    for claim in ({"delta": 1e-3}, {"delta": 1e-9, "delta_claimed": 1e-3}):
        curve = curve_of({"claim": {"epsilon_claimed": 2.0, **claim}})
        assert curve.power(0.01) == pytest.approx(math.exp(2.0) * 0.01 + 1e-3)


def test_false_sentences_are_gone(finished: tuple[Path, dict]) -> None:
    _, document = finished
    for text in (markdown(document), html_page(document), json.dumps(document, ensure_ascii=False)):
        assert "k times the ε at most" not in text and "unlimited computers" not in text
        assert "AES-256-CTR" in text and "Computers without limits are not covered" in text
    page = markdown(document)
    assert "66.85 %" in page and "12.27 %" in page and "99.97" not in page
    assert "| 2 records of one person | 16.85" in page and "| one record for another, or its label | 8.95" in page


class Tags(HTMLParser):
    """A reader that notices a tag which is not closed in order."""

    EMPTY = ("meta", "br", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        del attrs
        self.seen.append(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        del attrs
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_html_with_a_picture_whose_axes_are_labelled(finished: tuple[Path, dict]) -> None:
    _, document = finished
    page = html_page(document)
    reader = Tags()
    reader.feed(page)
    assert reader.open == [] and {"table", "h1", "h2", "svg", "figure"} <= set(reader.seen)
    read = page.partition("<script")[0]
    assert "| --- |" not in read and "|---|" not in read and "**" not in read
    (drawing,) = re.findall(r"<svg.*?</svg>", read, re.DOTALL)
    svg = ElementTree.fromstring(drawing)
    words = " ".join("".join(each.itertext()) for each in svg.iter() if each.tag.endswith("text"))
    axis = "0.0001 % 0.001 % 0.01 % 0.1 % 1 % 10 % 100 %"
    for label in ("false alarms", "used records found", axis, "12.3 %", "3.7 %"):
        assert label in words
    # Every place lies within the picture, and the curve rises from left to right.
    for line in (each for each in svg.iter() if each.tag.endswith("polyline")):
        points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        assert all(0 <= x <= 640 and 0 <= y <= 400 for x, y in points)
        assert points == sorted(points, key=lambda point: point[0])
        assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    inside = html_sections(document)
    assert "<h1>" not in inside and "<html" not in inside and "<svg" in inside


def test_the_page_answers_what_an_officer_asks(finished: tuple[Path, dict]) -> None:
    _, document = finished
    for text in (markdown(document), html_page(document)):
        for words in (
            "Drawn shapes with captions", "Office of the owner", "captioner, custom", "Unit of privacy", "Trust model",
            "Data collection", "Data security and access", "Utility and bias", "20000", "0.60742", "dp-accounting",
        ):  # fmt: skip
            assert words in text
    assert yaml.safe_load(model_card(document))["differential_privacy"]["epsilon"] == 7.9998
    nameless = {key: value for key, value in document.items() if key not in ("about", "model")}
    assert "not stated" in markdown(nameless)


def test_the_registry_entry_has_the_fields_of_the_registry_and_numbers_on_the_safe_side(
    finished: tuple[Path, dict],
) -> None:
    _, document = finished
    deployment = registry_entry(document)["deployment"]
    assert list(deployment) == [
        "product", "dp_flavor", "privacy_loss", "model", "accounting", "implementation", "resources",
    ]  # fmt: skip
    assert deployment["dp_flavor"]["name"] == "Approximate DP" and deployment["model"]["model_name"] == "Central"
    parameters = deployment["privacy_loss"]["privacy_parameters"]
    assert parameters["epsilon"] >= document["claim"]["epsilon"] and parameters["delta"] >= document["claim"]["delta"]
    assert deployment["product"]["data_curators"] == ["Office of the owner"]
    # On the page it is JSON that can be copied.
    (block,) = re.findall(r"```json\n(.*?)```", markdown(document), re.DOTALL)
    assert json.loads(block) == registry_entry(document)
    objection = {**document, "claim": {**document["claim"], "private": False, "statement": "NOT PRIVATE"}}
    assert "privacy_parameters" not in registry_entry(objection)["deployment"]["privacy_loss"]


def answer(command: str, capsys: pytest.CaptureFixture) -> dict:
    assert main([*command.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_explain_uses_the_curve_wherever_the_steps_are_known(
    finished: tuple[Path, dict], capsys: pytest.CaptureFixture
) -> None:
    folder, document = finished
    numbers = "explain --n 20000 --batch 1000 --steps 50 --sigma 0.60742"
    for found in (answer(f"explain {folder}", capsys), answer(numbers, capsys)):
        assert found["best_guess"] == pytest.approx(document["limits"]["best_guess"], rel=1e-6)
        assert "66.85 %" in found["explanation"] and "12.27 %" in found["explanation"]
    alone = answer("explain --epsilon 8 --delta 2.5e-5", capsys)
    assert alone["best_guess"] > 0.999 and "99.97 %" in alone["explanation"]


def test_explain_gives_the_row_for_the_users_own_number_of_records(
    finished: tuple[Path, dict], capsys: pytest.CaptureFixture
) -> None:
    folder, document = finished
    found = answer(f"explain {folder} --records-per-person 3", capsys)
    history, _ = History.read(folder / "ledger.jsonl")
    assert found["epsilon_per_person"] == pytest.approx(group_epsilon(history.charged(), DEMO.delta, 3), rel=1e-9)
    assert found["epsilon_replacement"] == pytest.approx(document["limits"]["replacement"]["epsilon"], rel=1e-6)
    assert main(["explain", str(folder), "--records-per-person", "3"]) == 0
    assert "For a person with 3 records: epsilon = 26.18" in capsys.readouterr().out
    one_step = "explain --n 100 --batch 100 --steps 1 --sigma 0.6529 --delta 1e-6 --records-per-person 2"
    assert answer(one_step, capsys)["epsilon_per_person"] == pytest.approx(18.651, abs=1e-3)
    assert main(["explain", "--epsilon", "8", "--delta", "1e-6", "--records-per-person", "2"]) == 2
    assert "give --n, --batch, --steps and --sigma" in capsys.readouterr().err
