"""What the parts of the GPU benchmark share: cases whose results are kept as they come, models, engines and clocks."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from murmuration.data.draw.micro_batch import MicroBatch
from murmuration.model.build import Objective, build
from murmuration.model.settings import ModelSettings, Shape
from murmuration.train.clip.bookkeeping import BookKeepingClip
from murmuration.train.clip.rule import ClipRule, rounding_allowance
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.core import Computation, clipping_engine
from murmuration.train.distributed.ranks import Alone
from murmuration.train.engines.choose import EngineSettings, make_engine
from murmuration.train.engines.forward import PlainForward
from murmuration.train.engines.local import LocalEngine
from murmuration.train.optim.optimizers import make_optimizer
from murmuration.train.self_test.probes import synthetic_batch

Found = dict[str, Any]
OBJECTIVES: dict[str, Objective] = {"mae": "mae", "captioner": "caption", "classifier": "classify"}
# The models of the shipped recipes, as tests/gpu/count.py counts them.
MODELS = ("mae/base", "mae/large", "captioner/base", "captioner/large", "classifier/base", "classifier/r50x1")
TOY: dict[str, Any] = dict(
    image_size=32, patch_size=8, width=32, depth=1, heads=2, decoder_depth=1, mae_decoder_width=16, mae_decoder_depth=1,
    mae_decoder_heads=2, text_length=8, vocabulary=32, classes=5, head_scale=1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    device: torch.device
    smoke: bool
    compile: bool = False
    """Whether micro-batches are measured with compiled blocks, too."""

    @property
    def models(self) -> tuple[str, ...]:
        return ("mae/toy", "captioner/toy", "classifier/toy") if self.smoke else MODELS

    @property
    def rounds(self) -> int:
        return 1 if self.smoke else 9


@dataclass(frozen=True)
class Case:
    """`act` gives what was found; with `holds` false, a claim of the project is broken."""

    name: str
    act: Callable[[], Found]


@dataclass
class Results:
    """Kept after every case, so that an interrupted part continues where it was."""

    path: Path
    found: Found
    broken: list[str] = field(default_factory=list)

    @staticmethod
    def at(path: Path, part: str, here: Found) -> Results:
        """Results of another device or version are not continued."""
        known = json.loads(path.read_text()) if path.exists() else {}
        if known.get("environment") != here:
            known = {"command": f"python benchmarks/gpu.py {part}", "environment": here, "cases": {}}
        return Results(path, known)

    def run(self, cases: Iterable[Case], minutes: float, again: bool) -> int:
        """Runs what has no result yet, for so many minutes; returns how many cases are left."""
        ends, left = time.monotonic() + 60 * minutes, 0
        for case in cases:
            if again or "failed" in self.found["cases"].get(case.name, {"failed": "never tried"}):
                if time.monotonic() > ends:
                    left += 1
                    continue
                self.found["cases"][case.name] = found = _tried(case)
                print(f"{case.name:44s} {json.dumps(found)}", flush=True)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.write_text(json.dumps(self.found, indent=1) + "\n")
            if not self.found["cases"][case.name].get("holds", True):
                self.broken.append(f"{case.name}: {self.found['cases'][case.name]}")
        return left


def _tried(case: Case) -> Found:
    try:
        return case.act()
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    except Exception as error:  # the other cases are worth having
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}", "holds": False}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def environment(setting: Setting) -> Found:
    found: Found = {"python": platform.python_version(), "smoke": setting.smoke}
    for name in ("torch", "triton", "deepspeed", "timm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if setting.device.type != "cuda":
        return found | {"device": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(0)
    return found | {
        "device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1),
        "processors": properties.multi_processor_count, "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": asked_of_driver("driver_version"), "cores": os.cpu_count(),
    }  # fmt: skip


def asked_of_driver(what: str) -> str | None:
    """One field of nvidia-smi for the first GPU."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def shape_of(model: str) -> Shape:
    family, size = model.split("/")
    settings: dict[str, Any] = {"family": family, **(TOY if size == "toy" else {"size": size})}
    if family == "captioner" and size != "toy":
        settings |= {"text_length": 40, "vocabulary": 32768}
    if family == "classifier" and size != "toy":
        settings |= {"classes": 1000}
    return ModelSettings.model_validate(settings).resolved()


def batch_of(model: str, records: int, setting: Setting, seed: int = 1) -> MicroBatch:
    shape, objective = shape_of(model), OBJECTIVES[model.split("/")[0]]
    return synthetic_batch(shape, objective, records, seed).to(setting.device)


def model_of(model: str) -> nn.Module:
    return deepcopy(_built(model))


@lru_cache(maxsize=1)
def _built(model: str) -> nn.Module:
    """Drawing the weights of a large model takes processors longer than a GPU needs for most cases."""
    return build(shape_of(model), OBJECTIVES[model.split("/")[0]])


def rule_of(records: int) -> ClipRule:
    """C is 1; what rounding may add is taken off it, as in a run."""
    allowance = rounding_allowance(records)
    return ClipRule("flat", 1.0 / (1 + allowance), allowance)


def clip_of(records: int, precision: str = "bf16") -> BookKeepingClip:
    return BookKeepingClip(rule_of(records), precision)  # pyright: ignore[reportArgumentType]


def engine_of(
    model: nn.Module, private: bool, records: int, setting: Setting, graph: bool = False, compiled: bool = False
) -> LocalEngine:
    """The engine of one process, with exact sums: the one whose `accumulate` a run calls. `compiled`: as by
    `run.compile: "blocks"`."""
    ranks, settings = Alone(setting.device), EngineSettings("local", records)
    if private:
        computation = Computation(
            precision="bf16", cuda_graph="auto" if graph else "off", compile="blocks" if compiled else "off"
        )
        engine = clipping_engine(model, rule_of(records), Optimizer(), settings, ranks, computation).engine
    else:
        flat = make_optimizer(Optimizer(), model.named_parameters())
        engine = make_engine(settings, PlainForward(model, "bf16", compiled=compiled), flat, ranks)
    assert isinstance(engine, LocalEngine)
    return engine


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
