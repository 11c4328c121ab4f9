"""What private training teaches an encoder at toy size: linear probes of captioner, masked autoencoder and small batch.

    python benchmarks/learning.py --tune --seeds 3 --out benchmarks/results/learning.json     # and the .png beside it

Each seed warms an encoder up on public textures, and from it trains three runs on private captioned shapes at ε = 8,
each with the noise calibrated to it: a captioner, a masked autoencoder of equal cost (FLOPs per record by
`train.planner_cost`, at the same expected batch), and the captioner with a logical batch 8 times smaller at the same
number of sampled records. A linear probe on public labelled pictures then tells colours and shapes apart. Runs go
through `launch/train.py` with keys from the operating system; a seed is that of the initial weights. `--tune` chooses
learning rates on another draw of shapes, which stands in for the private one, by the probe's fitting records alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from learning_report import compared, plot, spread, table, verdicts  # noqa: E402
from torch import Tensor  # noqa: E402

from accounting.verify import verify  # noqa: E402
from data.batches import BatchReader, DataSpec  # noqa: E402
from data.index import ShardIndex  # noqa: E402
from data.index import build as build_index  # noqa: E402
from data.shapes import COLOURS, SHAPES  # noqa: E402
from data.synthetic import shape_samples, write_shards  # noqa: E402
from evaluation.linear_probe import fit, pooled_tokens  # noqa: E402
from model.build import build, take_encoder  # noqa: E402
from model.encoder import Encoder  # noqa: E402
from train.checkpoint import Checkpoints  # noqa: E402
from train.config import Config  # noqa: E402
from train.planner import counted  # noqa: E402

EPSILON, SMALLER = 8.0, 8
CLASSES = {"label": len(COLOURS) * len(SHAPES), "colour": len(COLOURS), "shape": len(SHAPES)}
CHANCE = {f"{name}{labels}": 1 / count for labels in ("", "_few") for name, count in CLASSES.items()}
"""By what is reported: a probe fitted to all records for fitting, and one fitted to a few of them."""
MODEL = {
    "family": "captioner", "size": "custom", "image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2,
    "decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2, "mae_decoder_width": 32, "mae_decoder_depth": 1,
    "mae_decoder_heads": 2, "text_length": 16, "vocabulary": 64, "qkv_bias": True,
}  # fmt: skip
TRIED = {"caption": (4e-3, 1.2e-2), "mae": (4e-3, 1.2e-2)}
"""Peak learning rates that `--tune` tries; the small batch tries the captioner's own, and that over 8."""
CHOSEN = {"caption": 1.2e-2, "mae": 1.2e-2, "small": 1.2e-2}
"""What it chose; used without `--tune`."""
TUNING_SEED, TUNING_DRAW = 1000, 404
CHOSEN_BY = "colour"
"""At this size nothing learns shapes, not even a captioner without privacy, so colours decide."""


@dataclass(frozen=True)
class Size:
    """Of the experiment."""

    private: int = 20_000
    batch: int = 1000
    steps: int = 50
    textures: int = 10_000
    warm_batch: int = 256
    warm_steps: int = 150
    held_out: int = 4000
    fitted: int = 1500
    few: int = 300


@dataclass(frozen=True)
class Arm:
    objective: str
    batch: float
    steps: int
    peak: float


def arms(size: Size, peaks: dict[str, float]) -> dict[str, Arm]:
    """The masked autoencoder gets as many steps as its FLOPs per record allow."""
    caption = Arm("caption", size.batch, size.steps, peaks["caption"])
    steps = round(size.steps * flops("caption") / flops("mae"))
    small = Arm("caption", size.batch / SMALLER, size.steps * SMALLER, peaks["small"])
    return {"caption": caption, "mae": Arm("mae", size.batch, steps, peaks["mae"]), "small": small}


def phase(arm: Arm, data: Path, shards: str) -> dict[str, Any]:
    tokenizer = {"tokenizer": str(data / "tokenizer.json")} if arm.objective == "caption" else {}
    return {
        "name": "private", "objective": arm.objective,
        "data": {"source": "shards", "path": str(data / shards), "reading": {"workers": 0}, **tokenizer},
        "privacy": {
            "epsilon": EPSILON, "delta": "1/(2n)", "expected_batch": arm.batch,
            "clip": {"kind": "automatic", "norm": 1.0, "gamma": 0.01}, "noise_multiplier": None,
        },
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.005}},
        "schedule": {"peak": arm.peak, "warmup": arm.steps // 6, "shape": "constant"},
        "steps": arm.steps,
    }  # fmt: skip


def warm_phase(size: Size, data: Path) -> dict[str, Any]:
    return {
        "name": "warm-start", "objective": "mae", "batch": size.warm_batch, "steps": size.warm_steps,
        "data": {
            "source": "shards", "path": str(data / "textures"), "public": True, "augment": "random_resized_crop",
            "reading": {"workers": 0},
        },
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.005}},
        "schedule": {"peak": 1e-3, "warmup": 20, "shape": "cosine"},
    }  # fmt: skip


def config(phases: list[dict[str, Any]], run_dir: Path, seed: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 64, "zero_optimization": {"stage": 1}, "model": {**MODEL, "init_seed": seed},
        "phases": phases, "run": {"checkpoint_every": 10_000, "log_every": 10_000, "dir": str(run_dir)},
    }  # fmt: skip


def flops(objective: str) -> float:
    """Of one record in a private step: both passes and the clipping."""
    settings = Config.model_validate(config([phase(Arm(objective, 8, 1, 1.0), Path("."), "private")], Path("."), 0))
    return counted(settings, settings.phases[0])[0].private_flops


def prepare(folder: Path, size: Size, tuning: bool) -> None:
    command = [sys.executable, str(ROOT / "launch" / "prepare.py"), "demo", "--out", str(folder)]
    counts = {"--private": size.private, "--held-out": size.held_out, "--textures": size.textures}
    command += [str(each) for pair in counts.items() for each in pair]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if tuning and not (folder / "tuning" / "index").is_dir():
        build_index(write_shards(folder / "tuning", shape_samples(TUNING_DRAW, size.private, 32), 1000))


def train(folder: Path, name: str, phases: list[dict[str, Any]], seed: int) -> Path:
    """One finished run; one that is there already is not trained again."""
    run_dir, path = folder / name, folder / f"{name}.json"
    state = run_dir / "run_state.json"
    if state.is_file() and json.loads(state.read_text())["status"] == "done":
        return run_dir
    path.write_text(json.dumps(config(phases, run_dir, seed), indent=1))
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    # One thread: two get in each other's way at this width.
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "train.py"), "--config", str(path)],
        env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"training failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    return run_dir


class Judge:
    """Probes on public labelled pictures. Learning rates are chosen on those for fitting, not on those to test."""

    def __init__(self, data: Path, size: Size) -> None:
        spec = DataSpec(image_size=MODEL["image_size"], augment="center", labels=tuple(CLASSES))
        batch = BatchReader(ShardIndex.open(data / "held_out"), spec).read(np.arange(size.held_out), 0)
        assert bool(batch.present.all())
        self.images, self.labels = batch.inputs["images"], {name: batch.inputs[name] for name in CLASSES}
        self.few, self.fitted, self.all = size.few, size.fitted, size.held_out

    def __call__(self, encoder: Encoder) -> dict[str, float]:
        features, tested = pooled_tokens(encoder, self.images), slice(self.fitted, self.all)
        few = self._probed(features, self.few, tested)
        return self._probed(features, self.fitted, tested) | {f"{name}_few": each for name, each in few.items()}

    def tuning(self, encoder: Encoder) -> dict[str, float]:
        return self._probed(pooled_tokens(encoder, self.images), self.few, slice(self.few, self.fitted))

    def _probed(self, features: Tensor, fitted: int, tested: slice) -> dict[str, float]:
        found = {}
        for name, classes in CLASSES.items():
            labels = self.labels[name]
            found[name] = fit(features[:fitted], labels[:fitted], classes).accuracy(features[tested], labels[tested])
        return found


def encoder_of(run_dir: Path | None, seed: int) -> Encoder:
    """With the weights of the run's end, or of a random start."""
    settings = Config.model_validate(config([warm_phase(Size(), Path("."))], Path("."), seed))
    encoder = build(settings.model, "mae")
    if run_dir is not None:
        loaded = Checkpoints.newest(run_dir / "checkpoints")
        assert loaded is not None
        take_encoder(loaded.weights(), encoder)
    return encoder


class Experiment:
    def __init__(self, folder: Path, size: Size, tuning: bool) -> None:
        self.data, self.runs, self.size = folder / "data", folder / "runs", size
        self.runs.mkdir(parents=True, exist_ok=True)
        prepare(self.data, size, tuning)
        self.judge = Judge(self.data, size)

    def warm(self, seed: int) -> Path:
        return train(self.runs, f"warm-{seed}", [warm_phase(self.size, self.data)], seed)

    def private(self, name: str, arm: Arm, seed: int, shards: str = "private", tuning: bool = False) -> dict[str, Any]:
        """Trains from this seed's warm start and probes what came out."""
        source = {"source": "checkpoint", "path": str(self.warm(seed)), "public": True}
        began = time.perf_counter()
        start = {"name": "start", "objective": "mae", "data": source}
        run_dir = train(self.runs, f"{name}-{seed}", [start, phase(arm, self.data, shards)], seed)
        verdict = verify(run_dir)
        if verdict.objection is not None or not 0 < verdict.epsilon <= EPSILON:
            raise RuntimeError(f"{run_dir}: ε = {verdict.epsilon}, {verdict.objection or 'beyond the budget'}")
        judge = self.judge.tuning if tuning else self.judge
        found = judge(encoder_of(run_dir, seed)) | {"epsilon": verdict.epsilon}
        _show(name, seed, time.perf_counter() - began, found)
        return found | {"sigma": _sigma(run_dir)}

    def seed(self, seed: int, peaks: dict[str, float]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {"random": self.judge(encoder_of(None, seed))}
        found["warm"] = self.judge(encoder_of(self.warm(seed), seed))
        for name in ("random", "warm"):
            _show(name, seed, 0.0, found[name])
        return found | {name: self.private(name, arm, seed) for name, arm in arms(self.size, peaks).items()}

    def tune(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The best peak of each arm on the stand-in, and everything that was tried."""
        tried: list[dict[str, Any]] = []
        peaks = dict(CHOSEN)
        for name in ("caption", "mae", "small"):
            candidates = TRIED.get(name) or (peaks["caption"], peaks["caption"] / SMALLER)
            scores = {}
            for peak in candidates:
                arm = arms(self.size, peaks | {name: peak})[name]
                found = self.private(f"tuning-{name}-{peak:g}", arm, TUNING_SEED, "tuning", tuning=True)
                scores[peak] = found[CHOSEN_BY]
                tried.append({"arm": name, "peak": peak, **found})
            peaks[name] = max(scores, key=lambda peak: scores[peak])
        return peaks, tried


def _sigma(run_dir: Path) -> float:
    from accounting.history import History

    plans = History.read(run_dir / "ledger.jsonl")[0].plans
    return next(iter(plans.values())).noise_multiplier


def _show(name: str, seed: int, seconds: float, found: dict[str, float]) -> None:
    shown = {key: round(value, 3) for key, value in found.items()}
    print(f"{name:20} seed {seed}  {seconds:5.1f} s  {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tune", action="store_true", help="choose the learning rates anew, on a public stand-in")
    parser.add_argument("--work", type=Path, default=None, help="keeps data and runs, and goes on where they end")
    parser.add_argument("--out", type=Path, default=None, help="writes this JSON and a PNG beside it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = Size()
    with tempfile.TemporaryDirectory() as place:
        experiment = Experiment(arguments.work or Path(place), size, arguments.tune)
        peaks, tried = experiment.tune() if arguments.tune else (CHOSEN, [])
        runs = [experiment.seed(seed, peaks) for seed in range(arguments.seeds)]
    flags = " --tune" * arguments.tune
    differences = compared(runs, CHANCE, size.held_out - size.fitted)
    result = {
        "command": f"python benchmarks/learning.py{flags} --seeds {arguments.seeds}",
        "setting": {
            "size": asdict(size), "model": MODEL, "epsilon": EPSILON, "peaks": peaks,
            "arms": {name: asdict(arm) for name, arm in arms(size, peaks).items()},
            "flops_per_record": {objective: flops(objective) for objective in ("caption", "mae")},
            "chance": CHANCE,
        },
        "tuning": tried, "runs": runs, "spread": spread(runs, CHANCE),
        "compared": differences, "verdicts": verdicts(differences),
    }  # fmt: skip
    print(table(result))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        plot(result, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
