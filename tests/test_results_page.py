"""docs/results.md says what the committed studies found, and what was computed again beside them."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text()


def script(name: str = "results_page") -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_studies_give(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "results_page.py")]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert made.stdout == PAGE, "run: python benchmarks/results_page.py > docs/results.md"
    leaderboard = (ROOT / "benchmarks" / "leaderboard.md").read_text()
    remedy = "run: python benchmarks/results_page.py --by-commit > benchmarks/leaderboard.md"
    assert script().by_commit() == leaderboard, remedy


def test_every_measure_along_an_axis_has_a_table_or_with_one_arm_a_column() -> None:
    measures = {"loss": {"value": 1.5, "sd": 0.25}, "top-1": {"value": 0.5, "sd": 0.125}}
    rows = [{"arm": "captioner", "place": place, "runs": 3, "measures": measures} for place in (100, 400)]
    found = {"axis": {"label": "batch"}, "rows": rows}
    told = script().tables(found)
    assert "| batch | loss | top-1 |" in told and told.count("| 400 | 1.500 ± 0.250 | 0.500 ± 0.125 |") == 1
    found["rows"] = [*rows, {"arm": "autoencoder", "place": 100, "runs": 3, "measures": measures}]
    told = script().tables(found)
    assert told.count("| batch | captioner | autoencoder |") == 2 and told.count("| 400 | 1.500 ± 0.250 | – |") == 1
    assert told.index("loss, 3 runs each:") < told.index("top-1, 3 runs each:") < told.index("| 100 | 0.500 ± 0.125 |")


def test_the_leaderboard_ends_with_the_results_at_hand() -> None:
    read = script("leaderboard")
    newest = {row["results"]: row["numbers"] for row in json.loads(read.OUT.read_text())}
    for name in read.READ:
        found = read.numbers_in(name, (read.RESULTS / name).read_text())
        assert newest[name] == found, "run: python benchmarks/leaderboard.py"


def test_numpy_and_scikit_learn_found_what_the_page_says_and_the_study_within_its_scatter() -> None:
    again = json.loads((ROOT / "benchmarks" / "results" / "real_heads.json").read_text())
    study = json.loads((ROOT / "benchmarks" / "results" / "studies" / "mehta_one_step_cifar.json").read_text())["study"]
    ours = {(row["arm"], row["place"]): row["measures"]["top-1"] for row in study["rows"]}
    told = [
        float(number)
        for number in re.findall(r"0\.\d{3}\b", PAGE.partition("were computed again")[2].partition("\n## ")[0])
    ]
    for row in again:
        assert row["head"] == "ridge, 1" or any(abs(number - row["top_1"]) < 6e-4 for number in told), row
        if row["epsilon"] is not None:
            mine = ours[row["head"], row["epsilon"]]
            scatter = 3 * math.hypot(mine["sd"], row["sd"]) + 1e-3
            assert mine["value"] == pytest.approx(row["top_1"], abs=scatter)


@pytest.mark.parametrize(
    ("study", "again", "name", "rows"),
    [
        ("mehta_batch_cifar", "real_epochs", lambda row: f"{row['arm']}, {row['place']}", 3),
        ("mehta_ablations_cifar", "real_ablations", lambda row: row["arm"], 5),
        ("mehta_epsilon_cifar", "real_epsilon", lambda row: row["place"], 8),
    ],
)
def test_numpy_with_the_noise_of_dp_accounting_finds_each_table_within_its_scatter(
    study: str, again: str, name: Callable[[Any], Any], rows: int
) -> None:
    results = ROOT / "benchmarks" / "results"
    found = json.loads((results / "studies" / f"{study}.json").read_text())["study"]["rows"]
    ours = {name(row): row["measures"]["top-1"] for row in found}
    theirs = json.loads((results / f"{again}.json").read_text())
    assert len(theirs) == rows
    for row in theirs:
        mine = ours[row["epsilon"] if again == "real_epsilon" else row["head"]]
        assert mine["value"] == pytest.approx(row["top_1"], abs=3 * math.hypot(mine["sd"], row["sd"]) + 1e-3)


def test_pytorch_alone_trains_a_network_from_scratch_as_well_as_the_study() -> None:
    results = ROOT / "benchmarks" / "results"
    study = json.loads((results / "studies" / "body_then_head.json").read_text())["study"]
    ours = {row["arm"]: row["measures"]["top-1"] for row in study["rows"]}
    (again,) = json.loads((results / "real_scratch.json").read_text())
    mine = ours["private alone"]
    assert again["steps"] == 30 and len(again["runs"]) >= 3
    assert mine["value"] == pytest.approx(again["top_1"], abs=3 * math.hypot(mine["sd"], again["sd"]) + 1e-3)
