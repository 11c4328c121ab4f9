"""The clip benchmark runs at toy shapes, and its instruments measure what they say: time is not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "clip.py"
JUDGED = {"error", "max_contribution"}
MEASURED = {"model", "engine", "time_ratio", "memory_ratio", "max_batch", "flop_bound", "rounds"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.fixture
def instruments(benchmark: Callable[[str], ModuleType]) -> Any:
    """The benchmark's own modules."""
    return tuple(benchmark(name) for name in ("clip_flops", "clip_memory", "clip_timing"))


@pytest.fixture
def program(benchmark: Callable[[str], ModuleType]) -> Any:
    return tuple(benchmark(name) for name in ("clip", "clip_models", "clip_engines"))


@pytest.mark.slow
def test_a_run_gives_every_row_with_every_key(tmp_path: Path) -> None:
    picture = tmp_path / "clip.png"
    done = run("--smoke", "--json", "--models", "captioner_s", "--rounds", "1", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["engine"]: row for row in found["rows"]}
    assert rows.keys() >= {"nonprivate", "ours", "reference_vmap", "opacus", "opacus_ghost"}
    for engine, row in rows.items():
        assert "failed" not in row, row
        assert row.keys() >= (MEASURED if engine == "nonprivate" else MEASURED | JUDGED)
        if engine != "nonprivate":
            assert row["error"] < 1e-5 and 0.1 < row["max_contribution"] <= 1 + 1e-5
    assert rows["nonprivate"]["memory_ratio"] == 1
    (model,) = found["models"]
    assert model["logical"]["calls_first"] == model["logical"]["calls_last"]
    assert model["environment"]["threads"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_views_are_measured_on_the_same_number_of_rows() -> None:
    done = run("--smoke", "--json", "--models", "last_layer", "--rounds", "1", "--views", "2,4", "--rows", "8")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["views"], row["records"], row["rows"]) for row in rows] == [(1, 8, 8), (2, 4, 8), (4, 2, 8)]
    assert all(row["error"] < 1e-5 and row["memory_ratio"] > 0 and row["time_ratio"] > 0 for row in rows)


def test_the_names_on_the_command_line_are_those_that_exist(program: Any) -> None:
    clip, models, engines = program
    assert set(clip.QUICK) == models.QUICK.keys() == models.SMOKE.keys()
    assert set(clip.FULL) == models.FULL.keys() and set(clip.ENGINES) == engines.ENGINES.keys()


def test_peak_memory_is_the_sum_of_what_lives_at_once(instruments: Any) -> None:
    _, clip_memory, _ = instruments

    def step() -> None:
        first = torch.zeros(1 << 20)  # 4 MiB
        second = first + 1  # 8 MiB
        del first
        third = second.double()  # 4 + 8 MiB
        del third
        torch.zeros(1 << 18)

    assert clip_memory.peak_bytes(step, torch.device("cpu")) == pytest.approx(12 << 20, rel=1e-3)
    memory = clip_memory.Memory(4, 8, 100 << 20, 180 << 20)
    assert memory.per_record == 20 << 20
    assert memory.largest_batch == (2048 - 20) // 20, "the straight line goes through 20 MiB at 0 records"


def test_flops_are_counted_from_shapes(instruments: Any) -> None:
    clip_flops, _, _ = instruments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
            self.frozen = nn.Linear(16, 16).requires_grad_(False)

        def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            x = self.frozen(self.first(inputs["x"]))
            x = nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
            return self.last(x.mean(1)).sum(1)

    tokens = 70
    cost = clip_flops.cost_of(Model(), {"x": torch.randn(1, tokens, 8)})
    first, frozen, last = 2 * tokens * 8 * 16, 2 * tokens * 16 * 16, 2 * 16 * 4
    attention = 4 * tokens * tokens * 16
    assert cost.forward == first + frozen + last and cost.attention == attention
    # The first layer's input needs no gradient, the frozen weight has none.
    assert cost.nonprivate == 2 * first + 2 * frozen + 3 * last + 3.5 * attention
    assert cost.gram == 2 * tokens**2 * (8 + 16), "one token needs no Gram matrix, nor does a frozen layer"
    assert cost.gram_triangular == 0.75 * cost.gram


def test_each_step_is_compared_with_its_two_neighbours(instruments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts calls: the baseline slows down steadily, the ratio does not see it."""
    _, _, clip_timing = instruments
    now, speed = [0.0], [1.0]

    def step(cost: float) -> Any:
        def run() -> None:
            speed[0] *= 1.01
            now[0] += cost * speed[0]

        return run

    monkeypatch.setattr(clip_timing.time, "process_time", lambda: now[0])
    found = clip_timing.interleaved(step(1.0), {"a": step(1.5), "b": step(3.0)}, 7, torch.device("cpu"))
    for name, ratio in (("a", 1.5), ("b", 3.0)):
        assert found[name].summary()["time_ratio"] == pytest.approx(ratio, rel=1e-3)
        assert len(found[name].ratios) == 7
    assert found["a"].seconds[-1] > 1.1 * found["a"].seconds[0]
    assert found[""].summary()["time_ratio"] == pytest.approx(1.0, rel=1e-3)
    found = clip_timing.interleaved(step(1.0), {"a": step(1.5), "b": step(3.0)}, 7, torch.device("cpu"), ["b"])
    assert [len(found[name].ratios) for name in ("a", "b")] == [7, 4], "peers in every second round"
    assert found["b"].summary()["time_ratio"] == pytest.approx(3.0, rel=1e-3)
