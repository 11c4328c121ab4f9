"""What weights do not show, written beside them: the config's model section, the tokenizer, the list of classes, and
the view of a picture by which the run measured.

A checkpoint's manifest carries them, and an export repeats them in `export.json`, so that both can be used without the
config. None tells anything private: model sizes are the user's choice, a tokenizer is never learnt from private
captions, and a list of classes is a public file. The files are copied into the run directory, and from there beside the
exported weights; a manifest names them without the path that they had on the machine of the training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from murmuration.accounting.durable import atomic
from murmuration.accounting.errors import RunError
from murmuration.accounting.escaping import first_line
from murmuration.data.decode.augment import SteadyView, view_from, view_in_words
from murmuration.data.decode.class_list import ClassList
from murmuration.data.text.built_in import is_built_in
from murmuration.data.text.encoder import TextEncoder
from murmuration.model.settings import ModelSettings

MODEL, TOKENIZER, CLASSES, VIEW = "model", "tokenizer", "classes", "view"


class ModelNoteError(RunError, ValueError):
    """What should describe a model does not; the message names the file's fault and the fix."""


@dataclass(frozen=True)
class ModelNote:
    settings: ModelSettings
    tokenizer: str | None
    """A built-in tokenizer, or the file in the folder of the note; None where the model reads no text."""
    class_names: tuple[str, ...] = ()
    """Names of a classifier's outputs; empty if the run listed none."""
    view: SteadyView | None = None
    """None: the published one."""

    @staticmethod
    def inside(told: Mapping[str, Any], folder: Path) -> ModelNote | None:
        """The note in a manifest or in `export.json`; None where a program of its own was the trainer."""
        if MODEL not in told:
            return None
        try:
            settings = ModelSettings.model_validate(told[MODEL])
            source, listed = _source(told.get(TOKENIZER), folder), _file(told.get(CLASSES), folder, CLASSES)
            names = ClassList.read(Path(listed)).names if listed is not None else ()
            view = view_from(told[VIEW]) if VIEW in told else None
        except (ValidationError, TypeError, KeyError, ValueError) as error:
            raise ModelNoteError(
                f"{folder}: what is said there about the model cannot be read ({first_line(error)}); export it again, "
                "or pass --config"
            ) from None
        return ModelNote(settings, source, names, view)


def described(
    settings: ModelSettings, text: TextEncoder | None, source: str | None, root: Path, classes: ClassList | None = None,
    view: SteadyView | None = None,
) -> dict[str, Any]:  # fmt: skip
    """For a checkpoint's manifest. Copies the named files into the run directory unless they are there.

    A file that is gone or was changed since the run began is not named: a checkpoint is worth more than its note.
    """
    told: dict[str, Any] = {MODEL: settings.note()}
    if view is not None:
        told[VIEW] = view_in_words(view)
    if classes is not None:
        told[CLASSES] = _listed(classes, root)
    if text is None or source is None:
        return told
    if is_built_in(source):
        return told | {TOKENIZER: {"built_in": source}}
    name = f"{TOKENIZER}-{text.digest[:16]}{Path(source).suffix}"
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


def _listed(classes: ClassList, root: Path) -> dict[str, str]:
    """The names of the outputs, without the classes that the run leaves out."""
    content = json.dumps(classes.names).encode()
    digest = hashlib.sha256(content).hexdigest()
    name = f"{CLASSES}-{digest[:16]}.json"
    if not (root / name).is_file():
        with atomic(root / name) as file:
            file.write(content)
    return {"file": name, "sha256": digest}


def note_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: manifest[name] for name in (MODEL, TOKENIZER, CLASSES, VIEW) if name in manifest}


def copy_named_files(manifest: Mapping[str, Any], root: Path, out: Path) -> None:
    """Puts the files that the note names beside exported weights."""
    for source in (_source(manifest.get(TOKENIZER), root), _file(manifest.get(CLASSES), root, CLASSES)):
        if source is not None and not is_built_in(source):
            (out / Path(source).name).write_bytes(Path(source).read_bytes())


def _source(told: Any, folder: Path) -> str | None:
    if told is None:
        return None
    if "built_in" in told:
        if not is_built_in(told["built_in"]):
            raise ValueError(f"{told['built_in']!r:.80} is no built-in tokenizer")
        return told["built_in"]
    return _file(told, folder, TOKENIZER)


def _file(told: Any, folder: Path, kind: str) -> str | None:
    if told is None:
        return None
    name = told["file"]
    path = folder / Path(name).name
    if name != path.name or not name.startswith(f"{kind}-"):
        raise ValueError(f"{name!r:.80} is no {kind} of a run")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != told["sha256"]:
        raise ValueError(f"{name} is not the one of the training")
    return str(path)
