"""The progress bar: lines now and then in logs, one that is drawn over on a terminal."""

from __future__ import annotations

import io
import os
import pty
import sys

import pytest

from murmuration.data.progress import Progress


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("murmuration.data.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def shown(clock: list[float], terminal: bool, seconds: int) -> str:
    stream = Stream(terminal)
    show = Progress("indexing", "shards", stream)
    for second in range(seconds + 1):
        show(100 + second, 100 + seconds)  # a hundred were known
        clock[0] += 1
    return stream.getvalue()


def test_a_log_gets_a_line_now_and_then(clock: list[float]) -> None:
    assert shown(clock, False, 100).splitlines() == [
        "indexing: 130/200 shards, 1 shards/s, 01:10 left",
        "indexing: 160/200 shards, 1 shards/s, 00:40 left",
        "indexing: 190/200 shards, 1 shards/s, 00:10 left",
    ]
    assert shown(clock, False, 20) == "", "no line of a job that is over before the first one is due"


def test_a_job_that_waits_tells_no_rate_and_no_time_left(clock: list[float]) -> None:
    stream = Stream(False)
    show = Progress("indexing", "shards", stream)
    for _ in range(2):
        show(5, 10)
        clock[0] += 31
    assert stream.getvalue() == "indexing: 5/10 shards, 0 shards/s, ? left\n"


def test_a_terminal_gets_one_bar_that_is_drawn_over(clock: list[float]) -> None:
    drawn = shown(clock, True, 100).split("\r")
    assert len(drawn) > 100 and drawn[-1].endswith("\n") and not any("\n" in each for each in drawn[:-1])
    assert "indexing:  75%|" in drawn[-52] and "150/200 [00:50<00:50,  1.00 shards/s]" in drawn[-52]
    assert "indexing: 100%|" in drawn[-1] and "200/200 [01:40<00:00,  1.00 shards/s]" in drawn[-1]


def test_what_is_done_already_is_said_at_once(clock: list[float]) -> None:
    stream = Stream(True)
    Progress("indexing", "shards", stream)(7, 7)
    assert "7/7" in stream.getvalue() and stream.getvalue().endswith("\n")


def test_a_terminal_that_names_no_size_gets_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `script` and in some containers."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        Progress("indexing", "shards")(7, 7)
        assert "7/7" in os.read(master, 1000).decode()
    os.close(master)
