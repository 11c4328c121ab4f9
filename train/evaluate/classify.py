"""What a trained classifier says of pictures: top-1 and top-5 where their classes are known, and every prediction."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from murmuration.accounting.durable import atomic
from murmuration.data.batch.reader import RIGHT_CLASSES, TARGET
from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.right_labels import RightLabels, RightlyLabelled
from murmuration.evaluation.interval import share
from murmuration.evaluation.ranking import Tally
from murmuration.evaluation.shares import MOST, TITLES, right_of, share_names
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
    session: Session, chosen: Chosen, classes: ClassList | None, label: str | None, gallery: int,
    real: Path | None = None,
) -> Outcome:  # fmt: skip
    model = session.model.model
    if not isinstance(model, Classifier) or (names := _names(session, chosen, classes)) is None:
        raise EvaluationError("this model names no classes; name a classifier, or measure its features with a probe")
    label = label or (FOLDERS if chosen.folders is not None else None)
    numbers = ClassList(names)
    if label is not None:
        chosen = by_list(chosen, numbers)
    spec = session.spec() if label is None else session.labelled(label, numbers, len(names))
    read = chosen
    if real is not None:
        if label is None:
            raise EvaluationError("--real is scored beside top-1; name class folders, or the records' --label")
        read = Chosen(RightlyLabelled(chosen.index, RightLabels.read(real, names, len(names))), chosen.ids)
        spec = replace(spec, right_classes=len(names))
    most, tally = min(MOST, len(names)), Tally(len(names))
    predictions: list[Prediction] = []
    tiles: list[Tile] = []

    def act(ids: np.ndarray, inputs: dict[str, Tensor]) -> None:
        logits = model.logits(inputs["images"]).float()
        if label is not None:
            tally.add(logits, inputs[TARGET], inputs.get(RIGHT_CLASSES))
        found = _predicted([chosen.name(int(record)) for record in ids], logits, names, model.shape.head.loss, most)
        predictions.extend(found)
        for image, each in zip(inputs["images"][: max(0, gallery - len(tiles))], found, strict=False):
            tiles.append(Tile(png(pixels(image, spec)), f"{each.best[0]} {each.probabilities[0]:.2f}", each.record))

    result = session.result("classify", {"label": label, "classes": len(names)}, {"test": chosen})
    result.data["test"]["unreadable"] = session.each(read, spec, "classify", act)
    for name, (right, scored) in right_of(tally.counts(), share_names(len(names), real is not None)).items():
        result.add(TITLES[name], share(right, scored))
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


def _predicted(records: list[str], logits: Tensor, names: tuple[str, ...], loss: str, most: int) -> list[Prediction]:
    likely = (logits.softmax(dim=1) if loss == "softmax" else logits.sigmoid()).sort(
        dim=1, descending=True, stable=True
    )
    return [
        Prediction(record, tuple(names[number] for number in order[:most]), tuple(values[:most]))
        for record, order, values in zip(records, likely.indices.tolist(), likely.values.tolist(), strict=True)
    ]


def _write(predictions: list[Prediction], path: Path, most: int) -> None:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["record", *(f"{what}_{place + 1}" for place in range(most) for what in ("class", "probability"))])
    for each in predictions:
        pairs = zip(each.best, each.probabilities, strict=True)
        rows.writerow([each.record, *(cell for name, value in pairs for cell in (name, f"{value:.6g}"))])
    with atomic(path) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))
