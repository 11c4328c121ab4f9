"""What is evaluated: a run directory, an export, a published file, a folder of timm or Hugging Face.

Recognised by the files that are there, without torch, so that a wrong path is answered at once. Weights do not show how
many heads computed them; the checkpoint or the export says so, or a config, or the JSON that timm and Hugging Face put
beside their weights, or, for the published ViP and DP-Cap, the known sizes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from murmuration.accounting.errors import FIRST
from murmuration.evaluation.errors import EvaluationError

if TYPE_CHECKING:
    from murmuration.train.config.root import Config

SubjectKind = Literal["run", "export", "timm", "hugging-face", "file"]
WEIGHT_FILES = ("model.safetensors", "model.pt", "pytorch_model.bin")
FORMS = "a run directory, an export, a file of weights, or a folder of timm or Hugging Face"


@dataclass(frozen=True)
class Subject:
    """`weights` is the run directory, or the file with the weights; `note` what lies beside it."""

    path: Path
    kind: SubjectKind
    weights: Path
    note: dict[str, Any]
    config: Config | None = None
    best: bool = False
    """The best checkpoint by run.keep_best instead of the last one."""

    @staticmethod
    def at(path: Path, config: Path | None = None, overrides: list[str] | None = None, best: bool = False) -> Subject:
        if not path.exists():
            raise EvaluationError(f"{path} does not exist; name {FORMS}")
        if overrides and config is None:
            raise EvaluationError("--set changes a config, and none is named; give --config as well")
        found = _recognised(path)
        if best and found.kind != "run":
            raise EvaluationError(f"--best chooses a checkpoint of a run, and {path} is none; omit it")
        if config is None and found.kind == "export" and "model" not in found.note:
            raise undescribed(path)
        return Subject(path, found.kind, found.weights, found.note, _read(config, overrides or []), best)

    @property
    def certified(self) -> Path:
        """The folder in which a certificate would lie."""
        return self.path if self.path.is_dir() else self.path.parent


def undescribed(path: Path) -> EvaluationError:
    """For runs of a program's own model."""
    return EvaluationError(
        f"{path} does not describe its model (a program of its own trained it, or a version before {FIRST}), and "
        "weights do not show their model's numbers of heads; pass --config, a JSON with its model section"
    )


def _read(path: Path | None, overrides: list[str]) -> Config | None:
    if path is None:
        return None
    from murmuration.train.config.load import load  # a second of imports, which no mistyped path should wait for

    return load(path, overrides)


def _recognised(path: Path) -> Subject:
    if path.is_file():
        note = _json(path.parent / "export.json")
        return Subject(path, "export" if note else "file", path, note)
    if (path / "checkpoints").is_dir():
        return Subject(path, "run", path, {})
    weights = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if weights is None:
        raise EvaluationError(f"{path} has neither checkpoints nor {', '.join(WEIGHT_FILES)}; name {FORMS}")
    if note := _json(path / "export.json"):
        return Subject(path, "export", weights, note)
    beside = _json(path / "config.json")
    if "architecture" in beside:
        return Subject(path, "timm", weights, beside)
    if "model_type" in beside:
        return Subject(path, "hugging-face", weights, beside)
    return Subject(path, "file", weights, {})


def _json(path: Path) -> dict[str, Any]:
    """An object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise EvaluationError(f"{path} is not valid JSON; fetch or export the model again") from None
    if not isinstance(found, dict):
        raise EvaluationError(f"{path} does not describe a model; fetch or export it again")
    return found
