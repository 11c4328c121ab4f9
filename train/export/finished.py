"""A checkpoint as the model that it is, for the forms of other packages, which need more than its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from murmuration.accounting.errors import FIRST
from murmuration.data.decode.augment import ResizeCrop
from murmuration.model.build import Model, build
from murmuration.model.foreign_config import Preprocessing
from murmuration.model.load_report import WeightsError
from murmuration.model.named import NamedError
from murmuration.model.settings import SettingsError
from murmuration.model.statistics_head import SOLVING
from murmuration.model.warm_start import HEAD, initialise_with
from murmuration.train.export.errors import ExportError
from murmuration.train.recipe.pixels import of_manifest
from murmuration.train.storage.checkpoint_read import WEIGHTS, Loaded
from murmuration.train.storage.model_note import ModelNote


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

    @staticmethod
    def of(loaded: Loaded, root: Path, weights: Mapping[str, Tensor], prefix: str = "") -> Finished:
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
        view, pixels = ResizeCrop(), of_manifest(loaded.manifest, loaded.position.folder)
        seen = Preprocessing(view.resize, view.crop, pixels.mean, pixels.std)
        model.eval().requires_grad_(False)
        solved = any(name.endswith(f".{SOLVING}") for name in weights)  # its sums are no weights of the model
        names = HEAD if solved else loaded.names(WEIGHTS)
        trained = sum(weights[name].numel() for name in names)
        return Finished(model, weights, seen, note.class_names, note.tokenizer, trained, prefix)
