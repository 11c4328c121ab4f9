"""What weights do not show, written beside them: the config's model section and the tokenizer.

A checkpoint's manifest carries both, and an export repeats them in `export.json`, so that both can be evaluated without
the config. Neither tells anything private: model sizes are the user's choice, and a tokenizer is never learnt from
private captions. A tokenizer's file is copied into the run directory, and from there beside the exported weights; a
manifest names it without the path that it had on the machine of the training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from murmuration.accounting.durable import atomic
from murmuration.accounting.errors import RunError
from murmuration.data.text.built_in import is_built_in
from murmuration.data.text.encoder import TextEncoder
from murmuration.model.settings import ModelSettings

MODEL, TOKENIZER = "model", "tokenizer"
_PREFIX = "tokenizer"


class ModelNoteError(RunError, ValueError):
    """What should describe a model does not; the message names the file's fault and the fix."""


@dataclass(frozen=True)
class ModelNote:
    settings: ModelSettings
    tokenizer: str | None
    """A built-in tokenizer, or the file in the folder of the note; None where the model reads no text."""

    @staticmethod
    def inside(told: Mapping[str, Any], folder: Path) -> ModelNote | None:
        """The note in a manifest or in `export.json`; None in one that was written before there were notes."""
        if MODEL not in told:
            return None
        try:
            settings = ModelSettings.model_validate(told[MODEL])
            source = _source(told.get(TOKENIZER), folder)
        except (ValidationError, TypeError, KeyError, ValueError) as error:
            reason = str(error).splitlines()[0][:200]
            raise ModelNoteError(
                f"{folder}: what is said there about the model cannot be read ({reason}); export it again, or pass "
                "--config"
            ) from None
        return ModelNote(settings, source)


def described(
    settings: ModelSettings, text: TextEncoder | None, source: str | None, root: Path
) -> dict[str, Any]:  # fmt: skip
    """For a checkpoint's manifest. Copies the tokenizer's file into the run directory unless it is there.

    A file that is gone or was changed since the run began is not named: a checkpoint is worth more than its note.
    """
    told: dict[str, Any] = {MODEL: settings.note()}
    if text is None or source is None:
        return told
    if is_built_in(source):
        return told | {TOKENIZER: {"built_in": source}}
    name = f"{_PREFIX}-{text.digest[:16]}{Path(source).suffix}"
    if not (root / name).is_file():
        try:
            content = Path(source).read_bytes()
        except OSError:
            return told
        if hashlib.sha256(content).hexdigest() != text.digest:
            return told
        with atomic(root / name) as file:
            file.write(content)
    return told | {TOKENIZER: {"file": name, "sha256": text.digest}}


def note_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: manifest[name] for name in (MODEL, TOKENIZER) if name in manifest}


def copy_tokenizer(manifest: Mapping[str, Any], root: Path, out: Path) -> None:
    """Puts the tokenizer's file beside exported weights."""
    source = _source(manifest.get(TOKENIZER), root)
    if source is not None and not is_built_in(source):
        (out / Path(source).name).write_bytes(Path(source).read_bytes())


def _source(told: Any, folder: Path) -> str | None:
    if told is None:
        return None
    if "built_in" in told:
        if not is_built_in(told["built_in"]):
            raise ValueError(f"{told['built_in']!r:.80} is no built-in tokenizer")
        return told["built_in"]
    name = told["file"]
    path = folder / Path(name).name
    if name != path.name or not name.startswith(f"{_PREFIX}-"):
        raise ValueError(f"{name!r:.80} is no tokenizer of a run")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != told["sha256"]:
        raise ValueError(f"{name} is not the one of the training")
    return str(path)
