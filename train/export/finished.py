"""A checkpoint as the model that it is, for the forms of other packages, which need more than its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from murmuration.accounting.certificate.weights import RENAMED
from murmuration.accounting.errors import FIRST, RunError
from murmuration.data.decode.augment import PUBLISHED, ResizeCrop
from murmuration.model.build import Model, build
from murmuration.model.fill import WeightEntries
from murmuration.model.foreign_config import Preprocessing
from murmuration.model.load_report import WeightsError
from murmuration.model.named import NamedError
from murmuration.model.settings import SettingsError
from murmuration.model.statistics_head import SOLVING
from murmuration.model.warm_start import HEAD, initialise_with
from murmuration.train.recipe.pixels import of_manifest
from murmuration.train.storage import checkpoint_read
from murmuration.train.storage.checkpoint_read import Loaded
from murmuration.train.storage.model_note import ModelNote

WEIGHTS = "model.safetensors"


class ExportError(RunError, ValueError):
    """Nothing was exported; the message says why."""


@dataclass(frozen=True)
class Finished:
    """`tensors` are the checkpoint's own, under the names that its certificate lists."""

    model: Model
    tensors: Mapping[str, Tensor]
    seen: Preprocessing
    class_names: tuple[str, ...]
    tokenizer: str | None
    """A built-in tokenizer, or its file in the run directory."""
    trained: int
    """Weights that the last phase trained, the adapters among them that are merged into `model`."""
    prefix: str = ""
    """Prefix of the averages' names in the certificate's list."""
    closer: bool = False
    """Whether `seen` shows less of a picture than the run measured on."""
    metadata: dict[str, str] = field(default_factory=dict)
    """What files of safetensors say of the weights."""

    @staticmethod
    def of(
        loaded: Loaded, root: Path, weights: Mapping[str, Tensor], metadata: dict[str, str], prefix: str = ""
    ) -> Finished:
        """`weights`: all tensors of the checkpoint, or their averages, whose certified names have a prefix."""
        note = ModelNote.inside(loaded.manifest, root)
        if note is None:
            raise ExportError(
                f"{root} does not describe its model (a program of its own trained it, or a version before {FIRST}); "
                "export it as safetensors"
            )
        try:
            model = build(note.settings, loaded.manifest["objective"])
            report = initialise_with(model, weights, {"what": "checkpoint"}, take_head=True)
        except (SettingsError, NamedError, WeightsError) as error:
            raise ExportError(f"{root}: {str(error).rstrip('.')}") from None
        if report.left_as_initialised:
            raise ExportError(f"{root}: the checkpoint lacks {report.left_as_initialised[0]}; restore it")
        pixels = of_manifest(loaded.manifest, loaded.position.folder)
        view = ResizeCrop(1, 1) if note.view == "center" else note.view or PUBLISHED
        seen = Preprocessing(view.resize, view.crop, pixels.mean, pixels.std)
        model.eval().requires_grad_(False)
        solved = any(name.endswith(f".{SOLVING}") for name in weights)  # its sums are no weights of the model
        names = HEAD if solved else loaded.names(checkpoint_read.WEIGHTS)
        trained = sum(weights[name].numel() for name in names)
        return Finished(
            model, weights, seen, note.class_names, note.tokenizer, trained, prefix, note.view is None, metadata
        )


# The files that all forms of other packages have: what says how to load them, JSON, and weights whose certified names
# are told beside them.


@dataclass(frozen=True)
class Loading:
    """For the model card: the package, a program that loads the folder, and what the form leaves out or needs."""

    library: str
    program: str
    notes: tuple[str, ...] = ()


def write_json(path: Path, told: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(entries: WeightEntries, finished: Finished, path: Path) -> None:
    # Copies: safetensors takes no two names of one memory. In fp32, as the certificate lists every tensor: BatchNorm
    # counts batches in integers, of which the same number would be other bytes.
    tensors = {name: entry.tensor.to(torch.float32, copy=True).contiguous() for name, entry in entries.items()}
    save_file(tensors, path, finished.metadata)
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
