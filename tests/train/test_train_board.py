"""Pace and boards: what is shown, what is kept private, and nothing that tells the size of a batch."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import pty
import re
import stat
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from murmuration.accounting.certificate.statement import compose
from murmuration.accounting.strict_json import whole_lines
from murmuration.train.config.root import Config
from murmuration.train.run.board import Board, Feed, Pace
from murmuration.train.run.early_end import measured_before
from murmuration.train.run.report import figure, outcomes, read_curves, write_report
from murmuration.train.storage.run_dir import PublicTimes, RunDir, open_private
from tests.support.acc_world import whole_run
from tests.support.config_base import put

STARTED = 1_700_000_000

# Pace: contract 16


def clocked(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) * seconds)


def test_no_time_of_a_private_step_is_ever_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after any number of steps: a record that is slow to decode changes the rate of a whole run."""
    shown = set()
    for seconds in (2.0, 77.0):
        clocked(monkeypatch, seconds)
        for synthetic in (None, 25.0):
            pace = Pace(50.0, public=False, synthetic=synthetic)
            assert pace.tick() == {}
            for step in range(1, 250):
                told = pace.tick()
                shown.add((synthetic, step, pace.rate(), pace.line(step, 350)))
            assert told == {"seconds": seconds, "samples_per_second": 50.0 / seconds}, "which the owner may be told"
    assert len(shown) == 2 * 249
    assert {rate for synthetic, _, rate, _ in shown if synthetic} == {(25.0, " (timed on synthetic records)")}
    assert {(rate, line) for synthetic, _, rate, line in shown if synthetic is None} == {(None, "")}


def test_the_owner_is_told_the_share_of_a_step_that_waits_and_the_rate_of_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocked(monkeypatch, 2.0)
    waited = iter([100.0, 100.5, 100.5, 109.0])
    pace = Pace(50.0, public=False, feed=Feed(lambda: next(waited), cores=5))
    assert pace.tick() == {}, "what was waited for before the first step is nobody's"
    told = {"seconds": 2.0, "samples_per_second": 25.0, "samples_per_second_per_core": 5.0}
    assert [pace.tick() for _ in range(3)] == [told | {"waiting_share": share} for share in (0.25, 0.0, 1.0)]


def test_public_records_show_the_rate_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, 2.0)
    pace = Pace(50.0, public=True)
    pace.tick()
    assert pace.rate() is None
    pace.tick()
    assert pace.rate() == (25.0, "")


def test_the_time_left_is_the_expected_batch_at_the_rate_that_is_shown() -> None:
    pace = Pace(50.0, public=False, synthetic=25.0)
    assert "25 samples/s" in pace.line(250, 350) and "ETA 3m20s" in pace.line(250, 350)
    assert "ETA 2h" in pace.line(250, 250 + 3700)


# Boards


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def prepared(root: Path) -> RunDir:
    run_dir = RunDir(root)
    run_dir.prepare()
    return run_dir


@pytest.fixture
def boarded(tmp_path: Path) -> tuple[RunDir, Board]:
    run_dir = prepared(tmp_path / "run")
    return run_dir, Board(run_dir, main=True, private_curves=True)


def test_nothing_private_is_kept_unless_it_is_asked_for(tmp_path: Path) -> None:
    """Whoever sees un-noised curves decides by them, which no epsilon covers. Unusable records are for mending."""
    run_dir = prepared(tmp_path / "run")
    board = Board(run_dir, main=True)
    board.private("private", 3, {"loss": 7.125, "seconds": 977.0})
    board.bad_records("private", 0, {11: "no caption"})
    board.close()
    assert not run_dir.has_private_curves()
    kept = [path for path in run_dir.root.rglob("*") if path.is_file() and path.parent != run_dir.public_board]
    assert {path.name for path in kept} == {"public.jsonl", "bad-records-rank0.jsonl"}
    assert not any(b"7.125" in path.read_bytes() or b"977" in path.read_bytes() for path in kept)


@pytest.mark.parametrize("before", ["tb/private/events.out.tfevents.1.host"])
def test_curves_of_an_earlier_start_are_remembered(tmp_path: Path, before: str) -> None:
    run_dir = prepared(tmp_path)
    assert not run_dir.has_private_curves()
    (tmp_path / before).write_text("{}")
    assert run_dir.has_private_curves()


def test_private_values_reach_private_sinks_alone(boarded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, board = boarded
    board.public("private", 3, {"lr": 0.5, "epsilon": 1.25})
    board.private("private", 3, {"loss": 7.125, "records": 977.0})
    board.bad_records("private", 0, {11: "no caption"})
    board.bad_records("private", 1, {})
    assert not (run_dir.private_logs / "bad-records-rank1.jsonl").exists(), "nothing bad, nothing told"
    board.say("step 3")
    board.close()
    assert scalars(run_dir.public_board) == {"private/lr": [(3, 0.5)], "private/epsilon": [(3, 1.25)]}
    assert scalars(run_dir.private_board) == {"private/loss": [(3, 7.125)], "private/records": [(3, 977.0)]}
    assert json.loads(run_dir.public_log.read_text()) == {"phase": "private", "step": 3, "lr": 0.5, "epsilon": 1.25}
    assert json.loads(run_dir.private_log.read_text())["loss"] == 7.125
    private = {run_dir.private_board, run_dir.private_logs}
    for path in run_dir.root.rglob("*"):
        if path.is_file() and not any(p in (path, *path.parents) for p in private):
            assert not any(word in path.read_bytes() for word in (b"977", b"7.125", b"no caption", b"loss")), path
    assert capsys.readouterr().out == "step 3\n"


def test_private_files_are_for_the_owner_alone(boarded: Any) -> None:
    run_dir, board = boarded
    before = os.umask(0)  # the most generous umask must not matter
    try:
        board.bad_records("private", 1, {1: "x"})
        open_private(run_dir.private_logs / "other").close()
    finally:
        os.umask(before)
    for folder in (run_dir.private_board, run_dir.private_logs):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "nobody else sees which files there are, nor their sizes"
    for name in ("curves.jsonl", "bad-records-rank1.jsonl", "other"):
        assert stat.S_IMODE((run_dir.private_logs / name).stat().st_mode) == 0o600, name
    board.close()


def test_an_unusable_record_is_listed_once_however_often_a_run_starts_and_is_killed(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path)
    listed = run_dir.private_logs / "bad-records-rank0.jsonl"
    for met in ({3: "empty"}, {3: "empty", 5: "no caption"}, {5: "no caption", 7: "empty"}):
        board = Board(run_dir, main=True)
        for phase in ("warm", "private", "private"):
            board.bad_records(phase, 0, met)
        board.close()
        with listed.open("a") as file:
            file.write('{"phase": "private", "rec')  # a kill
    found = [(entry["phase"], entry["record"]) for entry in whole_lines(listed)]
    assert sorted(found) == [(phase, record) for phase in ("private", "warm") for record in (3, 5, 7)]


def test_a_line_torn_by_a_kill_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path)
    for step in (1, 2, 3):
        board = Board(run_dir, main=True, private_curves=True)
        board.public("warm", step, {"public_loss": 1.0 / step})
        board.private("warm", step, {"loss": 1.0})
        board.close()
        for log in (run_dir.public_log, run_dir.private_log):
            with log.open("a") as file:
                file.write('{"phase": "warm", "st' * (step == 2))
    assert measured_before(run_dir.public_log, "warm", 3) == {1: 1.0, 2: 0.5, 3: 1.0 / 3}
    assert [entry["step"] for entry in whole_lines(run_dir.private_log)] == [1, 2, 3]


def test_what_the_log_was_told_before_a_kill_is_what_was_measured_last(tmp_path: Path) -> None:
    """The log is written first, then the run's state."""
    run_dir = prepared(tmp_path)
    board = Board(run_dir, main=True, private_curves=False)
    board.public("warm", 3, {"public_loss": 2.0, "top_1": 0.5})
    board.public("warm", 4, {"lr": 0.1})
    board.close()
    assert Board(run_dir, main=False, private_curves=False).latest is None
    run_dir.write_state(measured={"phase": "warm", "step": 0, "public_loss": 9.0, "top_1": 0.1})
    latest = {"phase": "warm", "step": 3, "public_loss": 2.0, "top_1": 0.5}
    assert Board(run_dir, main=False, private_curves=False).latest == latest
    other = {"phase": "next", "step": 1, "public_loss": 9.0}
    run_dir.write_state(measured=other)
    assert Board(run_dir, main=False, private_curves=False).latest == other


@pytest.mark.parametrize(
    "line",
    [
        '{"phase": "private", "st', "\0\0\0\0", "{", "7", "[]", "null", "{}", "[" * 50_000, '{"phase": "private"}',
        '{"phase": "private", "step": ' + "9" * 5000 + "}", '{"step": 2, "public_loss": 9.0}',
        '{"phase": ["private"], "step": 2, "public_loss": 9.0}', '{"phase": "private", "public_loss": 9.0}',
        '{"phase": "private", "step": "2", "public_loss": 9.0}', '{"phase": "private", "step": {}, "public_loss": 9.0}',
        '{"phase": "private", "step": 2.5, "public_loss": 9.0}', '{"phase": "private", "step": 2, "public_loss": "9"}',
        '{"phase": "private", "step": 2, "public_loss": {"a": 9.0}}',
    ],
    ids=lambda line: line[:40],
)  # fmt: skip
def test_a_line_that_no_run_wrote_changes_nothing_at_resume_and_in_the_report(
    tmp_path: Path, loaded: Callable[..., Config], line: str
) -> None:
    run_dir = prepared(tmp_path / "run")
    good = [
        json.dumps({"phase": "private", "step": step, "public_loss": 1.0 / step, "zero_shot_colour": 0.5})
        for step in (1, 2)
    ]
    run_dir.public_log.write_text("\n".join([line, good[0], line, good[1], line, ""]))
    assert measured_before(run_dir.public_log, "private", 9) == {1: 1.0, 2: 0.5}
    assert read_curves(run_dir) == {"private": {"public_loss": {1: 1.0, 2: 0.5}, "zero_shot_colour": {1: 0.5, 2: 0.5}}}
    assert len(outcomes(loaded(), read_curves(run_dir))) == 1


@pytest.mark.parametrize(("privacy", "tag"), [(True, "dp"), (False, "without-dp")])
def test_no_public_tag_looks_like_a_private_value(
    tmp_path: Path, loaded: Callable[..., Config], privacy: bool, tag: str
) -> None:
    phases = loaded(overrides=[] if privacy else ["phases.1.privacy=null"]).phases
    assert phases[1].name == "private"
    run_dir = prepared(tmp_path / "run")
    board = Board(run_dir, main=True, private_curves=True, phases=phases)
    board.public("private", 3, {"lr": 0.5})
    board.private("private", 3, {"loss": 7.125})
    board.close()
    assert scalars(run_dir.public_board) == {f"{tag}/lr": [(3, 0.5)]}
    assert scalars(run_dir.private_board) == {"private/loss": [(3, 7.125)]}
    assert json.loads(run_dir.public_log.read_text()) == {"phase": "private", "step": 3, "lr": 0.5}


def test_tensorboard_shows_config_certificate_settings_and_pictures_at_the_time_of_the_start(tmp_path: Path) -> None:
    """Any other time would tell how long private steps took."""
    drawn = io.BytesIO()
    Image.new("RGB", (5, 4), (200, 0, 0)).save(drawn, "PNG")
    sample = {"png": base64.b64encode(drawn.getvalue()).decode(), "caption": "a *red* square", "truth": "a red square"}
    run_dir = prepared(tmp_path / "run")
    board = Board(run_dir, main=True, times=PublicTimes(STARTED))
    board.describe('{"name": "<b>"}', {"σ": 0.5, "model": "mae, nano"}, ["dp/epsilon"])
    board.certified("# Certificate", "start", 7, [sample])
    board.public("start", 8, {"lr": 0.1})
    board.signals("start", 8, {"head": 2.0})
    board.close()
    (file,) = run_dir.public_board.glob("*tfevents*")
    events = [each for each in EventFileLoader(str(file)).Load() if each.HasField("summary")]
    assert {each.wall_time for each in events} == {STARTED}
    found = {value.tag: value for each in events for value in each.summary.value}
    assert found["config/text_summary"].tensor.string_val == [b'    {"name": "<b>"}'], "shown as code, not as markup"
    assert found["certificate/text_summary"].tensor.string_val == [b"# Certificate"]
    shown = found["start held-out/00 a *red* square (true: a red square)"]
    assert shown.tensor.string_val[2] == drawn.getvalue()
    told = HParamsPluginData.FromString(found[SESSION_START_INFO_TAG].metadata.plugin_data.content)
    assert told.session_start_info.hparams["σ"].number_value == 0.5
    compared = HParamsPluginData.FromString(found[EXPERIMENT_TAG].metadata.plugin_data.content).experiment.metric_infos
    assert [each.name.tag for each in compared] == ["dp/epsilon"]


@pytest.mark.parametrize("slurm", [False, True])
def test_a_terminal_sees_one_line_that_moves_and_a_log_a_line_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: bool
) -> None:
    terminal, inside = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    with os.fdopen(inside, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        run_dir = RunDir(tmp_path / "run")
        run_dir.prepare()
        board = Board(run_dir, main=True)
        board.latest = {"phase": "warm", "step": 1, "public_loss": 0.25}
        for step in (1, 2):
            board.progress(f"warm  step {step}/4", step, 4)
        board.say("a checkpoint")
        board.progress("warm  step 3/4", 3, 4)
        board.progress("warm  step 4/4", 4, 4)
        board.close()
        stdout.flush()
        seen = b""
        while not seen.endswith(b"step 4/4\r\n"):  # what a terminal is given comes in pieces
            seen += os.read(terminal, 10_000)
    os.close(terminal)
    seen = seen.decode()
    if slurm:
        assert seen.splitlines() == [
            *(f"warm  step {n}/4" for n in (1, 2)),
            "a checkpoint",
            "warm  step 3/4",
            "warm  step 4/4",
        ]
        return
    drawn = seen.split("\x1b[2K")
    assert drawn[1] == "█████░░░░░░░░░░░░░░░ warm  step 1/4  public loss 0.250\r"
    assert drawn[2].startswith("█" * 10 + "░" * 10 + " warm  step 2/4") and all(len(each) <= 60 for each in drawn)
    assert drawn[3] == "a checkpoint\r\n\r", "instead of the bar"
    assert drawn[-1] == "warm  step 4/4\r\n" and seen.count("\n") == 2


def test_only_the_main_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = RunDir(tmp_path)
    board = Board(run_dir, main=False)
    board.public("p", 1, {"a": 1.0})
    board.private("p", 1, {"a": 1.0})
    board.say("nothing")
    board.close()
    assert not list(tmp_path.rglob("*")) and capsys.readouterr().out == ""


# The report's figures and curves: any name of an axis is shown as it stands, and a torn log ends no run.


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
        drawn = figure(phase, points, 0.0)
    assert f">{html.escape(name, quote=False)}</text>" in drawn


def test_what_all_phases_spent_stands_beside_the_budget_of_all_of_them(
    tmp_path: Path, loaded: Callable[..., Config]
) -> None:
    warm, private = loaded().phases
    again = private.model_copy(update={"name": "again"})
    run_dir = RunDir(tmp_path)
    run_dir.public_log.parent.mkdir()
    run_dir.public_log.write_text(
        "".join(json.dumps({"phase": name, "step": 1, "epsilon": 7.0}) + "\n" for name in ("private", "again"))
    )
    journal = whole_run(tmp_path)
    document = compose(journal.history, journal.ledger.entries, {})
    write_report(run_dir, loaded().model_copy(update={"phases": [private, warm, again]}), document, [])
    drawn = [each for each in re.findall(r"<svg.*?</svg>", run_dir.report.read_text(), re.DOTALL) if ">budget<" in each]
    heights = [max(map(float, re.findall(r"<text [^>]*>(\d+(?:\.\d+)?)</text>", each))) for each in drawn]
    assert heights == [8.0, 15.0], "of 8, and of 16"


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
        put("phases.1.data.path", "https://host/records/{000..009}.tar"),
        put(
            "about.cost",
            "see s3://KEY:abc/pa55word@bucket/x, https://me:w@rd:pa55word@host/x and https://host/x#token=pa55word",
        ),
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
    assert "https://host/records/{000..009}.tar" in page and "pa55word" not in page
    assert page.count("<span>a <span class='wrong'>blue</span> square</span>") == 1
    assert page.count("class='right'>a red square<") == 1
    assert "python launch/account.py verify RUN_DIR" in page and "href='certificate.html'" in page


def test_a_full_disk_is_told_with_the_file() -> None:
    """Only what `open` raises names it by itself."""
    writer: Any = SimpleNamespace(add_scalar=lambda *_, **__: None, flush=lambda: None)
    told: list[Any] = []
    with suppress(OSError), Path("/dev/full").open("w") as log:  # to close it fails, too
        try:
            Board._write(writer, log, "private", "dp", 1, {"lr": 1.0}, None)
        except OSError as error:
            told.append(error.filename)
    assert told == ["/dev/full"]
