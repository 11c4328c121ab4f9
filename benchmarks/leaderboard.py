"""What was measured at each commit, from the results that were committed: `python benchmarks/leaderboard.py`.

Writes results/leaderboard.json, of which results_page.py makes leaderboard.md. Results that are not committed yet stand
last, without a commit; the next run names it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OUT = RESULTS / "leaderboard.json"


def clip(found: Any) -> dict[str, float]:
    """Time of a private step in that of a plain one, and records each second, of every model."""
    ours = {row["model"]: row for row in found["rows"] if row["engine"] == "ours" and "time_ratio" in row}
    return {
        f"{model}, {what}": row[key] for what, key in (("ratio", "time_ratio"), ("records/s", "records_per_second"))
        for model, row in ours.items()
    }  # fmt: skip


def study(found: Any) -> dict[str, float]:
    """The first measure of each arm at ε = 1."""
    rows = [row for row in found["study"]["rows"] if row["place"] == 1]
    return {f"{row['arm']}, ε = 1": next(iter(row["measures"].values()))["value"] for row in rows}


def demo(found: Any) -> dict[str, float]:
    """Medians of the runs."""
    return {name: statistics.median(run[key] for run in found["runs"]) for name, key in DEMO.items()}


DEMO = {"CPU seconds": "cpu_seconds", "colour": "colour", "shape": "shape", "ε": "epsilon"}
READ: dict[str, Callable[[Any], dict[str, float]]] = {
    "clip_quick_cpu.json": clip, "studies/mehta_one_step_cifar.json": study,
    "studies/mehta_epsilon_cifar.json": study, "demo.json": demo,
}  # fmt: skip


def rows(name: str) -> Iterator[dict[str, Any]]:
    """From the first commit to the last; a commit that changed no number has none."""
    file, last = RESULTS / name, {}
    for line in _git("log", "--reverse", "--format=%h %as", "--", str(file)).splitlines():
        commit, date = line.split()
        numbers = numbers_in(name, _git("show", f"{commit}:{file.relative_to(ROOT)}"))
        if numbers != last:
            yield {"commit": commit, "date": date, "results": name, "numbers": numbers}
        last = numbers
    if (numbers := numbers_in(name, file.read_text())) != last:
        yield {"commit": None, "date": None, "results": name, "numbers": numbers}


def numbers_in(name: str, text: str) -> dict[str, float]:
    return {key: float(f"{number:.4g}") for key, number in READ[name](json.loads(text)).items()}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    OUT.write_text(json.dumps([row for name in READ for row in rows(name)], indent=1, ensure_ascii=False) + "\n")
