"""The progress bar: lines now and then in logs, one that is drawn over on a terminal."""

from __future__ import annotations

import pytest

from data.progress import Progress, clock


def test_progress_speaks_now_and_then_in_logs_and_draws_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, terminal: bool) -> None:
            self.text, self.isatty = "", lambda: terminal

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    now = 0.0
    monkeypatch.setattr("data.progress.time.monotonic", lambda: now)
    log, terminal = Stream(False), Stream(True)
    shows = [Progress("indexing", "shards", stream) for stream in (log, terminal)]  # pyright: ignore[reportArgumentType]
    for second in range(101):
        now = float(second)
        for show in shows:
            show(100 + second, 200)  # a hundred were known
    lines = log.text.splitlines()
    assert lines == [
        "indexing: 130/200 shards, 1 shards/s, 1:10 left",
        "indexing: 160/200 shards, 1 shards/s, 0:40 left",
        "indexing: 190/200 shards, 1 shards/s, 0:10 left",
    ]
    assert terminal.text.count("\r") == 100 and terminal.text.endswith("] indexing: 200/200 shards, 1 shards/s\x1b[K\n")
    assert "[############............] indexing: 100/200" not in terminal.text and "[#####" in terminal.text
    assert clock(3_661) == "1:01:01"
