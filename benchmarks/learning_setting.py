"""The learning benchmark's model, sizes and runs, as configs of the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import ADAMW, AUTOMATIC

from murmuration.train.config.root import Config
from murmuration.train.planner.forecast import counted

EPSILON, SMALLER = 8.0, 16
CHEAP = {
    "family": "captioner", "size": "custom", "image_size": 32, "patch_size": 8, "width": 96, "depth": 2, "heads": 2,
    "decoder_width": 96, "decoder_depth": 1, "decoder_heads": 2, "mae_decoder_width": 96, "mae_decoder_depth": 1,
    "mae_decoder_heads": 2, "text_length": 16, "vocabulary": 64, "qkv_bias": True,
}  # fmt: skip
NANO = {"family": "captioner", "size": "nano", "image_size": 32, "patch_size": 8, "text_length": 14, "vocabulary": 64}


@dataclass(frozen=True)
class Size:
    """Sizes of the experiment."""

    private: int = 100_000
    tint: float = 60
    """Private shapes are on coloured backgrounds, public ones on grey."""
    batch: int = 2000
    steps: int = 50
    public: int = 20_000
    warm_batch: int = 256
    warm_steps: int = 300
    warm_peak: float = 1e-3
    fitted: int = 1500
    chosen_on: int = 4000
    tested: int = 10_000


@dataclass(frozen=True)
class Setting:
    model: dict[str, Any]
    size: Size
    tried: dict[str, tuple[float, ...]]
    """Peak learning rates that `--tune` tries, by arm."""
    chosen: dict[str, float]
    """The rates that it chose; used without `--tune`."""


SETTINGS = {
    "cheap": Setting(
        CHEAP, Size(),
        {"caption": (2.5e-3, 5e-3, 1e-2), "mae": (2e-2, 4e-2, 8e-2), "small": (1e-3, 2e-3, 4e-3)},
        {"caption": 5e-3, "mae": 4e-2, "small": 2e-3},
    ),
    # DP-Cap's nano, and ViP's masked autoencoder with the same encoder.
    "nano": Setting(
        NANO, Size(batch=1000, steps=40, warm_steps=200, warm_peak=5e-4),
        {"caption": (5e-4, 7e-4, 1.5e-3), "mae": (3e-4, 1e-3, 3e-3)},
        {"caption": 7e-4, "mae": 1e-3},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    objective: str
    batch: float
    steps: int
    peak: float
    """Peak learning rate."""


def arms(setting: Setting, peaks: dict[str, float]) -> dict[str, Arm]:
    """The arms that have a learning rate. The masked autoencoder's steps are chosen for equal cost in FLOPs."""
    size, model = setting.size, setting.model
    equal_cost = round(size.steps * flops(model, "caption") / flops(model, "mae"))
    sizes = {
        "mae": ("mae", size.batch, equal_cost),
        "small": ("caption", size.batch / SMALLER, size.steps * SMALLER),
        "caption": ("caption", size.batch, size.steps),
    }
    return {name: Arm(*each, peaks[name]) for name, each in sizes.items() if name in peaks}


def phase(arm: Arm, data: Path, shards: Path) -> dict[str, Any]:
    tokenizer = {"tokenizer": str(data / "tokenizer.json")} if arm.objective == "caption" else {}
    return {
        "name": "private", "objective": arm.objective,
        "data": {"source": "shards", "path": str(shards), "reading": {"workers": 0}, **tokenizer},
        "privacy": {
            "epsilon": EPSILON, "delta": "1/(2n)", "expected_batch": arm.batch,
            "clip": AUTOMATIC, "noise_multiplier": None,
        },
        "optimizer": ADAMW,
        "schedule": {"peak": arm.peak, "warmup": arm.steps // 6, "shape": "cosine"},
        "steps": arm.steps,
    }  # fmt: skip


def warm_phase(setting: Setting, data: Path) -> dict[str, Any]:
    """A warm start on synthetic captioned shapes, like `dpcap_init_pairs.json`."""
    size, model = setting.size, setting.model
    return {
        "name": "warm-start", "objective": "caption", "batch": size.warm_batch, "steps": size.warm_steps,
        "data": {
            "source": "synthetic", "kind": "shapes", "records": size.public, "size": model["image_size"],
            "reading": {"workers": 0}, "tokenizer": str(data / "tokenizer.json"),
        },
        "optimizer": ADAMW,
        "schedule": {"peak": size.warm_peak, "warmup": 20, "shape": "cosine"},
    }  # fmt: skip


def config(model: dict[str, Any], phases: list[dict[str, Any]], run_dir: Path, seed: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 64, "zero_optimization": {"stage": 1}, "model": {**model, "init_seed": seed},
        "phases": phases, "run": {"checkpoint_every": 10_000, "log_every": 10_000, "dir": str(run_dir)},
    }  # fmt: skip


def flops(model: dict[str, Any], objective: str) -> float:
    """FLOPs of one record in a private step: both passes and the clipping."""
    settings = Config.model_validate(
        config(model, [phase(Arm(objective, 8, 1, 1.0), Path("."), Path("."))], Path("."), 0)
    )
    return counted(settings, settings.phases[0])[0].private_flops
