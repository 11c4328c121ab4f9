"""Whether weights to start from are there, found without PyTorch."""

from __future__ import annotations

from pathlib import Path

from murmuration.train.config.section import RecipeError
from murmuration.train.storage.run_dir import RunDir

EXPORTED = "model.safetensors"


class WarmStartError(RecipeError):
    """The weights cannot be used; the message names the file and the reason."""


def require_weights(path: Path, where: str = "") -> None:
    if not path.exists():
        raise WarmStartError(f"{where}{path} does not exist; name a run directory, an export, or a file of weights")
    if path.is_dir() and not (path / EXPORTED).is_file() and not RunDir(path).checkpoints.is_dir():
        raise WarmStartError(f"{where}{path} has neither checkpoints nor {EXPORTED}; name a run directory or an export")
