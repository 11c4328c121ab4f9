"""The report's figures and curves: any name of an axis is shown as it stands, and a torn log ends no run."""

from __future__ import annotations

import html
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from murmuration.accounting.certificate.certificate import compose
from murmuration.train.config.root import Config
from murmuration.train.run.early_end import measured_before
from murmuration.train.run.report import figure, outcomes, read_curves, write_report
from murmuration.train.storage.run_dir import RunDir
from tests.support.acc_world import whole_run
from tests.support.config_base import put

NAMES = [
    "$",
    "$x$",
    "a$b",
    "$\\frac{",
    "_colour",
    "__x__",
    "a_b",
    "\\",
    "100 %",
    "{}",
    "#",
    "^",
    "~",
    "&amp;",
    "<b>",
    "ε",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_an_axis_is_drawn_as_it_stands(loaded: Callable[..., Config], name: str) -> None:
    phase = loaded(put("phases.1.evaluation.zero_shot.axes", {name: ["red", "blue"]})).phases[1]
    points = {f"zero_shot_{name}": {1: 0.5, 2: 0.75}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = figure(phase, points)
    assert f">{html.escape(name, quote=False)}</text>" in drawn


def test_lines_of_a_public_log_that_are_none_are_passed_over(
    tmp_path: Path, loaded: Callable[..., Config]
) -> None:  # fmt: skip
    run_dir = RunDir(tmp_path)
    run_dir.public_log.parent.mkdir(parents=True)
    whole = {"phase": "private", "step": 2, "public_loss": 1.5, "zero_shot_colour": 0.5}
    torn = [
        "{", "7", "[]", "null", "{}", '{"phase": "private"}', '{"step": 3, "public_loss": 1}', "[" * 50_000,
        '{"phase": ["private"], "step": 3, "public_loss": 1}', '{"phase": "private", "step": {}, "public_loss": 1}',
        '{"phase": "private", "step": 3, "public_loss": "1"}', '{"phase": "private", "step": ' + "1" * 5000 + "}",
    ]  # fmt: skip
    run_dir.public_log.write_text("\n".join([*torn, json.dumps(whole), *torn]))
    assert read_curves(run_dir) == {"private": {"public_loss": {2: 1.5}, "zero_shot_colour": {2: 0.5}}}
    assert measured_before(run_dir.public_log, "private", 9) == {2: 1.5}
    assert len(outcomes(loaded(), read_curves(run_dir))) == 1


def test_an_axis_needs_labels(loaded: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match="at least 1 item"):
        loaded(put("phases.1.evaluation.zero_shot.axes", {"colour": []}))


def test_the_report_holds_the_certificate_as_a_page_and_not_as_its_source(
    tmp_path: Path, loaded: Callable[..., Config]
) -> None:
    journal = whole_run(tmp_path)
    about = {"data": "Pictures of <b>clouds</b>", "owner": "The office"}
    document = compose(journal.history, journal.ledger.entries, {"about": about})
    write_report(RunDir(tmp_path), loaded(), document, [])
    page = RunDir(tmp_path).report.read_text(encoding="utf-8")
    assert page.count("<h1>") == 1 and "<svg" in page and page.count("<table") == page.count("</table>") > 5
    assert "Pictures of &lt;b&gt;clouds&lt;/b&gt;" in page and "The office" in page
    assert "|---|" not in page and "## What this means" not in page


def test_the_report_begins_with_what_was_run_and_ends_with_what_can_be_done(
    tmp_path: Path, loaded: Callable[..., Config]
) -> None:
    """Nobody's access to the records is published."""
    config = loaded(
        put("phases.1.data.path", "https://me:w@rd:pa55word@host/records/{000..009}.tar?a={0..9}&sig=pa55word"),
        put("about.cost", "see s3://KEY:abc/pa55word@bucket/x and https://host/x#token=pa55word"),
        put("run.witness", "https://hooks.example/pa55word"),
    )
    journal = whole_run(tmp_path)
    document = compose(journal.history, journal.ledger.entries, {"model": "captioner, nano, 1,234 parameters"})
    wrong, right = ({"png": "", "caption": c, "truth": "A  red square"} for c in ("a blue square", "a red square"))
    write_report(RunDir(tmp_path), config, document, [wrong, right])
    page = html.unescape(RunDir(tmp_path).report.read_text(encoding="utf-8"))
    plan = document["phases"][-1]["plan"]
    for told in ("captioner, nano, 1,234 parameters", f"n = {plan['records']:,}, q = ", f"T = {plan['steps']:,}, δ = "):
        assert told in page
    assert "https://host/records/{000..009}.tar?" in page and "pa55word" not in page
    assert page.count("class='wrong'>a blue square<") == page.count("class='right'>a red square<") == 1
    assert "python launch/account.py verify RUN_DIR" in page and "href='certificate.html'" in page
