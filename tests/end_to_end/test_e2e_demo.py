"""The demo as shipped: minutes on two cores, so in the slow group. It must learn, and stay within its budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import forking
from tests.support.launching import ROOT, Launch, environment


@pytest.mark.slow
def test_demo_learns_colours_within_its_budget(tmp_path: Path) -> None:
    prepare = [sys.executable, str(ROOT / "launch" / "prepare.py"), "demo"]
    forking.run(prepare, check=True, env=environment(), capture_output=True)
    code, output = Launch(ROOT / "ds_configs" / "demo.json", tmp_path, launcher="deepspeed").run()
    assert code == 0, output
    run_dir = tmp_path / "runs" / "demo"
    entries = [json.loads(line) for line in (run_dir / "logs" / "public.jsonl").read_text().splitlines()]
    colour = [entry["zero_shot_colour"] for entry in entries if "zero_shot_colour" in entry]
    assert colour[-1] >= 0.5 and colour[-1] > colour[0] + 0.2, colour
    verify = [sys.executable, str(ROOT / "launch" / "account.py"), "verify", str(run_dir), "--json"]
    verdict = json.loads(forking.run(verify, capture_output=True, text=True, check=True).stdout)
    assert verdict["epsilon"] <= 8 and verdict["objection"] is None
    gallery = [
        sys.executable, str(ROOT / "launch" / "evaluate.py"), "caption", str(run_dir),
        "--out", str(tmp_path / "captions"), "--config", str(ROOT / "ds_configs" / "demo.json"),
        "--data", str(ROOT / "demo_data" / "held_out"), "--public", "--records", "8",
    ]  # fmt: skip
    forking.run(gallery, check=True, capture_output=True)
    page = (tmp_path / "captions" / "result.html").read_text()
    assert page.count("<img") == 8 and "ε = 7.9998" in page
    certified = json.loads((run_dir / "certificate.json").read_text())["claim"]["epsilon"]
    assert abs(verdict["epsilon"] - certified) <= 1e-6
