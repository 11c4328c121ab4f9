"""What studies of training share: how a run is made and verified, and how several of them are told in a table."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from murmuration.accounting.certificate.verify import verify  # noqa: E402

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.005}}
AUTOMATIC: dict[str, Any] = {"kind": "automatic", "norm": 1.0, "gamma": 0.01}


def study_arguments(about: str | None) -> argparse.ArgumentParser:
    """What every study of several runs can be asked for."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--smoke", action="store_true", help="toy sizes: only shows that the program runs")
    parser.add_argument("--work", type=Path, default=None, help="keep data and runs here, and reuse what is there")
    parser.add_argument("--out", type=Path, default=None, help="write this JSON, and a plot beside it if there is one")
    return parser


def train(folder: Path, name: str, raw: dict[str, Any]) -> Path:
    """One finished run; an existing one is not trained again."""
    run_dir, path = Path(raw["run"]["dir"]), folder / f"{name}.json"
    state = run_dir / "run_state.json"
    if state.is_file() and json.loads(state.read_text())["status"] == "done":
        return run_dir
    path.write_text(json.dumps(raw, indent=1))
    began = time.perf_counter()
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    # One thread: in models this small, two threads get in each other's way.
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(path)],
        env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"training failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    print(f"{name:28} {time.perf_counter() - began:6.1f} s", flush=True)
    return run_dir


def verified_epsilon(run_dir: Path, budget: float) -> float:
    """What the run's own ledger says that it spent; an error if that is not within the budget."""
    verdict = verify(run_dir)
    if verdict.objection is not None or not 0 < verdict.epsilon <= budget:
        raise RuntimeError(f"{run_dir}: ε = {verdict.epsilon}, {verdict.objection or 'beyond the budget'}")
    return verdict.epsilon


def last_measured(run_dir: Path) -> dict[str, float]:
    """What the run measured of public records at its last checkpoint."""
    return json.loads((run_dir / "run_state.json").read_text())["measured"]


def deviation(values: Sequence[float]) -> float:
    """Over seeds; 0 for a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def mean_and_deviation(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {deviation(values):.3f}"
