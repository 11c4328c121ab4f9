"""What a trained classifier says of pictures: top-1 and top-5 where their classes are known, and every prediction."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from murmuration.accounting.durable import atomic
from murmuration.data.decode.class_list import ClassList
from murmuration.evaluation.interval import share
from murmuration.evaluation.ranking import MOST
from murmuration.model.classifier import Classifier
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.result import Outcome, Tile
from murmuration.train.evaluate.session import Chosen, Session, by_list
from murmuration.train.recipe.labels import FOLDERS
from murmuration.train.run.report_pictures import pixels, png

PREDICTIONS = "predictions.csv"


@dataclass(frozen=True)
class Prediction:
    record: str
    best: tuple[str, ...]
    probabilities: tuple[float, ...]


def run_classify(
    session: Session, chosen: Chosen, classes: ClassList | None, label: str | None, gallery: int
) -> Outcome:
    model = session.model.model
    if not isinstance(model, Classifier) or (names := _names(session, chosen, classes)) is None:
        raise EvaluationError("this model names no classes; name a classifier, or measure its features with a probe")
    label = label or (FOLDERS if chosen.folders is not None else None)
    numbers = ClassList(names)
    if label is not None:
        chosen = by_list(chosen, numbers)
    spec = session.spec() if label is None else session.labelled(label, numbers, len(names))
    most = min(MOST, len(names))

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        logits = model.logits(inputs["images"]).float()
        places = places_of(logits, inputs["labels"]) if label is not None else [None] * len(ids)
        likely = (logits.softmax(dim=1) if model.shape.head.loss == "softmax" else logits.sigmoid()).sort(
            dim=1, descending=True, stable=True
        )
        best, values = likely.indices[:, :most].tolist(), likely.values[:, :most].tolist()
        shown = [png(pixels(image, spec)) for image in inputs["images"][: max(0, gallery - before)]]
        shown += [None] * (len(ids) - len(shown))
        return list(zip(places, best, values, shown, strict=True))

    result = session.result("classify", {"label": label, "classes": len(names)}, {"test": chosen})
    answers = session.answers(result, chosen, spec, act, depends_on=(names, gallery))
    if label is not None:
        places = [place for _, (place, _, _, _) in answers]
        result.add("top-1", share(sum(place < 1 for place in places), len(places)))
        if most == MOST:
            result.add("top-5", share(sum(place < MOST for place in places), len(places)))
    predictions = [
        Prediction(chosen.name(record), tuple(names[number] for number in best), tuple(values))
        for record, (_, best, values, _) in answers
    ]
    tiles = [
        Tile(shown, f"{each.best[0]} {each.probabilities[0]:.2f}", each.record)
        for each, (_, (_, _, _, shown)) in zip(predictions, answers, strict=True)
        if shown is not None
    ]
    _write(predictions, session.out / PREDICTIONS, most)
    return Outcome(result, tiles)


def _names(session: Session, chosen: Chosen, given: ClassList | None) -> tuple[str, ...] | None:
    """What each output is called: by the list, the weights' own folder, the class folders, or else by its number."""
    model = session.model.model
    if not isinstance(model, Classifier):
        return None
    outputs = model.head.out_features
    folders = chosen.folders
    own = session.model.class_names
    if given is not None:
        if len(given.names) != outputs:
            raise EvaluationError(
                f"--classes names {len(given.names)} classes, but the model has {outputs}; name its own"
            )
        return given.names
    if len(own) == outputs:
        return own
    if folders is not None and len(folders.classes) == outputs:
        return folders.classes
    if folders is not None:
        raise EvaluationError(
            f"the records have {len(folders.classes)} class folders, but the model has {outputs} outputs; name its "
            "classes with --classes, one per line"
        )
    return tuple(str(number) for number in range(outputs))


def places_of(logits: Tensor, labels: Tensor) -> list[int]:
    """At which place each record's class comes; the lower number comes first on ties."""
    order = logits.sort(dim=1, descending=True, stable=True).indices
    return (order == labels[:, None]).int().argmax(dim=1).tolist()


def _write(predictions: list[Prediction], path: Path, most: int) -> None:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["record", *(f"{what}_{place + 1}" for place in range(most) for what in ("class", "probability"))])
    for each in predictions:
        pairs = zip(each.best, each.probabilities, strict=True)
        rows.writerow([each.record, *(cell for name, value in pairs for cell in (name, f"{value:.6g}"))])
    with atomic(path) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))
