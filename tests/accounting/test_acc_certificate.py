"""A certificate says what its ledger supports, in words that are true, and stops verifying when either changes."""

from __future__ import annotations

import copy
import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from murmuration.accounting.certificate import pages
from murmuration.accounting.certificate.explain import Attacks, explain
from murmuration.accounting.certificate.pages import html_page, markdown, model_card
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.epsilon.accountant import epsilon, show_delta
from murmuration.accounting.epsilon.trade_off import of_point
from murmuration.accounting.epsilon.tuning import Declared, Tuning
from murmuration.accounting.escaping import printable
from murmuration.accounting.event import Event
from murmuration.accounting.ledger.chain import LedgerError
from tests.support.acc_world import (
    CONFIG,
    DATA,
    KEY,
    PLAN,
    Change,
    begin,
    certified,
    document_of,
    facts,
    to,
    train,
    whole_run,
)


def test_three_files_and_one_claim(tmp_path: Path) -> None:
    document = certified(
        whole_run(tmp_path), {"known_deviations": ["Proved on CPU alone."], "hashes": {"config": "abc"}}
    )
    spent = epsilon([Event(1.0, 20.0, 3)], PLAN.delta)
    assert document["claim"]["epsilon"] == spent
    assert spent <= document["claim"]["epsilon_rounded_up"] == document["claim"]["epsilon_claimed"] <= spent + 1.1e-4
    verdict = verify(tmp_path)
    assert verdict.certified == spent and verdict.objection is None and verdict.claimed is not None
    assert verify(tmp_path / "certificate.json").head == verdict.head
    for name in ("certificate.md", "certificate.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        for words in (document["claim"]["statement"], "Proved on CPU alone.", "NIST SP 800-226", verdict.head):
            assert words in text
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def smaller(value: float) -> float:
    return 0.9 * value


IMPROVED: list[Change] = [
    *(to({place: value}) for place, value in (
        ("claim.epsilon", 0.01), ("claim.epsilon_rounded_up", 0.01), ("claim.epsilon_claimed", 0.01),
        ("claim.statement", "(0.1, 1e-9)-differential privacy"), ("claim.delta", 1e-9), ("claim.private", False),
        ("claim.epsilon_budget", 0.1), ("unit", "one person"), ("adjacency", "replace"), ("mechanism", "magic"),
        ("phases", []), ("segments", []), ("ledger.length", 2), ("ledger.length", 99), ("ledger.head", "0" * 64),
        ("format", "x"), ("claim", None), ("ledger", {}), ("phases.0.events.0.sigma", 30.0), ("run", "another"),
        ("claim.claimed_because", "trust me"), ("phases.0.plan.clip_norm", 0.1), ("known_deviations", ["none"]),
        ("claim.method.most_error", 1.0), ("claim.method", None), ("tuned_on_private_data", ["nothing"]),
        ("limits.best_guess", smaller), ("limits.true_positives.12.at_most", smaller),
        ("limits.groups.0.epsilon", smaller), ("limits.groups.2.records", 20), ("limits.replacement.epsilon", smaller),
        ("limits.replacement", {"epsilon": None, "reason": "unknown"}), ("limits.other_deltas.0.epsilon", smaller),
        ("limits.gaussian.mu", smaller), ("limits.events", None), ("limits.more", 1.0),
        ("limits.holds_for", "everything"), ("limits", None), ("assumption", "none"), ("versions", {}),
    )),
    lambda document: document["limits"]["true_positives"].pop(),
    lambda document: document["limits"].pop("replacement"),
    lambda document: document.pop("limits"),
]  # fmt: skip


@pytest.mark.parametrize("change", IMPROVED)
def test_no_word_of_it_can_be_improved(tmp_path: Path, change: Change) -> None:
    document = copy.deepcopy(certified(whole_run(tmp_path)))
    change(document)
    # Signed again: whoever has the key can say no more than the ledger proves either.
    (tmp_path / "certificate.json").write_text(json.dumps(signed(document, KEY)))
    with pytest.raises(CertificateError):
        verify(tmp_path)


@pytest.mark.parametrize("name", ["certificate.html", "certificate.md"])
def test_pages_that_say_something_else_are_named(tmp_path: Path, name: str) -> None:
    """Nobody signs them, and they are what people read."""
    document = certified(whole_run(tmp_path), {"about": {"owner": "a name with \udcff in it"}})
    told = f"{name} shows what certificate.json says"
    found = verify(tmp_path).attached
    assert found is not None and told in found.checked
    page = (tmp_path / name).read_text()
    claimed = f"{document['claim']['epsilon_claimed']}"
    assert claimed in page
    (tmp_path / name).write_text(page.replace(claimed, "0.01"))
    found = verify(tmp_path).attached
    assert found is not None and told not in found.checked
    assert [sentence for sentence in found.unchecked if sentence.startswith(f"{name}: differs from the page")]


def test_a_certificate_does_not_cover_later_steps(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    pages.write(document_of(journal), tmp_path)
    verify(tmp_path)
    train(journal, range(3, 4))
    journal.ledger.close()
    with pytest.raises(CertificateError, match="no longer covers"):
        verify(tmp_path)


@pytest.mark.parametrize("later", ["commit", "segment", "choice"])
def test_a_certificate_does_not_cover_what_makes_its_claim_another_one_later(tmp_path: Path, later: str) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    journal.open_step(0, 3, facts(3))
    pages.write(document_of(journal), tmp_path)
    verify(tmp_path)
    if later == "commit":
        journal.commit_step(0, 3, facts(3))
    elif later == "segment":
        journal.begin_segment(0, CONFIG, DATA, 2, "rolled back")
    else:
        journal.declare_choice("public_loss")
    journal.ledger.close()
    with pytest.raises(CertificateError, match="no longer covers"):
        verify(tmp_path)


@pytest.mark.parametrize("why", ["stopped early", "new segment"])
def test_the_budget_is_claimed_where_outputs_may_have_been_chosen(tmp_path: Path, why: str) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 4))
    journal.checkpointed(0, 3, "a")
    if why == "new segment":
        journal.begin_segment(0, CONFIG, DATA, 3, "a better learning rate")
        train(journal, range(4, 41))
    journal.finish()
    document = document_of(journal)
    assert document["claim"]["epsilon"] < document["claim"]["epsilon_claimed"] == PLAN.epsilon_budget
    assert f"({PLAN.epsilon_budget}," in document["claim"]["statement"]
    pages.write(document, tmp_path)
    assert verify(tmp_path).claimed == PLAN.epsilon_budget


def test_what_is_not_private_says_so_everywhere(tmp_path: Path) -> None:
    journal = begin(tmp_path, debug=True)
    journal.open_step(0, 1, facts(1))
    document = document_of(journal)
    assert not document["claim"]["private"]
    for text in (document["claim"]["statement"], markdown(document), html_page(document)):
        assert "NOT PRIVATE (debug)" in text
    assert "private: false" in markdown(document) and "accountant: PLD" not in markdown(document)


def test_tuning_is_charged_and_recomputed(tmp_path: Path) -> None:
    journal = whole_run(tmp_path)
    journal.declare_tuning(Declared("learning rate, 5 runs on average", Tuning(5.0)))
    document = certified(journal, {"siblings": [{"run": "a", "epsilon": 0.5}, "b"]})
    cost = document["tuned_on_private_data"][0]["epsilon"]
    assert document["claim"]["epsilon_claimed"] >= cost > document["claim"]["epsilon"]
    assert "run: a" in markdown(document) and "charged in the claim" in markdown(document)
    verify(tmp_path)
    without = json.loads(json.dumps(document))
    without["tuned_on_private_data"] = []
    without["claim"]["epsilon_claimed"] = document["claim"]["epsilon_rounded_up"]
    document["tuned_on_private_data"][0]["runs"]["mean"] = 2.0
    for edited in (without, document):
        (tmp_path / "certificate.json").write_text(json.dumps(signed(edited, KEY)))
        with pytest.raises(CertificateError):
            verify(tmp_path)


def test_tuning_once_declared_stays_declared_and_is_priced_before_the_first_step(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    planned = epsilon([Event(1.0, 20.0, PLAN.steps)], PLAN.delta)
    cost = journal.declare_tuning(Declared("batch sizes", Tuning(3, fixed=True)))
    assert cost is not None and cost == epsilon([Event(1.0, 20.0, 3 * PLAN.steps)], PLAN.delta) > planned
    length = journal.ledger.length
    assert journal.declare_tuning(Declared("batch sizes", Tuning(3, fixed=True))) == cost
    assert journal.ledger.length == length
    train(journal, range(1, PLAN.steps + 1))
    journal.finish()
    pages.write(document_of(journal), tmp_path)
    verify(tmp_path)
    journal.declare_tuning(Declared("one more, found later", Tuning(9, fixed=True)))
    with pytest.raises(CertificateError, match="no longer covers"):
        verify(tmp_path)
    later = document_of(journal)
    assert [each["statement"] for each in later["tuned_on_private_data"]][-1] == "one more, found later"
    assert later["claim"]["epsilon_claimed"] > cost


def test_tuning_that_is_not_charged_leaves_no_claim(tmp_path: Path) -> None:
    journal = whole_run(tmp_path)
    journal.declare_tuning(Declared("500 learning rates, the best by the private loss"))
    document = certified(journal)
    assert not document["claim"]["private"] and "500 learning rates" in document["claim"]["statement"]
    assert "NOT PRIVATE" in markdown(document) and verify(tmp_path).objection is not None


def test_where_the_budget_is_claimed_each_tuned_run_is_charged_as_planned(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    journal.declare_tuning(Declared("two runs", Tuning(2, fixed=True)))
    train(journal, range(1, 4))
    journal.finish()  # early: somebody may have chosen when
    document = document_of(journal)
    assert document["claim"]["epsilon_claimed"] >= epsilon([Event(1.0, 20.0, 2 * PLAN.steps)], PLAN.delta)


def test_a_generator_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    journal, honest = begin(tmp_path), facts(1)
    with pytest.raises(LedgerError, match="which is unknown here"):
        journal.open_step(0, 1, replace(honest, noise=replace(honest.noise, generator="philox4x32-10")))


def test_one_segment_draws_its_noise_from_one_source(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    train(journal, range(1, 3))
    other = replace(facts(3).noise, generator="chacha20")
    with pytest.raises(LedgerError, match="draws noise from another source"):
        journal.open_step(0, 3, replace(facts(3), noise=other))
    journal.begin_segment(0, "config-2", "data-1", 2, "the config changed")
    journal.open_step(0, 3, replace(facts(3), noise=other))


@pytest.mark.rest
def test_repeat_and_select_lies_between_one_run_and_all_of_them() -> None:
    events = [Event(0.01, 1.0, 200)]
    one = epsilon(events, 1e-6, "rdp")
    drawn = [Tuning(mean, shape).epsilon(events, 1e-6) for mean in (10, 100) for shape in (1.0, math.inf)]
    assert all(one < value < 10 * one for value in drawn)
    assert Tuning(3, fixed=True).epsilon(events, 1e-6) == epsilon([Event(0.01, 1.0, 600)], 1e-6)
    assert Tuning.from_dict(Tuning(4, math.inf).as_dict()) == Tuning(4, math.inf)


def test_pages_escape_what_names_contain(tmp_path: Path) -> None:
    journal = begin(tmp_path)
    document = document_of(journal, {"known_deviations": ["<script>alert(1)</script>"]})
    document["phases"][0]["name"] = "a|b<i>"
    page, scripts = html_page(document).split('<script type="application/json"')
    assert "<script" not in page and "<i>" not in page and "<i>" not in scripts and "<script>alert" not in scripts
    assert [line.count("|") for line in markdown(document).splitlines() if "a&#124;b&lt;i&gt;" in line] == [10]


EVIL = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "&lt;b&gt;", "a|b|c", "`code`", "``` \n```html\n<b>x",
    "[click](https://evil.example)", "![x](https://evil.example/x.png)", "<https://evil.example>",
    "https://evil.example", "www.evil.example", "[x]: https://evil.example", "**bold**", "_it_ __x__ *y*", "~~gone~~",
    "# title", "1. one", "- item", "> quote", "---", "===", "x\n\n# ε = 0", "x\r\n| a | b |\n|---|---|", "    code",
    "\x1b[2J\x1b[Hverified", "\u202egnp", "\\`\\<b\\>", "$x$", "a\u2028b", "x\0y", "</pre></title><b>",
]  # fmt: skip


def rendered(text: str) -> list[str]:
    """By two independent readers of Markdown, GitHub's tables, fences and bare links included."""
    import markdown as python_markdown
    from markdown_it import MarkdownIt

    common = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)
    return [common, python_markdown.markdown(text, extensions=["tables", "fenced_code", "sane_lists"])]


@pytest.mark.rest
def test_no_name_is_markup_in_a_certificate(tmp_path: Path) -> None:
    """As the name of run, phases and siblings, and as statement, reason and deviation: the pages keep their form."""

    def all_pages(word: str) -> list[str]:
        journal = begin(tmp_path / str(len(list(tmp_path.iterdir()))))
        journal.declare_nonprivate(1, word, False, word)
        journal.declare_tuning(Declared(word))
        extra = {"known_deviations": [word], "siblings": [{"run": word, word: "x"}, word]}
        document = document_of(journal, extra)
        document["run"] = document["phases"][0]["name"] = document["claim"]["claimed_because"] = word
        pages.write(document, tmp_path)
        assert json.loads((tmp_path / "certificate.json").read_text(encoding="utf-8"))["run"] == word
        text = (tmp_path / "certificate.md").read_text(encoding="utf-8")
        return [*rendered(text), (tmp_path / "certificate.html").read_text(encoding="utf-8")]

    def tags(page: str) -> list[str]:
        return re.findall(r"<[^>]*>", page)

    plain = [tags(page) for page in all_pages("name")]
    for name in EVIL:
        evil = all_pages(name)
        assert [tags(page) for page in evil] == plain, name
        for page in evil:
            assert all(character.isprintable() or character == "\n" for character in page), name
            shown = html.unescape(re.sub(r"<[^>]*>", "", page))
            assert printable(name).strip() in shown, "the name is shown as it stands"


def test_plain_words_state_true_limits() -> None:
    for value in (0.0, 0.1, 1.0, 8.0, 452.8, 5000.0):
        attacks = Attacks.of_curve(of_point(value, 1e-6))
        assert 0.5 <= attacks.best_guess <= 1.0 and 0.0 <= attacks.at_one_in_a_thousand <= attacks.at_one_percent <= 1
        text = explain(value, 1e-6, "one record", attacks)
        assert f"epsilon = {value:g}" in text and "nan" not in text and "cipher" in text
        assert "unlimited" not in text
    assert "No promise" in explain(1.0, 1e-6, "one record", attacks, "NOT PRIVATE (debug)")


@pytest.mark.parametrize(
    "value, factor",
    [(0.7, "2.02"), (3.1, "23"), (8.0005, "2,983"), (26.0, "10^12")],  # e^0.7 = 2.0138, e^26 = 1.96e11
)
def test_the_factor_that_bounds_every_probability_is_rounded_up(value: float, factor: str) -> None:
    attacks = Attacks.of_curve(of_point(value, 1.2341e-6))
    text = explain(value, 1.2341e-6, "one record", attacks)
    assert f"is at most {factor} times its probability without, plus 1.24e-06, and" in text


def test_late_plans_do_not_shrink_the_claim(tmp_path: Path) -> None:
    journal = begin(tmp_path, replace(PLAN, steps=2))
    train(journal, range(1, 3), replace(PLAN, steps=2))
    assert journal.history.why_budget_is_claimed() is None
    journal.declare_plan(1, "later", PLAN, {})
    assert "later" in (journal.history.why_budget_is_claimed() or "")
    document = document_of(journal)
    # Basic composition is all that holds of a plan that outputs may have shaped.
    assert document["claim"]["delta_claimed"] == 2 * PLAN.delta
    assert show_delta(2 * PLAN.delta) in document["claim"]["statement"]
    assert f"delta: {show_delta(2 * PLAN.delta)}" in model_card(document)
