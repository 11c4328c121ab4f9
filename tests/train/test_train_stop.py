"""Reasons to stop: signals, the stop file, and the death of the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from murmuration.train.config.phase import Plateau
from murmuration.train.distributed import stop as stop_module
from murmuration.train.distributed.stop import Stopped, StopRequest
from murmuration.train.run.early_end import Ending, PlateauRule, asked_for, measured_before
from tests.support.launching import ROOT, environment
from tests.support.train_helpers import alone, on_ranks


@pytest.fixture
def request_at(tmp_path: Path) -> Any:
    made: list[StopRequest] = []

    def make() -> StopRequest:
        made.append(StopRequest(tmp_path / "stop"))
        return made[-1]

    yield make
    for request in reversed(made):
        request.restore()


@pytest.mark.parametrize("number", stop_module.SIGNALS)
def test_a_signal_is_a_reason_and_not_a_death(request_at: Any, number: signal.Signals) -> None:
    request = request_at()
    request.check(alone())
    os.kill(os.getpid(), number)
    assert request.raised() == number.name
    with pytest.raises(Stopped, match=number.name):
        request.check(alone())


BLOCKED = """
import ctypes, os, sys, threading, time
from pathlib import Path
from murmuration.train.distributed.stop import StopRequest

request = StopRequest(Path(sys.argv[1]))

def tell():
    while request.reason is None:
        time.sleep(0.01)
    print(request.reason, flush=True)
    os._exit(0)

threading.Thread(target=tell).start()
lock = ctypes.create_string_buffer(256)  # a mutex that is free
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
print("blocked", flush=True)
libc.pthread_mutex_lock(lock)  # never returns, and no signal interrupts it
"""


def test_a_signal_is_seen_while_the_main_thread_waits_where_no_python_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BLOCKED, str(tmp_path / "stop")]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"blocked\n"
        process.send_signal(signal.SIGTERM)
        try:
            told, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert told == b"SIGTERM\n" and process.returncode == 0


def test_a_signal_to_a_forked_child_does_not_stop_its_parent(request_at: Any) -> None:
    request = request_at()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0 if request.reason == "SIGTERM" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    time.sleep(0.2)
    assert request.reason is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.raised() == "SIGTERM"


def test_requests_give_signals_back_in_whatever_order_they_end(request_at: Any) -> None:
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    first, second = request_at(), request_at()
    first.restore()
    second.restore()
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    assert found in (-1, before)


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


class Counted:
    """Ranks that count their meetings."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.meetings = inner, 0
        self.world, self.pulse = inner.world, inner.pulse

    def any(self, value: bool) -> bool:
        self.meetings += 1
        return self.inner.any(value)

    def gather(self, value: Any) -> list[Any]:
        return self.inner.gather(value)


@pytest.mark.parametrize("each", [True, False])
def test_ranks_leave_a_step_together_and_meet_once_where_micro_batches_are_their_own(
    request_at: Any, each: bool
) -> None:
    """Six micro-batches; the second rank has a reason after its second."""
    requests = [request_at(), request_at()]

    def act(ranks: Any) -> tuple[list[int], str, int]:
        counted, request, used = Counted(ranks), requests[ranks.rank], []
        with pytest.raises(Stopped) as stopped:
            for number in request.until_asked(range(6), counted, each):
                used.append(number)
                if number == 1 and not ranks.main:
                    request.ask("SIGTERM")
        return used, str(stopped.value), counted.meetings

    first, second = on_ranks(2, act)
    assert second == ([0, 1], "SIGTERM", 3 if each else 1)
    assert first == ([0, 1], "SIGTERM", 3) if each else first == ([*range(6)], "SIGTERM", 1)


def test_a_step_that_nobody_stops_is_used_whole(request_at: Any) -> None:
    request = request_at()
    for each in (True, False):
        assert list(request.until_asked(range(3), alone(), each)) == [0, 1, 2]


def test_a_reason_travels_through_the_store_while_the_main_thread_is_blocked(request_at: Any) -> None:
    """Neither request is looked at by its main thread, which waits in a collective act or on a device."""
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    asked, other = request_at(), request_at()
    other._key = asked._key  # as in another process
    threads = [threading.Thread(target=each.listen, args=(store, 0.01)) for each in (asked, other)]
    for thread in threads:
        thread.start()
    asked.ask("SIGTERM")
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert asked.reason == other.reason == "SIGTERM"
    other_run = request_at()
    assert other_run._key != asked._key, "what ended one training does not end the next one of a program"


def test_listening_ends_with_the_training(request_at: Any) -> None:
    store: Any = None  # never asked
    for end in (StopRequest.end_listening, StopRequest.restore):
        request = request_at()
        end(request)
        request.listen(store, 0.0)
        assert request.reason is None


def test_a_store_that_is_gone_ends_nothing(request_at: Any) -> None:
    class Gone:
        calls = 0

        def check(self, keys: list[str]) -> bool:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("Connection reset by peer")
            request.ask("SIGTERM")
            return False

        def set(self, key: str, value: str) -> None:
            self.told = value

    request, store = request_at(), Gone()
    request.listen(store, 0.0)
    assert store.told == "SIGTERM" and store.calls == 2


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


# What ends a phase early: a plateau of the public loss, or a person; both decide alike after a resume.


def rule(losses: list[float], patience: int = 2, min_delta: float = 0.0, not_before: int = 0) -> str | None:
    measured = {10 * number: loss for number, loss in enumerate(losses)}
    return PlateauRule(Plateau(patience=patience, min_delta=min_delta, not_before=not_before), measured).reason()


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([], False), ([3.0], False), ([3.0, 2.0, 1.0], False), ([3.0, 3.0], False), ([3.0, 3.0, 3.0], True),
        ([3.0, 2.0, 2.5], False), ([3.0, 2.0, 2.5, 2.1], True), ([3.0, 2.0, 2.5, 1.9, 2.0], False),
        ([1.0, float("nan"), float("nan")], True),
    ],
)  # fmt: skip
def test_patience_counts_checkpoints_without_a_new_best(losses: list[float], ends: bool) -> None:
    assert (rule(losses) is not None) == ends


def test_a_small_fall_is_no_improvement_and_some_steps_are_made_in_any_case() -> None:
    slow = [3.0, 2.99, 2.98, 2.97]
    assert rule(slow) is None and rule(slow, min_delta=0.05) is not None
    assert rule(slow, min_delta=0.05, not_before=31) is None
    assert rule([*slow, 2.96], min_delta=0.05, not_before=31) is not None
    # Small falls add up: three of them are one improvement over the best that counted.
    assert rule([3.0, 2.97, 2.94], min_delta=0.05) is None


def test_a_resumed_run_reads_up_what_was_measured_and_decides_alike(tmp_path: Path) -> None:
    log = tmp_path / "public.jsonl"
    lines = [{"phase": "a", "step": step, "public_loss": 5.0 - step} for step in range(4)]
    lines += [{"phase": "b", "step": 1, "public_loss": 9.0}, {"phase": "a", "step": 2, "lr": 1.0}]
    lines += [{"phase": "a", "step": 2, "public_loss": 7.0}]
    log.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"phase": "a", "st')
    assert measured_before(log, "a", 2) == {0: 5.0, 1: 4.0, 2: 7.0}, "the last word on a step, and nothing after it"
    assert measured_before(tmp_path / "none", "a", 2) == {}


def test_the_first_step_at_which_a_phase_may_end_counts() -> None:
    assert rule([3.0, 3.0, 3.0], not_before=20) is not None and rule([3.0, 3.0, 3.0], not_before=21) is None


def test_an_ending_goes_on_from_the_log_with_what_is_measured(tmp_path: Path) -> None:
    log = tmp_path / "public.jsonl"
    log.write_text("".join(json.dumps({"phase": "a", "step": s, "public_loss": 3.0}) + "\n" for s in (10, 20, 30)))
    phase: Any = SimpleNamespace(name="a", settings=SimpleNamespace(plateau=Plateau(patience=2)))
    folder: Any = SimpleNamespace(public_log=log, end_file=tmp_path / "end_phase")

    ending = Ending.of(phase, folder, alone(), 20)
    assert ending.reason() is None
    ending.measured(30, {"zero_shot_colour": 0.5})
    assert ending.reason() is None
    ending.measured(30, {"public_loss": 3.5})
    assert ending.reason() == "the public loss has not fallen below 3 at 2 checkpoints in a row"


def test_a_file_ends_the_phases_that_it_names_on_all_ranks_and_for_good(tmp_path: Path) -> None:
    file = tmp_path / "end_phase"
    assert not asked_for(file, "warm")
    ending = Ending("warm", file, alone(), None)
    assert ending.reason() is None
    file.write_text("other\nwarm\n")
    assert ending.reason() == "end_phase names it" and ending.reason() is not None
    assert not asked_for(file, "war"), "whole names alone"
    assert on_ranks(2, lambda ranks: Ending("warm", file, ranks, None).reason()) == ["end_phase names it"] * 2
