"""Reads weight files into a flat state dict, without running any code that a file may contain.

A pickle is a program, and so is a TorchScript archive, which `torch.load` starts before it asks any unpickler.
`torch.load(weights_only=True)` runs neither. Every foreign file of `torch.save` is opened by `load_plain` below.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from murmuration.model.load_report import WeightsError

# The keys under which checkpoints keep their weights, and the prefixes that wrappers put before each name.
HOLDERS = ("model", "state_dict", "model_state_dict", "module")
WRAPPERS = ("module.", "_module.", "_orig_mod.", "model.")
NAMES = ("model.safetensors", "pytorch_model.bin")


def read_weights(path: Path | str, header: bool = False) -> dict[str, Tensor]:
    """The state dict in a file of `torch.save` or safetensors, or in a folder with `model.safetensors` or
    `pytorch_model.bin`.

    `header`: of safetensors, only names and shapes are read; the tensors are zeros that take no memory.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in NAMES if (path / name).is_file()]
        if not found:
            raise WeightsError(f"{path} contains neither {NAMES[0]} nor {NAMES[1]}; name the file with the weights.")
        path = found[0]
    if not path.is_file():
        raise WeightsError(f"{path} does not exist; correct the path of the weights.")
    return flat(_load(path, header), str(path))


def export_note(path: Path | str) -> dict[str, Any]:
    """The `export.json` that this project's export writes beside its weights; empty for other files."""
    path = Path(path)
    note = (path if path.is_dir() else path.parent) / "export.json"
    try:
        found = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
    except (ValueError, RecursionError):
        raise WeightsError(f"{note} is not valid JSON; export the model again.") from None
    return found if isinstance(found, dict) and {"objective", "shapes"} <= found.keys() else {}


class _Inert:
    """Replaces any other class or function that a pickle names: it accepts any arguments and does nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        del arguments, options

    def __setstate__(self, state: Any) -> None:
        del state


def load_plain(path: Path, inert: bool = False) -> Any:
    """The content of a `torch.save` file, as tensors and plain containers; raises WeightsError and runs no code.

    Published checkpoints often contain argparse's Namespace, which only keeps values. Any other class is refused; with
    `inert`, an object that does nothing takes its place.
    """
    try:
        known: list[Any] = [argparse.Namespace]
        if inert:
            known = [(_Inert, name) for name in torch.serialization.get_unsafe_globals_in_checkpoint(path)]
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"code ({name.group(1)})" if name else "something that is not a plain tensor"
        raise WeightsError(_not_run(path, what)) from None
    except Exception as error:  # torch's reader of damaged files raises nearly everything
        if "torchscript" in str(error).lower():
            raise WeightsError(_not_run(path, "a TorchScript program")) from None
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{path} cannot be read as weights ({reason}); fetch it again.") from None


def _not_run(path: Path, what: str) -> str:
    return f"{path} contains {what}, which was not run; save only its state dict, by torch.save or as safetensors."


def _load(path: Path, header: bool) -> Any:
    if path.suffix != ".safetensors":
        return load_plain(path)
    try:
        if not header:
            return load_file(path)
        with safe_open(path, framework="pt") as file:
            entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: torch.zeros((), dtype=torch.float32 if "F" in entry.get_dtype() else torch.int64).expand(
                    entry.get_shape()
                )
                for name, entry in entries.items()
            }
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a complete safetensors file ({error}); fetch it again.") from None


def flat(content: object, where: str = "the checkpoint") -> dict[str, Tensor]:
    """The state dict inside a checkpoint, with the prefixes of wrappers removed from its names."""
    for _ in range(4):
        if not isinstance(content, Mapping):
            raise WeightsError(f"{where} contains a {type(content).__name__}, not a state dict; name a file with one.")
        inner = next((content[h] for h in HOLDERS if isinstance(content.get(h), Mapping)), None)
        if inner is None:
            break
        content = inner
    assert isinstance(content, Mapping)
    state: dict[str, Tensor] = {}
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise WeightsError(
                f"{where} has a {type(value).__name__} under {str(name)[:80]!r} where a tensor should be; pass the "
                f"state dict, or a checkpoint that contains it as 'model'."
            )
        state[name] = value
    if not state:
        raise WeightsError(f"{where} contains no tensors; name a file with weights.")
    while prefix := next((w for w in WRAPPERS if all(name.startswith(w) for name in state)), None):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state
