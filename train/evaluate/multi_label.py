"""How well a classifier ranks each class, on public records that list any number of classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from murmuration.data.batch.reader import TARGET
from murmuration.data.decode.class_list import ClassList
from murmuration.evaluation.average_precision import average_precision
from murmuration.evaluation.interval import mean
from murmuration.evaluation.shares import MEAN_PRECISION, TITLES
from murmuration.model.classifier import Classifier
from murmuration.train.evaluate.classify import names_of
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.result import Outcome
from murmuration.train.evaluate.session import Chosen, Session


def run_multi_label(session: Session, chosen: Chosen, classes: ClassList | None, label: str | None) -> Outcome:
    """The result's interval is that of a mean over classes, which are as many as some record has."""
    model = session.model.model
    if not isinstance(model, Classifier) or (names := names_of(session, chosen, classes)) is None:
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
    result.add(TITLES[MEAN_PRECISION], mean(known))
    table = [["class", "records", "average precision"]]
    for place, (name, value) in enumerate(each.items()):
        table.append([name, f"{right[:, place].sum():,}", "" if value is None else f"{value:.4f}"])
    return Outcome(result, table=table)
