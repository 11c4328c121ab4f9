"""What tests of whole runs share: a run of a few quick steps, and what must hold of any finished one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from murmuration.accounting.ledger.history import History
from murmuration.train.storage.checkpoint import Checkpoints
from tests.support import forking
from tests.support.launching import ROOT, environment
from tests.support.whole_history import steps_of

TOY_STEPS = 8
# Weights themselves are sharded, and none is so small that it is kept whole.
ZERO_3 = ("zero_optimization.stage=3", "zero_optimization.stage3_param_persistence_threshold=0")
SMALL_STEPS = 12
"""The steps of `small_config`."""


def toy(config: dict[str, Any]) -> None:
    """Fast, with a checkpoint at every other step, so that kills meet many of them; paths are dropped at random, and a
    step that is made again must drop the same."""
    config["model"] |= {"depth": 2, "drop_path": 0.3}
    for phase in config["phases"]:
        phase["data"]["reading"] = {"workers": 0}
    private = config["phases"][1]
    del private["evaluation"]
    private["steps"] = TOY_STEPS
    config["run"] |= {"checkpoint_every": 2, "keep_key": True}


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    loaded = Checkpoints.newest(run_dir / "checkpoints")
    assert loaded is not None
    return loaded.weights()


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not equal bit by bit."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def nothing_lost_and_nothing_twice(run_dir: Path, whole: Path) -> None:
    """After interruptions of the toy run: as if there had been none."""
    assert different(final_weights(run_dir), final_weights(whole)) == []
    history, straight = (History.read(folder / "ledger.jsonl")[0] for folder in (run_dir, whole))
    steps = steps_of(run_dir)
    assert [step_id.step for step_id in steps.opened] == list(range(1, TOY_STEPS + 1))
    assert steps == steps_of(whole)
    assert len(history.segments) == 1 and not history.faults
    assert history.epsilon() == straight.epsilon()
    assert not list((run_dir / "checkpoints").glob(".*")), "orphans were left"


def state_of(run_dir: Path) -> str:
    return json.loads((run_dir / "run_state.json").read_text())["status"]


def account(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch" / "account.py"), *arguments]
    return forking.run(command, capture_output=True, text=True, env=environment())
