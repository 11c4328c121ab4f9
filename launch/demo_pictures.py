"""prepare.py demo --data FOLDER: pictures in class folders in the place of drawn ones, and a config for them.

At most MOST pictures are copied, whatever their size: the reader makes them SIDE pixels wide. A tenth of each class is
held out and measured without noise; these and the names of the classes are public from then on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from murmuration.accounting.durable import atomic
from murmuration.accounting.errors import InputError
from murmuration.data.index.folders import build_folder, list_images

MOST, SIDE, HELD_OUT = 20_000, 32, 10
BATCHES, STEPS = 25, 60
"""The expected batch is this part of the private pictures, as in ds_configs/studies/body_then_head.json at 60 steps."""


def prepare(source: Path, out: Path) -> Path:
    """Returns the config, which is written last: what was stopped before is made again."""
    config, receipt, told = out / "pictures.json", out / "prepared.json", json.dumps({"source": str(source)})
    if out.exists() and (not receipt.exists() or receipt.read_text() != told):
        raise InputError(f"{out}: holds something else; move it away, and runs/pictures if a model was trained on it")
    if config.exists():
        print(f"{out}: is there already")
        return config
    files, _ = list_images(source, "top")
    order = np.random.default_rng(0).permutation(len(files))[:MOST]
    names = sorted(os.fsdecode(files[number].name) for number in order)
    seen, met, held = Counter(map(class_of, names)), Counter[str](), Counter[str]()
    if len(seen) < 2 or min(seen.values()) < HELD_OUT:
        raise InputError(f"{source}: name a folder of two classes or more, with {HELD_OUT} pictures of each")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(0o700)  # the copies are private, too
    receipt.write_text(told)
    for name in names:
        label = class_of(name)
        met[label] += 1
        part = "private" if met[label] % HELD_OUT else "held_out"
        held[label] += part == "held_out"
        target = out / part / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target)
    (out / "classes.txt").write_text("".join(f"{label}\n" for label in sorted(seen)))
    for part in ("private", "held_out"):
        build_folder(out / part, contents=True)
    private = len(names) - held.total()
    with atomic(config, 0o644) as file:
        file.write(json.dumps(config_for(private, len(seen), held.total()), indent=2).encode())
    most = max(held.values()) / held.total()
    print(f"{private:,} private pictures and {held.total():,} held out; the most frequent class is {most:.3f} of these")
    return config


def class_of(name: str) -> str:
    return name.partition("/")[0]


def config_for(private: int, classes: int, held: int) -> dict[str, Any]:
    """A small transformer from random weights."""
    data = {"path": "private", "expected_records": private, "label": "cls", "classes": "classes.txt"}
    return {
        "train_micro_batch_size_per_gpu": 64,
        "zero_optimization": {"stage": 1},
        "model": {
            "family": "classifier", "size": "custom", "image_size": SIDE, "patch_size": 8,
            "width": 64, "depth": 2, "heads": 4, "classes": classes, "pooling": "mean",
        },
        "phases": [
            {
                "name": "private", "data": data, "objective": "classify",
                "privacy": {
                    "epsilon": 8.0, "delta": "1/(2n)", "expected_batch": max(1, private // BATCHES),
                    "clip": {"kind": "automatic", "norm": 1.0, "gamma": 0.01},
                },
                "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.05}},
                "schedule": {"peak": 0.003, "warmup": 5, "shape": "cosine"},
                "steps": STEPS,
                "evaluation": {"path": "held_out", "public": True, "records": held},
            }
        ],
        "run": {"checkpoint_every": 10, "log_every": 1},
    }  # fmt: skip
