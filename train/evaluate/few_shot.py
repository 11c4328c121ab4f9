"""Linear probes that learn from few records of each class.

Features are those of the probe, computed once; each draw fits a classifier of its own on some of the rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.selection import Selection
from murmuration.evaluation.logistic import PENALTY_TIMES_N
from murmuration.evaluation.rows import Rows
from murmuration.train.evaluate.draws import ByDraw, Draw, FewRecords
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.features import Extracted
from murmuration.train.evaluate.probe import ProbeSettings, fitted, hits_of, note_unreadable, read_features
from murmuration.train.evaluate.result import Outcome, Result
from murmuration.train.evaluate.session import Chosen, Session, by_list, numbered


@dataclass(frozen=True)
class FewShotSettings:
    probe: ProbeSettings
    few: FewRecords


def run_few_shot(
    session: Session, train: Chosen, test: Chosen, classes: ClassList | None, settings: FewShotSettings
) -> Outcome:
    probe = settings.probe
    classes = numbered(train, classes, probe.label)
    train, test = (by_list(part, classes) for part in (train, test))
    if len(wanted := settings.few.candidates(train)) < len(train.ids):
        train = Chosen(Selection(train.index, wanted), np.arange(len(wanted)))
    result = session.result("few-shot", _told(settings, classes), {"train": train, "test": test})
    found = read_features(session, train, classes, probe, probe.views, "training records")
    scored = read_features(session, test, classes, probe, 0, "test records")
    session.sharing.rest_on_main()
    note_unreadable(result, {"train": found, "test": scored}, probe.label)
    rows = found.views[0]
    by_draw = ByDraw(len(classes.names))
    for draw in settings.few.draws(train, rows.ids, np.asarray(rows.labels)[rows.ids], classes):
        by_draw.add(draw, *_scored(session, found, scored.views[0], draw, classes, probe, result))
    return by_draw.outcome(result)


def _told(settings: FewShotSettings, classes: ClassList) -> dict[str, object]:
    probe = settings.probe
    ours = asdict(probe.lars) if probe.way == "vip" else {"penalty": f"{PENALTY_TIMES_N} / n"}
    return {
        "way": probe.way, "label": probe.label, "classes": len(classes.names), "views": probe.views,
        **settings.few.told(), **ours,
    }  # fmt: skip


def _scored(
    session: Session, found: Extracted, test: Rows, draw: Draw, classes: ClassList, probe: ProbeSettings, result: Result
) -> tuple[float, float]:
    views = [Rows(view.features, view.labels, view.ids[draw.places]) for view in found.views]
    if probe.way == "vip" and len(draw.places) < 2:
        raise EvaluationError("BatchNorm needs at least two records to learn from; ask for more shots")
    notes, settings = list(result.notes), dict(result.settings)
    classifier = fitted(session, views, len(classes.names), probe, result)
    # What a fit says of itself belongs to one draw; the note on views is the same for all.
    result.settings = settings
    result.notes = list(dict.fromkeys([*notes, *result.notes]))
    right = hits_of(classifier, test, len(classes.names))
    return int(right[0]) / len(test), int(right.sum()) / len(test)
