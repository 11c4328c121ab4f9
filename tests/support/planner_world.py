"""Shapes, a cluster and a recipe for the planner to answer about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from murmuration.model.build import build
from murmuration.model.settings import ModelSettings, Shape
from murmuration.train.commands.forecast import main
from murmuration.train.planner.cluster import Cluster
from murmuration.train.planner.cost import RecordCost, count
from murmuration.train.planner.memory import WeightCounts
from murmuration.train.self_test.probes import synthetic_batch

SHAPES = {
    objective: ModelSettings(
        family=family,  # pyright: ignore[reportArgumentType]
        image_size=96, patch_size=8, width=96, depth=2, heads=4, decoder_width=96, decoder_depth=1,
        decoder_heads=4, mae_decoder_width=64, mae_decoder_depth=1, mae_decoder_heads=4, text_length=16,
        vocabulary=512, qkv_bias=True,
    ).resolved()
    for objective, family in (("mae", "mae"), ("caption", "captioner"))
}  # fmt: skip
CLUSTER = Cluster(gpus=4, memory_gib=16, tflops=10, link_gb_per_s=5, noise_per_second=1e8)


def counted(shape: Shape, objective: Any) -> RecordCost:
    example = synthetic_batch(shape, objective, 1, 0).inputs
    inputs = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in example.items()}
    return count(build(shape, objective, device="meta"), inputs, "fp32")


def peak_of(act: Any) -> int:
    """The most bytes at one time, from PyTorch's own record of every allocation and release."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        act()
    events = recorded.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    memory = [event for event in events if event.name() == "[memory]"]
    held = peak = 0
    for _, _, change in sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(memory)):  # pyright: ignore[reportAttributeAccessIssue]
        held += change
        peak = max(peak, held)
    return peak


def config(
    tmp_path: Path, privacy: dict[str, Any] | None = None, phase: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None, **changes: Any,
) -> Path:  # fmt: skip
    """A recipe of some size, whose data are nowhere; what is None in `phase` and `data` is left out."""

    def told(settings: dict[str, Any], changed: dict[str, Any] | None) -> dict[str, Any]:
        return {name: value for name, value in (settings | (changed or {})).items() if value is not None}

    whole = {
        "train_micro_batch_size_per_gpu": 32,
        "model": {"family": "mae", "size": "base", "width": 4096, "heads": 16, "depth": 3},
        "phases": [told({
            "name": "private", "objective": "mae",
            "data": told({"source": "shards", "path": "nowhere", "expected_records": 1_000_000}, data),
            "privacy": {"epsilon": 8.0, "expected_batch": 4000, "noise_multiplier": 1.0} | (privacy or {}),
            "schedule": {"peak": 1e-3}, "steps": 100,
        }, phase)],
    } | changes  # fmt: skip
    path = tmp_path / "big.json"
    path.write_text(json.dumps(whole))
    return path


def ask(path: Path, *arguments: str) -> int:
    cluster = ("--gpus", "16", "--memory", "80", "--tflops", "100", "--link", "20", "--noise-rate", "1e8")
    return main(["--config", str(path), *cluster, *arguments])


COST = RecordCost(1e9, 3e9, 1e9, 1e6, 0.0)
WEIGHTS = WeightCounts(trainable=100_000_000, frozen=0, largest=1, moments=8, private=True)
SMALL = {
    "family": "mae", "image_size": 32, "patch_size": 8, "width": 64, "depth": 1, "heads": 2, "mae_decoder_width": 32,
    "mae_decoder_depth": 1, "mae_decoder_heads": 2,
}  # fmt: skip
