"""What mechanisms of noise and draw teach at toy size, at equal ε: Poisson draws with independent noise, the same with
noise that is correlated over blocks, and a random allocation.

    python benchmarks/mechanisms.py --seeds 3 --jobs 2 --out benchmarks/results/mechanisms.json

A small vision transformer learns to name shape and colour of synthetic pictures (32 classes), and a small captioner to
describe them, from random weights, by AdamW and by SGD with momentum. Only the mechanism differs: ε, records, expected
batch and steps are the same. Each arm's peak learning rate is chosen, out of as many as every other's, on another draw
of pictures, which stands in for public records of the same kind; the seeds that count then set initial weights, and all
keys come from the operating system. What counts is loss and accuracy on public pictures after the last step.
It does not show what mechanisms do to a large model, to a pretrained one or over more epochs than these.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from learning import prepare as prepare_captions  # noqa: E402
from learning_setting import Size as Captions  # noqa: E402
from runs import ADAMW, AUTOMATIC, last_measured, mean_and_deviation, study_arguments, train, verified_epsilon  # noqa: E402

from murmuration.data.index.shard_index import build as build_index  # noqa: E402
from murmuration.data.synthetic.index import shape_samples, write_shards  # noqa: E402

EPSILON, SIDE = 8.0, 32
MECHANISMS: dict[str, dict[str, Any]] = {
    "independent": {},
    "blocks of 4": {"noise": {"kind": "banded", "bands": 4}},
    "blocks of 12": {"noise": {"kind": "banded", "bands": 12}},
    "allocation": {"sampling": "allocation"},
}
WIDTHS = {"image_size": SIDE, "patch_size": 8, "width": 64, "depth": 2, "heads": 2}
TEXT = {"decoder_width": 64, "decoder_depth": 1, "decoder_heads": 2, "text_length": 16, "vocabulary": 64}
MODELS = {
    "classify": {"family": "classifier", "size": "custom", **WIDTHS, "classes": 32},
    "caption": {"family": "captioner", "size": "custom", **WIDTHS, **TEXT},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": ADAMW,
    "SGD": {"type": "SGD", "params": {"momentum": 0.9}},
}
PEAKS = {
    ("classify", "AdamW"): (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2), ("classify", "SGD"): (0.5, 1.0, 2.0, 4.0),
    ("caption", "AdamW"): (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2), ("caption", "SGD"): (0.125, 0.25, 0.5, 1.0),
}  # fmt: skip
"""The same for every mechanism, and so many that the best is not the first or the last."""
TUNING_SEED, FIRST_SEED = 1000, 10


@dataclass(frozen=True)
class Size:
    """Three epochs in whole steps, so that an allocation has the same batch as Poisson draws."""

    records: int = 6_000
    tested: int = 4_000
    batch: int = 300
    steps: int = 60


SMOKE = Size(records=480, tested=64, batch=40, steps=12)


@dataclass(frozen=True)
class Arm:
    objective: str
    optimizer: str
    mechanism: str

    @property
    def name(self) -> str:
        return f"{self.objective}-{self.optimizer}-{self.mechanism.replace(' ', '-')}"


def prepare(folder: Path, size: Size) -> None:
    """Captioned and labelled pictures of three draws, and the tokenizer of their captions."""
    for draw, (name, count) in enumerate(
        (("private", size.records), ("stand-in", size.records), ("held_out", size.tested))
    ):
        if not (folder / name / "index").is_dir():
            build_index(write_shards(folder / name, shape_samples(700 + draw, count, SIDE, labels=True), 1000))
    if not (folder / "demo" / "tokenizer.json").is_file():
        prepare_captions(folder / "demo", Captions(private=100, fitted=10, chosen_on=10, tested=10))


def config(data: Path, shards: str, arm: Arm, peak: float, seed: int, size: Size, run_dir: Path) -> dict[str, Any]:
    told = {"tokenizer": str(data / "demo" / "tokenizer.json")} if arm.objective == "caption" else {"label": "label"}
    phase = {
        "name": "private", "objective": arm.objective, "steps": size.steps,
        "data": {"source": "shards", "path": str(data / shards), "reading": {"workers": 0}, **told},
        "privacy": {
            "epsilon": EPSILON, "expected_batch": size.batch, **MECHANISMS[arm.mechanism],
            "clip": AUTOMATIC,
        },
        "evaluation": {"path": str(data / "held_out"), "public": True, "records": size.tested},
        "optimizer": OPTIMIZERS[arm.optimizer],
        "schedule": {"peak": peak, "warmup": size.steps // 6, "shape": "cosine"},
    }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": 64, "model": {**MODELS[arm.objective], "init_seed": seed}, "phases": [phase],
        "run": {"engine": "local", "checkpoint_every": size.steps, "log_every": 10_000, "dir": str(run_dir)},
    }  # fmt: skip


class Study:
    def __init__(self, folder: Path, size: Size, jobs: int) -> None:
        self._data, self._runs, self._size, self._jobs = folder / "data", folder / "runs", size, jobs
        self._runs.mkdir(parents=True, exist_ok=True)
        prepare(self._data, size)

    def __call__(self, arms: list[Arm], seeds: list[int]) -> list[dict[str, Any]]:
        tuning = [(arm, peak, TUNING_SEED, "stand-in") for arm in arms for peak in PEAKS[arm.objective, arm.optimizer]]
        tried = self._at_once(tuning)
        best = {
            arm: min((row for row in tried if row["arm"] == arm.name), key=lambda row: row["loss"])["peak"]
            for arm in arms
        }
        told = self._at_once([(arm, best[arm], seed, "private") for arm in arms for seed in seeds])
        return [{**row, "tuning": True} for row in tried] + [{**row, "tuning": False} for row in told]

    def _at_once(self, todo: list[tuple[Arm, float, int, str]]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(self._jobs) as pool:
            return list(pool.map(lambda each: self._measured(*each), todo))

    def _measured(self, arm: Arm, peak: float, seed: int, shards: str) -> dict[str, Any]:
        name = f"{arm.name}-{peak:g}-{seed}"
        raw = config(self._data, shards, arm, peak, seed, self._size, self._runs / name)
        run_dir = train(self._runs, name, raw)
        epsilon, found = verified_epsilon(run_dir, EPSILON), last_measured(run_dir)
        return {
            "arm": arm.name, **asdict(arm), "peak": peak, "seed": seed, "epsilon": epsilon,
            "loss": found["public_loss"], "top_1": found.get("top_1"),
        }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | optimizer | mechanism | peak | public loss | top-1 | ε |", "|---|---|---|---|---|---|---|"]
    told = [row for row in rows if not row["tuning"]]
    for name in dict.fromkeys(row["arm"] for row in told):
        own = [row for row in told if row["arm"] == name]
        cells = [own[0]["objective"], own[0]["optimizer"], own[0]["mechanism"], f"{own[0]['peak']:g}"]
        for measure in ("loss", "top_1"):
            values = [row[measure] for row in own if row[measure] is not None]
            cells.append(mean_and_deviation(values) if values else "")
        lines.append(f"| {' | '.join(cells)} | {max(row['epsilon'] for row in own):.3f} |")
    return "\n".join(lines)


def main() -> None:
    asked = study_arguments(__doc__).parse_args()
    size = SMOKE if asked.smoke else Size()
    arms = [Arm(*each) for each in itertools.product(MODELS, OPTIMIZERS, MECHANISMS)]
    with tempfile.TemporaryDirectory() as place:
        seeds = list(range(FIRST_SEED, FIRST_SEED + asked.seeds))
        rows = Study(asked.work or Path(place), size, asked.jobs)(arms, seeds)
    print(table(rows))
    if asked.out is not None:
        setting = {"epsilon": EPSILON, "size": asdict(size), "models": MODELS, "optimizers": OPTIMIZERS}
        setting |= {"mechanisms": MECHANISMS, "peaks": {" ".join(pair): peaks for pair, peaks in PEAKS.items()}}
        command = f"python benchmarks/mechanisms.py --seeds {asked.seeds} --jobs {asked.jobs}"
        asked.out.write_text(json.dumps({"command": command, **setting, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
