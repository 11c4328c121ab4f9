"""What several views of a record teach a classifier at toy size, at equal ε: `privacy.views` 1, 8 and 16.

    python benchmarks/views.py --seeds 3 --out benchmarks/results/views.json

A small vision transformer learns shape and colour of synthetic pictures (32 classes) from random weights, with random
crops, at the same ε, expected batch, steps and peak learning rate; only K differs. Runs use `launch/train.py` with keys
from the operating system; a seed only sets the initial weights. What is told is the accuracy on public pictures of the
last checkpoint. It does not show what views do to a pretrained model, nor at a learning rate chosen for each K,
nor at equal computing: K views cost K times as much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from learning import train  # noqa: E402

from murmuration.accounting.certificate.verify import verify  # noqa: E402
from murmuration.data.index.shard_index import Wanted  # noqa: E402
from murmuration.data.index.shard_index import build as build_index  # noqa: E402
from murmuration.data.synthetic.index import Sample, shape_samples, write_shards  # noqa: E402

EPSILON, VIEWS = 8.0, (1, 8, 16)
MODEL = {
    "family": "classifier", "size": "custom", "image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "heads": 2,
    "classes": 32,
}  # fmt: skip
PER_PATIENT = 4
"""Records that have the same `patient`, each a picture of its own."""


@dataclass(frozen=True)
class Size:
    private: int = 12_000
    tested: int = 2_000
    batch: int = 400
    steps: int = 60
    peak: float = 2e-3
    rows: int = 256
    """Of a micro-batch: K views make 1/K as many records."""


SMOKE = Size(private=300, tested=64, batch=20, steps=2, rows=16)


def prepare(folder: Path, size: Size) -> None:
    """Labelled shapes, of two draws."""
    for draw, (name, count) in enumerate((("private", size.private), ("held_out", size.tested))):
        if not (folder / name / "index").is_dir():
            samples = map(of_patients, shape_samples(draw, count, MODEL["image_size"], labels=True))
            build_index(write_shards(folder / name, samples, 1000), wanted=Wanted(unit="patient"))


def of_patients(sample: Sample) -> Sample:
    return replace(sample, labels={**(sample.labels or {}), "patient": int(sample.key) // PER_PATIENT})


def config(data: Path, size: Size, views: int, seed: int, run_dir: Path) -> dict[str, Any]:
    phase = {
        "name": "private", "objective": "classify", "steps": size.steps,
        "data": {
            "source": "shards", "path": str(data / "private"), "label": "label", "augment": "random_resized_crop",
            "reading": {"workers": 0},
        },
        "privacy": {
            "epsilon": EPSILON, "expected_batch": size.batch, "views": views,
            "clip": {"kind": "automatic", "norm": 1.0, "gamma": 0.01},
        },
        "evaluation": {"path": str(data / "held_out"), "public": True, "records": size.tested},
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.005}},
        "schedule": {"peak": size.peak, "warmup": size.steps // 6, "shape": "cosine"},
    }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": max(1, size.rows // views), "model": {**MODEL, "init_seed": seed},
        "phases": [phase],
        "run": {"engine": "local", "checkpoint_every": size.steps, "log_every": 10_000, "dir": str(run_dir)},
    }  # fmt: skip


def measured(data: Path, runs: Path, size: Size, views: int, seed: int) -> dict[str, Any]:
    name = f"views-{views}-seed-{seed}"
    run_dir = train(runs, name, config(data, size, views, seed, runs / name))
    verdict = verify(run_dir)
    if verdict.objection is not None or not 0 < verdict.epsilon <= EPSILON:
        raise RuntimeError(f"{run_dir}: ε = {verdict.epsilon}, {verdict.objection or 'beyond the budget'}")
    found = json.loads((run_dir / "run_state.json").read_text())["measured"]
    return {
        "views": views,
        "seed": seed,
        "epsilon": verdict.epsilon,
        "top_1": found["top_1"],
        "loss": found["public_loss"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| views | top-1 | public loss | ε |", "|---|---|---|---|"]
    for views in sorted({row["views"] for row in rows}):
        own = [row for row in rows if row["views"] == views]
        cells = []
        for name in ("top_1", "loss"):
            values = [row[name] for row in own]
            cells.append(f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f}")
        lines.append(f"| {views} | {' | '.join(cells)} | {max(row['epsilon'] for row in own):.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--views", type=int, nargs="+", default=list(VIEWS))
    parser.add_argument("--smoke", action="store_true", help="toy sizes: only shows that the program runs")
    parser.add_argument("--work", type=Path, default=None, help="keep data and runs here, and reuse what is there")
    parser.add_argument("--out", type=Path, default=None, help="write this JSON")
    asked = parser.parse_args()
    size = SMOKE if asked.smoke else Size()
    with tempfile.TemporaryDirectory() as place:
        folder = asked.work or Path(place)
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        prepare(folder / "data", size)
        rows = [
            measured(folder / "data", folder / "runs", size, views, seed)
            for seed in range(asked.seeds)
            for views in asked.views
        ]
    result = {"epsilon": EPSILON, "model": MODEL, "size": asdict(size), "runs": rows}
    print(table(rows))
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
