"""Reasons to stop: signals, the stop file, and the death of the launcher."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from murmuration.train.distributed import stop as stop_module
from murmuration.train.distributed.stop import Stopped, StopRequest
from tests.support.train_helpers import alone, on_ranks


@pytest.fixture
def request_at(tmp_path: Path) -> Any:
    kept = {number: signal.getsignal(number) for number in stop_module.SIGNALS}
    yield lambda: StopRequest(tmp_path / "stop")
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", stop_module.SIGNALS)
def test_a_signal_is_a_reason_and_not_a_death(request_at: Any, number: signal.Signals) -> None:
    request = request_at()
    request.check(alone())
    os.kill(os.getpid(), number)
    assert request.raised() == number.name
    with pytest.raises(Stopped, match=number.name):
        request.check(alone())


def test_the_stop_file_stops(request_at: Any, tmp_path: Path) -> None:
    request = request_at()
    assert request.raised() is None
    (tmp_path / "stop").touch()
    with pytest.raises(Stopped, match="the file stop"):
        request.check(alone())


def test_a_reason_on_one_rank_stops_all(request_at: Any) -> None:
    request, other = request_at(), request_at()
    request.reason = "SIGTERM"

    def act(ranks: Any) -> str:
        with pytest.raises(Stopped) as stopped:
            (other if ranks.main else request).check(ranks)
        return str(stopped.value)

    assert on_ranks(2, act) == ["SIGTERM", "SIGTERM"]


def test_the_death_of_the_launcher_stops_its_ranks(request_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # torchrun: the agent is our parent
    request = request_at()
    assert request.raised() is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert request.raised() == "the launcher's death"


def test_the_death_of_a_shell_does_not_stop_a_run_without_launcher(
    request_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    request = request_at()
    for parent in (1, 4_194_303):  # adopted by init; a parent that is gone while we look
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        assert request.raised() is None


def test_the_runner_above_deepspeeds_launcher_counts(monkeypatch: pytest.MonkeyPatch, request_at: Any) -> None:
    """`deepspeed` starts a launcher that starts us; when the runner dies, the launcher is adopted by init."""
    files = {"cmdline": b"python\0-m\0deepspeed.launcher.launch\0", "stat": "77 (a b) c) S 55 1 1"}
    monkeypatch.setattr(os, "getppid", lambda: 77)
    monkeypatch.setattr(Path, "read_bytes", lambda self: files[self.name])
    monkeypatch.setattr(Path, "read_text", lambda self: files[self.name])
    request = request_at()
    assert request._parents == (77, 55) and request.raised() is None
    files["stat"] = "77 (a b) c) S 1 1 1"
    assert request.raised() == "the launcher's death"
