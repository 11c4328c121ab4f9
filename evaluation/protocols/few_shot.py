"""Linear probes that learn from few records of each class.

Features are those of the probe, computed once; each draw fits a classifier of its own on some of the rows.
"""

from __future__ import annotations

from argparse import Namespace

import numpy as np

from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.selection import Selection
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.rows import Rows
from murmuration.evaluation.protocols.draws import ByDraw, Draw, FewRecords
from murmuration.evaluation.protocols.linear_probe import fitted, hits_of, note_unreadable, read_features, told_of_fit
from murmuration.evaluation.session.features import Extracted
from murmuration.evaluation.session.result import Outcome, Result
from murmuration.evaluation.session.session import Chosen, Session, Work, by_list, numbered


def run(session: Session, work: Work) -> Outcome:
    arguments, few = work.arguments, FewRecords.of(work.arguments)
    train, test = (Chosen.of(work.records[name]) for name in ("train", "test"))
    classes = numbered(train, work.classes, arguments.label)
    train, test = (by_list(part, classes) for part in (train, test))
    if len(wanted := few.candidates(train)) < len(train.ids):
        train = Chosen(Selection(train.index, wanted), np.arange(len(wanted)))
    told = {
        "way": arguments.way, "label": arguments.label, "classes": len(classes.names), "views": arguments.views,
        **few.told(), **told_of_fit(arguments),
    }  # fmt: skip
    result = session.result("few-shot", told, {"train": train, "test": test})
    found = read_features(session, train, classes, arguments, arguments.views, "training records")
    scored = read_features(session, test, classes, arguments, 0, "test records")
    session.sharing.rest_on_main()
    note_unreadable(result, {"train": found, "test": scored}, arguments.label)
    rows = found.views[0]
    by_draw = ByDraw(len(classes.names))
    for draw in few.draws(train, rows.ids, np.asarray(rows.labels)[rows.ids], classes):
        by_draw.add(draw, *_scored(session, found, scored.views[0], draw, classes, arguments, result))
    return by_draw.outcome(result)


def _scored(
    session: Session, found: Extracted, test: Rows, draw: Draw, classes: ClassList, arguments: Namespace,
    result: Result,
) -> tuple[float, float]:  # fmt: skip
    views = [Rows(view.features, view.labels, view.ids[draw.places]) for view in found.views]
    if arguments.way == "vip" and len(draw.places) < 2:
        raise EvaluationError("BatchNorm needs at least two records to learn from; ask for more shots")
    notes, settings = list(result.notes), dict(result.settings)
    classifier = fitted(session, views, len(classes.names), arguments, result)
    # What a fit says of itself belongs to one draw; the note on views is the same for all.
    result.settings = settings
    result.notes = list(dict.fromkeys([*notes, *result.notes]))
    right = hits_of(classifier, test, len(classes.names))
    return int(right[0]) / len(test), int(right.sum()) / len(test)
