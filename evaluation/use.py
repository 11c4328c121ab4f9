"""What a trained model says of a user's own pictures, as rows for the console, as JSON, and as a page.

Nothing is measured and nothing is kept: what it says of a picture is a function of that picture and of the released
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmuration.accounting.durable import atomic
from murmuration.accounting.escaping import printable
from murmuration.data.decode.augment import view_in_words
from murmuration.data.decode.decode import BadRecord
from murmuration.data.index.folders import IMAGES
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.models.load import LoadedModel
from murmuration.evaluation.protocols.zero_shot import check_templates, usual_template
from murmuration.model.captioner import Captioner
from murmuration.model.mae import MaskedAutoencoder
from murmuration.train.measures.class_names import require_room, tokens_of

BATCH = 16
TOP = 5
OWNER_ALONE = 0o600


@dataclass(frozen=True)
class PredictionOptions:
    beams: int = 1
    names: tuple[str, ...] = ()
    template: str | None = None


@dataclass
class Predictions:
    """A row per readable picture, with `text` in a few words, and why each other one cannot be used."""

    head: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    features: list[np.ndarray] = field(default_factory=list)
    tiles: list[tuple[str, str, str]] = field(default_factory=list)
    """PNG, text and small text."""

    def table(self) -> str:
        width = max([len("picture"), *(len(printable(row["picture"])) for row in self.rows)])
        lines = [("picture", self.head), *((row["picture"], row["text"]) for row in self.rows)]
        return "\n".join(f"{printable(name):{width}}  {printable(text)}" for name, text in lines)

    def as_dict(self) -> dict[str, Any]:
        rows = [{name: value for name, value in row.items() if name != "text"} for row in self.rows]
        return {"pictures": rows, "unreadable": [{"picture": name, "reason": why} for name, why in self.bad.items()]}


def pictures_in(places: Sequence[Path]) -> list[Path]:
    """Files as they are named, and all pictures in folders, by name."""
    found: list[Path] = []
    for place in places:
        inside = (path for path in place.rglob("*") if path.suffix.lower() in IMAGES) if place.is_dir() else [place]
        found += sorted(inside)
    if not found:
        raise EvaluationError(f"{places[0]} has no pictures ({', '.join(IMAGES)}); name a file, or another folder")
    return found


def say(
    model: LoadedModel, pictures: Sequence[Path], asked: PredictionOptions, features: bool, page: bool
) -> Predictions:
    answer = _answerer(model, asked)
    said = Predictions(answer.head)
    for names, images in _seen(model, pictures, said.bad):
        rows = answer(images, len(said.rows))
        said.rows += [{"picture": name, **row} for name, row in zip(names, rows, strict=True)]
        if features:
            said.features.append(model.features(images).float().cpu().numpy())
        if page:
            said.tiles += _tiles(model, images, said.rows[-len(names) :], len(said.rows) - len(names))
    return said


def write_features(said: Predictions, path: Path) -> None:
    """.npz with `features` [n, width] and `pictures`, or .npy of the features alone."""
    found = np.concatenate(said.features) if said.features else np.zeros((0, 0), np.float32)
    with atomic(path, OWNER_ALONE) as file:
        if path.suffix == ".npz":
            np.savez(file, features=found, pictures=np.array([row["picture"] for row in said.rows], dtype=np.str_))
        else:
            np.save(file, found)


def write_page(model: LoadedModel, said: Predictions, path: Path) -> None:
    """In one file, with the pictures inside: for the owner alone, who may share it."""
    from murmuration.evaluation.session.result import Outcome, Result, Tile, certificate_of, page_of

    certificate, notes = certificate_of(model.subject, model.found.certified)
    told = {"what": model.subject.path.resolve().name, "form": model.subject.kind, "digest": model.found.digest}
    data = {"own pictures": {"records": len(said.rows), "unreadable": len(said.bad)}}
    result = Result("use", view_in_words(model.view), told | model.found.description, certificate, data, notes=notes)
    tiles = [Tile(png, text, small) for png, text, small in said.tiles]
    with atomic(path, OWNER_ALONE) as file:
        file.write(page_of(Outcome(result, tiles)).encode("utf-8", "backslashreplace"))


def _seen(model: LoadedModel, pictures: Sequence[Path], bad: dict[str, str]) -> Iterator[tuple[list[str], Tensor]]:
    """Batches of what can be read; what cannot goes into `bad` with its reason."""
    names: list[str] = []
    images: list[Tensor] = []
    for path in pictures:
        try:
            images.append(model.see([path]))
            names.append(str(path))
        except OSError as error:
            bad[str(path)] = error.strerror or str(error)
        except BadRecord as error:
            bad[str(path)] = str(error)
        if len(names) == BATCH:
            yield names, torch.cat(images)
            names, images = [], []
    if names:
        yield names, torch.cat(images)


@dataclass(frozen=True)
class _Answerer:
    model: LoadedModel
    wanted: PredictionOptions
    template: str = ""

    @property
    def head(self) -> str:
        body = self.model.body
        if isinstance(body, Captioner):
            return "names, likeliest first (nats per token)" if self.wanted.names else "caption"
        if isinstance(body, MaskedAutoencoder):
            return "mean squared error of hidden patches"
        return "classes (share)" if self.model.classifies else "features"

    def __call__(self, images: Tensor, first: int) -> list[dict[str, Any]]:
        model, names = self.model, self.wanted.names
        if names:
            scores = model.surprise(images, names, (self.template,))
            return _ranked(scores.sort(dim=1, stable=True), names, "names", "nats", len(names))
        if isinstance(model.body, Captioner):
            return [{"caption": text, "text": text} for text in model.captions(images, self.wanted.beams)]
        if model.classifies:
            shares = model.shares(images).sort(dim=1, descending=True, stable=True)
            return _ranked(shares, model.class_names, "classes", "share", TOP)
        if not isinstance(model.body, MaskedAutoencoder):
            width = model.features(images).shape[1]
            return [{"features": width, "text": f"{width:,} numbers; --features FILE writes them"} for _ in images]
        with torch.no_grad():
            errors = model.body(model.masked(images, first)).float().tolist()
        return [{"error": error, "text": f"{error:.4f}"} for error in errors]


def _ranked(found: Any, names: Sequence[str], what: str, measure: str, most: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for values, order in zip(found.values[:, :most].tolist(), found.indices[:, :most].tolist(), strict=True):
        pairs = [(names[number], value) for number, value in zip(order, values, strict=True)]
        rows.append(
            {what: [{"name": name, measure: value} for name, value in pairs],
             "text": ", ".join(f"{name} {value:.3f}" for name, value in pairs)}
        )  # fmt: skip
    return rows


def _answerer(model: LoadedModel, wanted: PredictionOptions) -> _Answerer:
    """Refuses what the model cannot do before any picture is read."""
    if not isinstance(model.body, Captioner):
        if wanted.names or wanted.beams > 1:
            option = "--names" if wanted.names else "--beam"
            raise EvaluationError(f"{option} is for captioners, and this model writes no words; leave it out")
        return _Answerer(model, wanted)
    text = model.text
    if not wanted.names:
        return _Answerer(model, wanted)
    template = wanted.template or usual_template(text)
    check_templates((template,), "label")
    for name in wanted.names:
        require_room(len(tokens_of(template.format(name), text)) + 1, model.body.shape.text_length)
    return _Answerer(model, wanted, template)


def _tiles(
    model: LoadedModel, images: Tensor, rows: Sequence[dict[str, Any]], first: int
) -> list[tuple[str, str, str]]:
    from murmuration.data.batch.reader import DataSpec
    from murmuration.train.run.report_pictures import pixels, png, reconstructions

    spec = DataSpec(model.image_size, augment=model.view, mean=model.pixels.mean, std=model.pixels.std)
    names = [Path(row["picture"]).name for row in rows]
    if isinstance(model.body, MaskedAutoencoder):
        made = reconstructions(model.body, model.masked(images, first), spec)
        return [(each["png"], each["caption"], name) for each, name in zip(made, names, strict=True)]
    shown = [png(pixels(image, spec)) for image in images]
    return [(picture, row["text"], name) for picture, row, name in zip(shown, rows, names, strict=True)]
