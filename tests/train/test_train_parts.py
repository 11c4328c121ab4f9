"""The small parts: shard map, pace, boards, what is observed, and reasons to stop."""

from __future__ import annotations

import json
import math
import os
import signal
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from train_helpers import LocalEngine, Toy, alone, on_ranks

from accounting.keys import KeyFileError
from train import stop as stop_module
from train.board import RATE_STEPS, Board, Pace
from train.fragment import Fragment
from train.observed import Observed
from train.run_dir import RunDir, open_private, whole_lines
from train.shard_map import ShardMapError, whole_parameters, zero_slices
from train.stop import Stopped, StopRequest
from train.stop_rules import measured_before

# The shard map


def mapped(parameter: nn.Parameter, start: int, length: int, position: int, group: int = 0, outside: int = -1) -> None:
    """The addresses that DeepSpeed leaves on a parameter."""
    parameter._hp_mapping = SimpleNamespace(  # pyright: ignore
        lp_fragment_address=SimpleNamespace(start=start, numel=length),
        hp_fragment_address=SimpleNamespace(start=position, numel=length if outside < 0 else outside),
        param_group_index=group,
    )


@pytest.fixture
def sliced() -> tuple[dict[str, nn.Parameter], torch.Tensor]:
    """This rank holds the end of `a`, all of `b`, nothing of `c`, and two elements of padding."""
    a, b, c = (nn.Parameter(torch.arange(n, dtype=torch.float32) + 100 * n) for n in (10, 4, 3))
    flat = torch.cat([a.detach()[6:], b.detach(), torch.zeros(2)])
    mapped(a, 6, 4, 0)
    mapped(b, 0, 4, 4)
    return {"a": a, "b": b, "c": c}, flat


def test_slices_become_fragments_in_order(sliced: Any) -> None:
    trainable, flat = sliced
    found, fragments = zero_slices(dict(reversed(trainable.items())), [flat])[id(flat)]
    assert found is flat and [f.name for f in fragments] == ["a", "b"]
    _, fragments = zero_slices(trainable, [flat])[id(flat)]
    assert fragments == [Fragment("a", 0, 6, 4, 0), Fragment("b", 1, 0, 4, 4)]
    assert fragments[0].of(flat).tolist() == trainable["a"][6:].tolist()


def test_a_map_that_does_not_fit_the_weights_is_refused(sliced: Any) -> None:
    trainable, flat = sliced
    flat[5] += 1
    with pytest.raises(ShardMapError, match="b: its shard does not hold its weights"):
        zero_slices(trainable, [flat])


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ((0, 4, 3), "overlaps"), ((0, 4, 0), "overlaps"), ((0, 4, 8), "does not hold"), ((1, 3, 4), "does not hold"),
        ((0, 4, 4, 0, 3), "different sizes"),
    ],
)  # fmt: skip
def test_overlaps_and_wrong_places_are_refused(sliced: Any, address: tuple[int, ...], message: str) -> None:
    trainable, flat = sliced
    mapped(trainable["b"], *address)
    with pytest.raises(ShardMapError, match=message):
        zero_slices(trainable, [flat])


def test_without_sharding_the_parameters_are_the_shards() -> None:
    trainable = {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(4))}
    layout = whole_parameters(trainable)
    assert layout[id(trainable["b"])] == (trainable["b"], [Fragment("b", 1, 0, 4, 0)])
    fragment = layout[id(trainable["a"])][1][0]
    fragment.of(trainable["a"].detach()).fill_(7.0)
    assert trainable["a"].detach().tolist() == [[7.0] * 3] * 2


def test_the_tests_own_engine_tiles_the_model() -> None:
    layouts = on_ranks(3, lambda ranks: LocalEngine(_plain(), ranks).layout[0])
    covered = sorted((f.parameter, f.start, f.length) for layout in layouts for f in layout)
    assert sum(length for _, _, length in covered) == sum(p.numel() for p in Toy().parameters() if p.requires_grad)
    assert any(length % 2 for _, _, length in covered)


def _plain() -> Any:
    from train.forward import PlainForward

    return PlainForward(Toy())


# Pace: contract 16


def paced(private: bool, steps: int, monkeypatch: pytest.MonkeyPatch) -> Pace:
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)) * 2)
    pace = Pace(50.0, private)
    for _ in range(steps + 1):
        pace.tick()
    return pace


def test_no_private_rate_is_shown_before_a_hundred_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RATE_STEPS == 100
    for steps in (0, 1, 99):
        pace = paced(True, steps, monkeypatch)
        assert pace.rate() is None and pace.line(steps, 500) == ""
        pace.calibrate(1234.0)
        rate = pace.rate()
        assert rate is not None and rate[0] == 1234.0 and "synthetic" in rate[1]
    rate = paced(True, 100, monkeypatch).rate()
    assert rate == (25.0, "")
    assert paced(False, 1, monkeypatch).rate() == (25.0, "")


def test_the_private_rate_is_the_expected_batch_over_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = paced(True, 250, monkeypatch)
    assert "25 samples/s" in pace.line(250, 350) and "ETA 3m20s" in pace.line(250, 350)
    assert "ETA 2h" in pace.line(250, 250 + 3700)


def test_windows_of_the_private_rate_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference of two overlapping windows would be the difference of two single steps."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    pace = Pace(100.0, private=True)
    pace.tick()
    rates = []
    for step in range(1, 3 * RATE_STEPS + 1):
        clock[0] += 1.0 + 0.01 * (step % 7)
        pace.tick()
        rates.append(pace.rate())
    assert rates[: RATE_STEPS - 1] == [None] * (RATE_STEPS - 1)
    assert len(set(rates)) == 4, "one rate per whole window, and none before the first is full"


# Boards


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.fixture
def boarded(tmp_path: Path) -> tuple[RunDir, Board]:
    run_dir = RunDir(tmp_path / "run")
    run_dir.prepare()
    return run_dir, Board(run_dir, main=True)


def test_private_values_reach_private_sinks_alone(boarded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, board = boarded
    board.public("private", 3, {"lr": 0.5, "epsilon": 1.25})
    board.private("private", 3, {"loss": 7.125, "records": 977.0})
    board.bad_records("private", 0, {11: "no caption"})
    board.say("step 3")
    board.close()
    assert scalars(run_dir.public_board) == {"private/lr": [(3, 0.5)], "private/epsilon": [(3, 1.25)]}
    assert scalars(run_dir.private_board) == {"private/loss": [(3, 7.125)], "private/records": [(3, 977.0)]}
    assert json.loads(run_dir.public_log.read_text()) == {"phase": "private", "step": 3, "lr": 0.5, "epsilon": 1.25}
    assert json.loads(run_dir.private_log.read_text())["loss"] == 7.125
    private = {run_dir.private_board, run_dir.private_log, run_dir.root / "logs" / "bad-records-rank0.jsonl"}
    for path in run_dir.root.rglob("*"):
        if path.is_file() and not any(p in (path, *path.parents) for p in private):
            assert not any(word in path.read_bytes() for word in (b"977", b"7.125", b"no caption", b"loss")), path
    assert capsys.readouterr().out == "step 3\n"


def test_private_files_are_for_the_owner_alone(boarded: Any) -> None:
    run_dir, board = boarded
    before = os.umask(0)  # the most generous umask must not matter
    try:
        board.bad_records("private", 1, {1: "x"})
        open_private(run_dir.root / "logs" / "other").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(run_dir.private_board.stat().st_mode) == 0o700
    for name in ("private.jsonl", "bad-records-rank1.jsonl", "other"):
        assert stat.S_IMODE((run_dir.root / "logs" / name).stat().st_mode) == 0o600, name
    board.close()


def test_public_events_carry_no_time_of_a_step(boarded: Any) -> None:
    """The time of one private step tells its batch size (contract 16): every public event has the same time."""
    run_dir, board = boarded
    for step in (1, 2, 3):
        board.public("private", step, {"lr": 0.1})
        time.sleep(0.02)
    board.close()
    accumulator = EventAccumulator(str(run_dir.public_board))
    accumulator.Reload()
    assert len({event.wall_time for event in accumulator.Scalars("private/lr")}) == 1


def test_a_line_torn_by_a_kill_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.prepare()
    for step in (1, 2, 3):
        board = Board(run_dir, main=True)
        board.public("warm", step, {"public_loss": 1.0 / step})
        board.private("warm", step, {"loss": 1.0})
        board.close()
        for log in (run_dir.public_log, run_dir.private_log):
            with log.open("a") as file:
                file.write('{"phase": "warm", "st' * (step == 2))
    assert measured_before(run_dir.public_log, "warm", 3) == {1: 1.0, 2: 0.5, 3: 1.0 / 3}
    assert [entry["step"] for entry in whole_lines(run_dir.private_log)] == [1, 2, 3]


def test_only_the_main_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = RunDir(tmp_path)
    board = Board(run_dir, main=False)
    board.public("p", 1, {"a": 1.0})
    board.private("p", 1, {"a": 1.0})
    board.say("nothing")
    board.close()
    assert not list(tmp_path.rglob("*")) and capsys.readouterr().out == ""


# Observed


def test_observed_sums_over_micro_batches_and_ranks() -> None:
    def act(ranks: Any) -> dict[str, float]:
        observed = Observed()
        present = torch.tensor([True, False, True])
        for _ in range(2):
            observed.add(present, torch.tensor([1.0, math.nan, 3.0]), torch.tensor([0.5, 99.0, 2.0 + ranks.rank]))
        return observed.over_ranks(ranks, 2.5)

    first, second = on_ranks(2, act)
    assert first == second
    assert first == pytest.approx({"records": 8, "loss": 2.0, "gradient_norm": 12 / 8, "clipped_fraction": 2 / 8})


def test_observed_survives_hostile_and_empty_batches() -> None:
    observed = Observed()
    present = torch.tensor([True, True])
    observed.add(present, torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert observed.over_ranks(alone(), 1.0)["loss"] == 0.5
    assert Observed().over_ranks(alone(), 1.0) == {"records": 0.0, "loss": 0.0}


# Stop


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


# The run directory's key


def test_a_kill_around_the_first_ledger_line_leaves_a_run_that_can_start(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    first = run_dir.run_key(fresh=True, debug_seed=None)
    assert not run_dir.key.exists()
    # Killed before the ledger's first line: nothing was drawn, so a new key takes its place.
    second = run_dir.run_key(fresh=True, debug_seed=None)
    assert first.secret != second.secret
    # Killed after it, before the key had its name: the ledger knows the key, and so does the next start.
    assert run_dir.run_key(fresh=False, debug_seed=None).secret == second.secret
    assert run_dir.key.exists() and not run_dir.new_key.exists()
    # A named key without a ledger means that the ledger was removed.
    with pytest.raises(KeyFileError, match="exists without a ledger"):
        run_dir.run_key(fresh=True, debug_seed=None)
