"""What several views of a record teach a classifier at toy size, at equal ε: `privacy.views` 1, 8 and 16.

    python benchmarks/views.py --seeds 3 --out benchmarks/results/views.json --plot benchmarks/results/views.png

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runs import ADAMW, AUTOMATIC, last_measured, mean_and_deviation, train, verified_epsilon  # noqa: E402

from murmuration.data.index.shard_index import Wanted  # noqa: E402
from murmuration.data.index.shard_index import build as build_index  # noqa: E402
from murmuration.data.synthetic.index import Sample, shape_samples, write_shards  # noqa: E402

EPSILON, VIEWS = 8.0, (1, 8, 16)
MODEL = {
    "family": "classifier", "size": "custom", "image_size": 32, "patch_size": 8, "width": 64, "depth": 1, "heads": 2,
    "classes": 32,
}  # fmt: skip
PER_PATIENT = 4
"""Records that have the same `patient`, each a picture of its own."""


@dataclass(frozen=True)
class Size:
    private: int = 8_000
    tested: int = 2_000
    batch: int = 256
    steps: int = 40
    peak: float = 3e-3
    rows: int = 256
    """Rows of a micro-batch: K views make 1/K as many records."""


SMOKE = Size(private=300, tested=64, batch=20, steps=2, rows=16)


def prepare(folder: Path, size: Size) -> None:
    """Labelled shapes, of two draws."""
    for draw, (name, count) in enumerate((("private", size.private), ("held_out", size.tested))):
        if not (folder / name / "index").is_dir():
            samples = map(of_patients, shape_samples(draw, count, MODEL["image_size"], labels=True))
            build_index(write_shards(folder / name, samples, 1000), wanted=Wanted(unit="patient"))


def of_patients(sample: Sample) -> Sample:
    return replace(sample, labels={**(sample.labels or {}), "patient": int(sample.key) // PER_PATIENT})


def config(data: Path, size: Size, seed: int, privacy: dict[str, Any], rows: int = 1, **more: Any) -> dict[str, Any]:
    """`rows` of a record or unit; `privacy` and what else the section of data has are what an arm is about."""
    phase = {
        "name": "private", "objective": "classify", "steps": size.steps,
        "data": {
            "source": "shards", "path": str(data / "private"), "label": "label", "augment": "random_resized_crop",
            "reading": {"workers": 0}, **more,
        },
        "privacy": {"epsilon": EPSILON, "expected_batch": size.batch, "clip": AUTOMATIC, **privacy},
        "evaluation": {"path": str(data / "held_out"), "public": True, "records": size.tested},
        "optimizer": ADAMW,
        "schedule": {"peak": size.peak, "warmup": size.steps // 6, "shape": "cosine"},
    }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": max(1, size.rows // rows), "model": {**MODEL, "init_seed": seed},
        "phases": [phase], "run": {"engine": "local", "checkpoint_every": size.steps, "log_every": 10_000},
    }  # fmt: skip


def measured(runs: Path, arm: str, seed: int, made: dict[str, Any]) -> dict[str, Any]:
    """The run's ε of its ledger, and what its last checkpoint says of public pictures."""
    name = f"{arm.replace(' ', '-')}-seed-{seed}"
    made["run"]["dir"] = str(runs / name)
    run_dir = train(runs, name, made)
    epsilon = verified_epsilon(run_dir, made["phases"][0]["privacy"]["epsilon"])
    found = last_measured(run_dir)
    return {
        "arm": arm, "seed": seed, "epsilon": epsilon, "top_1": found["top_1"], "loss": found["public_loss"],
        "run": name,
    }  # fmt: skip


def arms_of(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {arm: [row for row in rows if row["arm"] == arm] for arm in dict.fromkeys(row["arm"] for row in rows)}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| arm | top-1 | public loss | ε |", "|---|---|---|---|"]
    for arm, own in arms_of(rows).items():
        cells = [mean_and_deviation([row[name] for row in own]) for name in ("top_1", "loss")]
        lines.append(f"| {arm} | {' | '.join(cells)} | {max(row['epsilon'] for row in own):.3f} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A dot for each seed, and a line for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3))
    for place, own in enumerate(arms_of(rows).values()):
        values = [row["loss"] for row in own]
        axis.plot([place] * len(values), values, "o", color="tab:blue", alpha=0.7)
        axis.hlines(statistics.mean(values), place - 0.25, place + 0.25, color="tab:orange")
    axis.set_xticks(range(len(arms_of(rows))), list(arms_of(rows)))
    axis.set_ylabel("loss on public pictures")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def study(about: str | None, arms: Callable[[Path, Size, int], Iterable[dict[str, Any]]]) -> None:
    """The command line of a study: `arms` makes the runs of one seed."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="toy sizes: only shows that the program runs")
    parser.add_argument("--work", type=Path, default=None, help="keep data and runs here, and reuse what is there")
    parser.add_argument("--out", type=Path, default=None, help="write this JSON")
    parser.add_argument("--plot", type=Path, default=None, help="draw this picture")
    asked = parser.parse_args()
    size = SMOKE if asked.smoke else Size()
    with tempfile.TemporaryDirectory() as place:
        folder = asked.work or Path(place)
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        prepare(folder / "data", size)
        rows = [row for seed in range(asked.seeds) for row in arms(folder, size, seed)]
    print(table(rows))
    if asked.out is not None:
        result = {"epsilon": EPSILON, "model": MODEL, "size": asdict(size), "runs": rows}
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    if asked.plot is not None:
        plot(rows, asked.plot)


def arms(folder: Path, size: Size, seed: int) -> Iterator[dict[str, Any]]:
    for views in VIEWS:
        made = config(folder / "data", size, seed, {"views": views}, rows=views)
        yield measured(folder / "runs", f"{views} views" if views > 1 else "1 view", seed, made)


if __name__ == "__main__":
    study(__doc__, arms)
