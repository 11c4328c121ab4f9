"""Adaptive clipping through real launches: stopped and resumed as if never stopped; killed, with nothing told twice."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmuration.accounting.certificate.verify import verify
from tests.support.launching import TIMEOUT, Launch, ledger_lines, opened_steps, wait_for
from tests.support.runs import final_weights

Make = Callable[..., tuple[Launch, Path]]
SIGMA, FIRST, RATE, QUANTILE = 2.0, 3.0, 0.5, 0.7


def adaptive(config: dict[str, Any]) -> None:
    clip = {"kind": "flat", "norm": FIRST, "adaptive": {"quantile": QUANTILE, "learning_rate": RATE}}
    config["phases"][1]["privacy"] |= {"clip": clip, "noise_multiplier": SIGMA, "release": []}
    config["run"] |= {"checkpoint_every": 4}


def norms(run_dir: Path) -> list[tuple[int, float]]:
    """(segment, C_t) of every step, after a loop over the shares that knows nothing of the package found the same."""
    found, shares = [], {}
    began = {line["number"]: line["from_step"] for line in ledger_lines(run_dir) if line["kind"] == "segment"}
    for line in ledger_lines(run_dir):
        if line["kind"] == "commit":
            shares[line["segment"], line["step"]] = min(1.0, max(0.0, line["share"]))
        if line["kind"] == "open":
            segment, norm = line["segment"], FIRST
            for step in range(1, line["step"]):
                own = segment if step > began[segment] else 0
                norm *= math.exp(RATE * (shares[own, step] - (1 - QUANTILE)))
            assert line["facts"]["noise"]["std"] == pytest.approx(SIGMA * norm, rel=1e-12)
            assert line["facts"]["clipping"]["sensitivity"] == pytest.approx(norm, rel=1e-12)
            found.append((segment, norm))
    return found


@pytest.mark.slow
def test_stopped_adaptive_clipping_ends_where_it_would_have_and_a_kill_begins_a_new_segment(launch: Make) -> None:
    whole, whole_dir = launch("whole", adaptive)
    code, output = whole.run()
    assert code == 0, output
    assert len({norm for _, norm in norms(whole_dir)}) == 12 == len(opened_steps(whole_dir))
    assert verify(whole_dir).epsilon > 0

    stopped, stopped_dir = launch("stopped", adaptive)
    process = stopped.start(hold_after_opened=6)
    wait_for(lambda: 6 in opened_steps(stopped_dir), process)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=TIMEOUT)
    code, output = stopped.run()
    assert code == 0, output
    assert norms(stopped_dir) == norms(whole_dir)
    first, second = final_weights(whole_dir), final_weights(stopped_dir)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    killed, killed_dir = launch("killed", adaptive)
    process = killed.start(hold_after_opened=7)
    wait_for(lambda: 7 in opened_steps(killed_dir), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=TIMEOUT)
    code, output = killed.run()
    assert code == 0, output
    reasons = [line["reason"] for line in ledger_lines(killed_dir) if line["kind"] == "segment"]
    assert len(reasons) == 2 and "weights that were lost after step 4" in reasons[1]
    assert len(norms(killed_dir)) >= 14, "steps whose shares were told stay charged"
    assert verify(killed_dir).claimed_because is not None
    claim = json.loads((killed_dir / "certificate.json").read_text())["claim"]
    assert "new segment" in claim["claimed_because"]
