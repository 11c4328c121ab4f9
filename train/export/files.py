"""The files that all forms of other packages have: what says how to load them, JSON, and weights whose certified names
are told beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from murmuration.accounting.certificate.weights import RENAMED
from murmuration.model.fill import WeightEntries
from murmuration.train.export.finished import Finished

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Loading:
    """For the model card: the package, a program that loads the folder, and what the form leaves out or needs."""

    library: str
    program: str
    notes: tuple[str, ...] = ()


def write_json(path: Path, told: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(entries: WeightEntries, finished: Finished, path: Path, metadata: dict[str, str]) -> None:
    # Copies: safetensors takes no two names of one memory.
    save_file({name: entry.tensor.clone().contiguous() for name, entry in entries.items()}, path, metadata)
    write_json(path.parent / RENAMED, {path.name: _renamed(entries, finished)})


def _renamed(entries: WeightEntries, finished: Finished) -> dict[str, dict[str, Any]]:
    """Shape and ordered parts of each certified tensor that is there bit by bit, whole or cut."""
    parts: dict[str, list[str]] = {}
    for name, entry in entries.items():
        if len(entry.keys) == 1:
            parts.setdefault(entry.keys[0], []).append(name)
    found: dict[str, dict[str, Any]] = {}
    for ours, names in parts.items():
        certified, flat = finished.tensors.get(ours), torch.cat([entries[name].tensor.reshape(-1) for name in names])
        if certified is not None and torch.equal(flat, certified.reshape(-1)):
            found[finished.prefix + ours] = {"shape": list(certified.shape), "parts": names}
    return found
