"""`audit.py --replay`: the same steps with a record and with a blank in its place; honest, and with planted faults."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.train.audit import replay as module
from murmuration.train.audit.replay import ReplayReport, replay
from murmuration.train.config.load import load
from murmuration.train.engines.local import start_ranks
from murmuration.train.noise.aes import AESNoise
from murmuration.train.run.trainer import Trainer
from tests.support import forking
from tests.support.launching import ROOT, environment

STEPS = 2


@pytest.fixture
def recipe(small_config: dict[str, Any], tmp_path: Path) -> Path:
    config = json.loads(json.dumps(small_config))
    config["train_micro_batch_size_per_gpu"] = 64  # one micro-batch a step
    config["phases"] = config["phases"][1:]
    private = config["phases"][0]
    private["privacy"]["expected_batch"] = 16
    private["data"]["reading"] = {"workers": 0}
    (tmp_path / "recipe.json").write_text(json.dumps(config))
    return tmp_path / "recipe.json"


def replayed(recipe: Path, **faults: Any) -> ReplayReport:
    return replay(load(recipe, []), start_ranks(), STEPS, None, **faults)


def test_one_record_moves_nothing_but_the_sum_and_that_by_at_most_c(recipe: Path) -> None:
    report = replayed(recipe)
    assert report.refuted == [] and len(report.equal) == 4
    for sink in ("console", "logs/public.jsonl", "report.html", "run_state.json", "tb/public", "checkpoints"):
        assert sink in report.equal[-1], "compared byte for byte"
    assert report.drawn >= 1 and 0 < max(report.moves) <= report.bound * 1.001 <= 1.001
    assert report.moves.count(0.0) == STEPS - report.drawn, "where it was not drawn, nothing moved at all"


class Weaker(AESNoise):
    """The ledger is told the planned deviation."""

    def draw(self, *where: Any, **how: Any) -> np.ndarray:
        return super().draw(*where, **how) * np.float32(0.9)


def weaker(noise: Any) -> Any:
    noise.__class__ = Weaker
    return noise


def test_a_tenth_less_noise_is_found(recipe: Path) -> None:
    report = replayed(recipe, around=weaker)
    assert len(report.refuted) == 1 and "of the planned deviation" in report.refuted[0], report.refuted
    assert abs(report.noise_ratio - 0.9) < 5 * report.noise_error


@pytest.mark.parametrize("fault", ["counted twice", "noise by presence", "one micro-batch more", "another row"])
def test_a_branch_that_depends_on_a_record_is_found_in_one_pair(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    honest = module.SummedEngine.accumulate
    absent: list[int] = []

    def accumulate(self: Any, batch: MicroBatch, *rule: Any) -> None:
        missing = int((~batch.present).sum())
        absent.append(missing)
        if fault == "another row" and missing % 2:
            # Two rows, since one may be the record itself, whose row may differ.
            batch.inputs["images"][batch.present.nonzero()[:2, 0]] *= 1 + 1e-6
        honest(self, batch, *rule)
        if fault == "counted twice" and missing % 2:
            for _ in range(3):
                honest(self, batch, *rule)
        if fault == "one micro-batch more" and missing % 2:
            honest(self, MicroBatch(batch.inputs, batch.present & False), *rule)

    monkeypatch.setattr(module.SummedEngine, "accumulate", accumulate)
    if fault == "noise by presence":
        draw = AESNoise.draw

        def by_presence(self: Any, *where: Any, **how: Any) -> np.ndarray:
            return draw(self, *where, **how) * (1 + 1e-5 * absent[-1])

        monkeypatch.setattr(AESNoise, "draw", by_presence)
    refuted = " ".join(replayed(recipe).refuted)
    expected = {
        "counted twice": "moved a sum",
        "noise by presence": "noise: not equal",
        "one micro-batch more": "micro-batches: not equal",
        "another row": "micro-batches: not equal",
    }
    assert expected[fault] in refuted, refuted


@pytest.mark.parametrize("sinks", [("console",), ("logs/public.jsonl", "tb/public")])
def test_a_public_sink_that_tells_of_one_record_is_found(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, sinks: tuple[str, ...]
) -> None:
    """How many of a step's records were there goes to the public board or the console."""
    honest, progress = module.SummedEngine.accumulate, Trainer._progress
    there = [0]

    def accumulate(self: Any, batch: MicroBatch, *rule: Any) -> None:
        there[0] = int(batch.present.sum())
        honest(self, batch, *rule)

    def telling(self: Trainer, step: int, rate: float) -> None:
        progress(self, step, rate)
        if "console" in sinks:
            self.board.say(f"{there[0]} records")
        else:
            self.board.public(self.name, step, {"records": float(there[0])})

    monkeypatch.setattr(module.SummedEngine, "accumulate", accumulate)
    monkeypatch.setattr(Trainer, "_progress", telling)
    (refuted,) = replayed(recipe).refuted
    assert refuted.startswith("what the public sees") and all(sink in refuted for sink in sinks)


def test_numbers_released_with_noise_move_by_at_most_their_bound(recipe: Path) -> None:
    config = json.loads(recipe.read_text())
    config["phases"][0]["privacy"]["release"] = [
        {"name": "loss", "bound": 8.0, "noise_multiplier": 5.0}, {"name": "clipped", "noise_multiplier": 5.0},
    ]  # fmt: skip
    recipe.write_text(json.dumps(config))
    report = replayed(recipe)
    assert report.refuted == [] and set(report.released) == {"loss", "clipped"}
    assert all(0 <= apart <= 1.001 for apart in report.released.values()) and report.released["loss"] > 0


def test_the_command_says_that_its_result_is_private(recipe: Path) -> None:
    command = [sys.executable, str(ROOT / "launch" / "audit.py"), "--replay", "--config", str(recipe), "--steps", "1"]
    done = forking.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("PRIVATE") and "ledger with its keyed digests" in done.stdout
    refused = forking.run([*command, "--record", "600"], env=environment(), capture_output=True, text=True)
    assert refused.returncode == 2 and "--record 600 is not among the 600 records" in refused.stderr


def test_probes_of_the_loss_move_by_at_most_their_bound(recipe: Path) -> None:
    """Every record takes part in every step, and the second one probes."""
    config = json.loads(recipe.read_text())
    (phase,) = config["phases"]
    phase["schedule"] = {"peak": 1e-2, "shape": "constant"}
    phase["data"].pop("expected_records")
    phase["privacy"] |= {"expected_batch": "all", "release": [], "loss_probes": {"every": 2, "bound": 0.01}}
    recipe.write_text(json.dumps(config))
    report = replayed(recipe)
    assert report.refuted == [] and set(report.released) == {"loss_slope", "loss_curvature"}
    assert all(0 < apart <= 1.001 for apart in report.released.values())
