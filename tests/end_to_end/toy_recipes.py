"""Shipped recipes at toy size: the overrides that make one run on a CPU in seconds, and change nothing else of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TINY = {
    "model.size": "custom", "model.image_size": 32, "model.patch_size": 8, "model.width": 32, "model.depth": 1,
    "model.heads": 2, "run.precision": "fp32", "run.log_every": 1, "run.checkpoint_every": 3,
    "train_micro_batch_size_per_gpu": 16,
}  # fmt: skip
TINY_MAE = {"model.mae_decoder_width": 16, "model.mae_decoder_depth": 1, "model.mae_decoder_heads": 2}
TINY_TEXT = {"model.decoder_width": 32, "model.decoder_depth": 1, "model.decoder_heads": 2, "model.vocabulary": 64,
             "model.text_length": 16}  # fmt: skip
TINY_BIT = {"model.width": 8, "model.stages": [1, 1]}
TINY_GPT2 = {key: value for key, value in TINY.items() if key not in ("model.image_size", "model.patch_size")} | {
    "model.vocabulary": 64, "model.text_length": 16,
}  # fmt: skip
RECORDS = {"private": 600, "texts": 600, "held_out": 64, "protected": 300, "open": 300, "divided": 300}
"""Of the sets that the tests prepare; the last three are single images in class folders."""
PUBLIC_STEPS, PRIVATE_STEPS, EXPECTED, BANDS = 6, 12, 60, 4
PEAKS = {"AdamW": 5e-3, "LAMB": 2e-2}


def overrides(recipe: Path, data: Path, runs: Path) -> dict[str, Any]:
    """`runs` holds the runs of recipes that others start from, by their names."""
    raw = json.loads(recipe.read_text())
    found: dict[str, Any] = {"run.dir": str(runs / recipe.stem), **_model(raw["model"])}
    for number, phase in enumerate(raw["phases"]):
        found |= {f"phases.{number}.{key}": value for key, value in _phase(recipe.stem, phase, data, runs).items()}
    return found


def _model(model: dict[str, Any]) -> dict[str, Any]:
    if model["family"] == "gpt2":
        return TINY_GPT2
    if model["family"] == "classifier":
        if model["size"].startswith("r"):
            bit = {
                key: value
                for key, value in TINY.items()
                if key not in ("model.patch_size", "model.depth", "model.heads")
            }
            return bit | TINY_BIT | {"model.classes": 8}
        return TINY | {"model.classes": 8}
    return TINY | TINY_MAE | (TINY_TEXT if model["family"] == "captioner" else {})


def _phase(recipe: str, phase: dict[str, Any], data: Path, runs: Path) -> dict[str, Any]:
    source, private = phase["data"]["source"], "privacy" in phase
    if source == "checkpoint":
        return {"data.path": str(runs / _starts_from(recipe))}
    found: dict[str, Any] = {}
    if source == "synthetic":
        found |= {"data.records": 200, "data.size": 32}
    else:
        name = _records_for(phase)
        found |= {"data.path": str(data / name)}
        if "expected_records" in phase["data"]:
            found |= {"data.expected_records": RECORDS[name]}
    if "public_fraction" in phase["data"]:  # a set is cut once and for all, and a hundredth of this one is a handful
        found |= {"data.public_fraction": 0.1}
    if "classes" in phase["data"]:
        found |= {"data.classes": str(data / "classes.txt")}
    if "exclude_classes" in phase["data"]:
        found |= {"data.exclude_classes": str(data / "excluded.txt"), "data.expected_records": None}
    if "tokenizer" in phase["data"]:
        found |= {"data.tokenizer": str(data / "tokenizer.json")}
    if "evaluation" in phase or private:
        held = "held_classes" if phase["objective"] == "classify" else "held_out"
        found |= {"evaluation": {"path": str(data / held), "public": True, "records": 64}}
    if "mixing" in phase:
        other = "texts" if phase["objective"] == "text" else "open"
        found |= {"mixing.data.path": str(data / other), "mixing.data.expected_records": RECORDS[other]}
        found |= {"mixing.batch": 32}
        if other == "texts":
            found |= {"mixing.data.tokenizer": str(data / "tokenizer.json")}
        found |= {"mixing.data.classes": str(data / "classes.txt")} if "classes" in phase["data"] else {}
    once = phase.get("steps") == 1
    found |= {"epochs": None, "steps": 1 if once else PRIVATE_STEPS if private else PUBLIC_STEPS}
    batch = found["data.expected_records"] if once else EXPECTED
    found |= {"privacy.expected_batch": batch} if private else {"batch": 24}
    if private and phase["privacy"].get("noise"):
        found |= {"privacy.noise.bands": BANDS}
    schedule = phase["schedule"]
    found |= {f"schedule.{key}": None for key in ("warmup_epochs", "end") if key in schedule}
    if not once and "warmup_epochs" not in schedule:
        found |= {"schedule.warmup": 1}
    return found | {"schedule.peak": PEAKS[phase["optimizer"]["type"]]}


def _starts_from(recipe: str) -> str:
    """The run whose weights a recipe takes: never one that protected the same records."""
    if recipe.startswith("finetune_"):
        return "pretrain_vitb"
    paper, kind, *_ = recipe.split("_")
    return f"{paper}_base" if kind == "finetune" else f"pretrain_{kind}"


def _records_for(phase: dict[str, Any]) -> str:
    # A public part of a set that is otherwise private lies in that set, and the cut is made once and for all.
    public = phase["data"].get("public", False)
    if phase["objective"] == "text":
        return "texts"
    if "public_fraction" in phase["data"]:
        return "divided"
    if phase["objective"] == "classify":
        return "open" if public else "protected"
    return "private" if not public else "textures" if phase["objective"] == "mae" else "held_out"
