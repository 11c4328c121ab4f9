"""`make demo` several times, each in a fresh clone: seconds of the processor, and what it printed.

    python benchmarks/demo.py --out benchmarks/results/demo.json

The clones share .venv. README has the medians, `leaderboard.py` shows them by commit.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRINTED = {
    "colour": r"zero-shot colour: ([\d.]+)", "colour_before": r"zero-shot colour: .*before private: ([\d.]+)",
    "shape": r"zero-shot shape: ([\d.]+)", "shape_before": r"zero-shot shape: .*before private: ([\d.]+)",
    "epsilon": r"final ε = ([\d.]+)",
}  # fmt: skip


def run(folder: Path) -> dict[str, float]:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    (ROOT / ".venv" / ".ready").touch()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(["make", "demo"], cwd=folder, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {name: float(re.findall(pattern, done.stdout)[-1]) for name, pattern in PRINTED.items()}
    assert "all that can be recomputed was checked" in done.stdout
    return found | {"cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = []
    for number in range(given.runs):
        with tempfile.TemporaryDirectory() as folder:
            found.append(run(Path(folder) / "demo"))
        print(f"{number + 1}: {found[-1]}", flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps({"runs": found}, indent=1) + "\n")
    print("medians:", {name: round(statistics.median(each[name] for each in found), 4) for name in found[0]})


if __name__ == "__main__":
    main()
