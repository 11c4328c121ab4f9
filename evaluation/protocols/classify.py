"""What a trained classifier says of pictures: top-1 and top-5 where their classes are known, and every prediction; or
how well it ranks each class, where records list any number of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from murmuration.data.batch.reader import RIGHT_CLASSES, TARGET
from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.census import names_of
from murmuration.data.index.public_split import whole_of
from murmuration.data.index.right_labels import RightLabels, RightlyLabelled
from murmuration.data.index.shard_index import ShardIndex
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.interval import Estimate, mean_share, share
from murmuration.evaluation.measures.one_against_rest import auc_estimate, confusion, sensitivity, specificity
from murmuration.evaluation.session.result import Outcome, Result, Tile, write_csv
from murmuration.evaluation.session.session import Chosen, Session, Work, by_list
from murmuration.model.classifier import Classifier
from murmuration.train.measures.ranking import average_precision
from murmuration.train.measures.shares import MEAN_PRECISION, MOST, TITLES, right_of, share_names
from murmuration.train.recipe.labels import FOLDERS
from murmuration.train.run.report_pictures import pixels, png

PREDICTIONS, CONFUSION = "predictions.csv", "confusion.csv"
MOST_ONE_BY_ONE = 100
"""Classes that are measured one by one: more fill no page, and all scores of each record are kept for it."""


@dataclass(frozen=True)
class Prediction:
    record: str
    best: tuple[str, ...]
    probabilities: tuple[float, ...]


def run(session: Session, work: Work) -> Outcome:
    arguments, classes = work.arguments, work.classes
    chosen = Chosen.of(work.records["test"], arguments.records)
    if arguments.multi_label:
        return _multi_label(session, chosen, classes, arguments.label)
    label, gallery, real = arguments.label, arguments.gallery, arguments.real
    model = session.model.model
    if not isinstance(model, Classifier) or (names := _names_of(session, chosen, classes)) is None:
        raise EvaluationError("this model names no classes; name a classifier, or measure its features with a probe")
    label = label or (FOLDERS if chosen.folders is not None else None)
    numbers = ClassList(names)
    if label is not None:
        chosen = by_list(chosen, numbers)
    spec = session.spec() if label is None else session.labelled(label, numbers, len(names))
    if real is not None and label is None:
        raise EvaluationError("--real is scored beside top-1; name class folders, or the records' --label")
    rightly = RightLabels.read(real, names, len(names)) if real is not None else None
    read = Chosen(RightlyLabelled(chosen.index, rightly), chosen.ids) if rightly is not None else chosen
    spec = replace(spec, right_classes=len(names)) if rightly is not None else spec
    most = min(MOST, len(names))
    one_by_one = label is not None and 2 <= len(names) <= MOST_ONE_BY_ONE

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        logits = model.logits(inputs["images"]).float()
        places = places_of(logits, inputs[TARGET]) if label is not None else [None] * len(ids)
        probabilities = logits.softmax(dim=1) if model.shape.head.loss == "softmax" else logits.sigmoid()
        likely = probabilities.sort(dim=1, descending=True, stable=True)
        best, values = likely.indices[:, :most].tolist(), likely.values[:, :most].tolist()
        shown = [png(pixels(image, spec)) for image in inputs["images"][: max(0, gallery - before)]]
        shown += [None] * (len(ids) - len(shown))
        scored = (
            list(zip(inputs[TARGET].tolist(), probabilities.tolist(), strict=True)) if one_by_one else [None] * len(ids)
        )
        really = _really(logits, inputs.get(RIGHT_CLASSES))
        return list(zip(places, really, best, values, scored, shown, strict=True))

    result = session.result("classify", {"label": label, "classes": len(names)}, {"test": chosen})
    told = rightly and sorted(rightly.by_name.items())
    answers = session.answers(result, read, spec, act, depends_on=(names, gallery, told))
    if label is None and _have_classes(chosen):
        result.notes.append("These records have a .cls; --label cls measures accuracy by it.")
    if label is not None:
        _add_shares(result, [(place, really) for _, (place, really, *_) in answers], len(names), real is not None)
    predictions = [
        Prediction(chosen.name(record), tuple(names[number] for number in best), tuple(values))
        for record, (_, _, best, values, *_) in answers
    ]
    tiles = [
        Tile(shown, f"{each.best[0]} {each.probabilities[0]:.2f}", each.record)
        for each, (_, (*_, shown)) in zip(predictions[:gallery], answers[:gallery], strict=True)
        if shown is not None
    ]
    _write(predictions, session.out / PREDICTIONS, most)
    table: list[list[str]] = []
    if one_by_one:
        truth = np.array([truth for _, (*_, (truth, _), _) in answers])
        scores = np.array([scores for _, (*_, (_, scores), _) in answers])
        called = np.array([best[0] for _, (_, _, best, *_) in answers])
        table = table_of_classes(result, names, np.arange(len(names)) == truth[:, None], scores, called)
        counts = confusion(truth, called, len(names)).tolist()
        rows = ([name, *row] for name, row in zip(names, counts, strict=True))
        write_csv(session.out / CONFUSION, ["true class, by predicted", *names], rows)
    return Outcome(result, tiles, table)


def table_of_classes(
    result: Result, names: tuple[str, ...], has: np.ndarray, scores: np.ndarray, called: np.ndarray
) -> list[list[str]]:
    """A table of each class against all others. Of two classes, the second is the one that is looked for."""
    table = [["class", "records", "sensitivity", "specificity", "AUC"]]
    measured: dict[str, list[Estimate]] = {title: [] for title in table[0][2:]}
    for place, name in enumerate(names):
        here, those = has[:, place], called == place
        found = (sensitivity(those, here), specificity(those, here), auc_estimate(scores[:, place], here))
        for title, value in zip(measured, found, strict=True):
            measured[title] += [] if value is None else [value]
            if value is not None and len(names) == 2 and place == 1:
                result.add(f"{title} for {name}", value)
        table.append([name, f"{here.sum():,}", *("" if value is None else interval(value) for value in found)])
    if len(names) > 2:
        for title, of_classes in (("balanced accuracy", measured["sensitivity"]), ("mean AUC", measured["AUC"])):
            if of_classes:
                result.add(title, mean_share([each.value for each in of_classes]))
    return table


def interval(found: Estimate) -> str:
    return f"{found.value:.3f} ({found.low:.3f} … {found.high:.3f})"


def _have_classes(chosen: Chosen) -> bool:
    whole = whole_of(chosen.index)
    names = names_of(whole.folder, whole.manifest_digest, len(whole.shards)) if isinstance(whole, ShardIndex) else None
    return names is not None and FOLDERS in names.members


def _names_of(session: Session, chosen: Chosen, given: ClassList | None) -> tuple[str, ...] | None:
    """What each output is called: by the list, the weights' own folder, the class folders, or else by its number."""
    model = session.model.model
    if not isinstance(model, Classifier):
        return None
    outputs = model.shape.head.classes
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


def _multi_label(session: Session, chosen: Chosen, classes: ClassList | None, label: str | None) -> Outcome:
    """How well each class is ranked, on records that list any number of classes. The interval is that of a mean over
    the classes that some record has."""
    model = session.model.model
    if not isinstance(model, Classifier) or (names := _names_of(session, chosen, classes)) is None:
        raise EvaluationError("this model names no classes; name a classifier")
    if label is None:
        raise EvaluationError("--multi-label needs --label, the field of the .json that lists a record's classes")
    spec = session.spec(listed=label, classes=len(names), class_list=ClassList(names))

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        del ids, before
        scores = model.logits(inputs["images"]).float()
        right = [row.nonzero().flatten().tolist() for row in inputs[TARGET]]
        return list(zip(scores.tolist(), right, strict=True))

    result = session.result("classify", {"label": label, "multi_label": True, "classes": len(names)}, {"test": chosen})
    answers = session.answers(result, chosen, spec, act, depends_on=names)
    scores = np.array([scores for _, (scores, _) in answers]).reshape(len(answers), len(names))
    right = np.zeros(scores.shape, dtype=bool)
    for row, (_, (_, listed)) in enumerate(answers):
        right[row, listed] = True
    each = {name: average_precision(scores[:, place], right[:, place]) for place, name in enumerate(names)}
    known = [value for value in each.values() if value is not None]
    if not known:
        raise EvaluationError(f"none of these records has a class under {label!r}, so no class can be ranked")
    result.add(TITLES[MEAN_PRECISION], mean_share(known))
    areas = [auc_estimate(scores[:, place], right[:, place]) for place in range(len(names))]
    if any(areas):
        result.add("mean AUC", mean_share([area.value for area in areas if area]))
    table = [["class", "records", "average precision", "AUC"]]
    for place, ((name, value), area) in enumerate(zip(each.items(), areas, strict=True)):
        cells = ["" if value is None else f"{value:.4f}", "" if area is None else interval(area)]
        table.append([name, f"{right[:, place].sum():,}", *cells])
    return Outcome(result, table=table)


def places_of(logits: Tensor, labels: Tensor) -> list[int]:
    """At which place each record's class comes; the lower number comes first on ties."""
    order = logits.sort(dim=1, descending=True, stable=True).indices
    return (order == labels[:, None]).int().argmax(dim=1).tolist()


def _really(logits: Tensor, right: Tensor | None) -> list[bool | None]:
    """Whether each record's first answer is any of its right classes; None where nobody says which are."""
    if right is None:
        return [None] * len(logits)
    first = logits.sort(dim=1, descending=True, stable=True).indices[:, :1]
    found = right.gather(1, first)[:, 0].bool().tolist()
    return [hit if said else None for hit, said in zip(found, right.any(dim=1).tolist(), strict=True)]


def _add_shares(result: Result, answers: list[tuple[int, bool | None]], classes: int, real: bool) -> None:
    places = [sum(place == each for place, _ in answers) for each in range(min(MOST, classes))]
    said = [really for _, really in answers if really is not None]
    counts = [*places, len(answers), sum(said), len(said)]
    for name, (right, scored) in right_of(counts, share_names(classes, real)).items():
        result.add(TITLES[name], share(right, scored))


def _write(predictions: list[Prediction], path: Path, most: int) -> None:
    header = ["record", *(f"{what}_{place + 1}" for place in range(most) for what in ("class", "probability"))]
    rows = []
    for each in predictions:
        pairs = zip(each.best, each.probabilities, strict=True)
        rows.append([each.record, *(cell for name, value in pairs for cell in (name, f"{value:.6g}"))])
    write_csv(path, header, rows)
