"""Linear probes that learn from few records: K per class, a share of each class, or the records of published lists.

Features are those of the probe, computed once; each draw fits a classifier of its own on some of the rows. The draws
tell how much the number depends on which records were seen, so a mean never stands without its spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.selection import Selection
from murmuration.evaluation.few_shot import FewShotError, draw_percent, draw_shots, listed
from murmuration.evaluation.logistic import PENALTY_TIMES_N
from murmuration.evaluation.rows import Rows
from murmuration.evaluation.shares import MOST
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.features import Extracted
from murmuration.train.evaluate.probe import ProbeSettings, fitted, hits_of, note_unreadable, read_features
from murmuration.train.evaluate.result import Outcome, Result
from murmuration.train.evaluate.session import Chosen, Session, by_list, numbered


@dataclass(frozen=True)
class FewShotSettings:
    probe: ProbeSettings
    shots: tuple[int, ...]
    percents: tuple[float, ...]
    lists: tuple[Path, ...]
    seeds: tuple[int, ...]
    """One draw for each; lists are draws themselves."""


@dataclass(frozen=True)
class Draw:
    """Rows to learn from, and what they are one draw of."""

    measure: str
    name: str
    places: np.ndarray


def run_few_shot(
    session: Session, train: Chosen, test: Chosen, classes: ClassList | None, settings: FewShotSettings
) -> Outcome:
    probe = settings.probe
    classes = numbered(train, classes, probe.label)
    train, test = (by_list(part, classes) for part in (train, test))
    if not settings.shots and not settings.percents:
        train = _listed_alone(train, settings.lists)
    result = session.result("few-shot", _told(settings, classes), {"train": train, "test": test})
    found = read_features(session, train, classes, probe, probe.views, "training records")
    scored = read_features(session, test, classes, probe, 0, "test records")
    note_unreadable(result, {"train": found, "test": scored}, probe.label)
    rows = [["learnt from", "draw", "records", "top-1", "top-5"]]
    measured: dict[str, list[tuple[float, float]]] = {}
    for draw in _draws(train, found, classes, settings):
        right = _scored(session, found, scored.views[0], draw, classes, probe, result)
        measured.setdefault(draw.measure, []).append(right)
        rows.append([draw.measure, draw.name, f"{len(draw.places):,}", *(f"{value:.4f}" for value in right)])
    for measure, values in measured.items():
        result.add_draws(f"top-1, {measure}", [top1 for top1, _ in values])
        if len(classes.names) >= MOST:
            result.add_draws(f"top-5, {measure}", [top5 for _, top5 in values])
    result.notes.append("Intervals and ± are over draws of the records that were learnt from, not over those scored.")
    return Outcome(result, table=rows, table_title="By draw")


def _told(settings: FewShotSettings, classes: ClassList) -> dict[str, object]:
    probe = settings.probe
    ours = asdict(probe.lars) if probe.way == "vip" else {"penalty": f"{PENALTY_TIMES_N} / n"}
    return {
        "way": probe.way, "label": probe.label, "classes": len(classes.names), "views": probe.views,
        "shots": list(settings.shots), "percents": list(settings.percents),
        "lists": [path.name for path in settings.lists], "seeds": list(settings.seeds), **ours,
    }  # fmt: skip


def _draws(train: Chosen, found: Extracted, classes: ClassList, settings: FewShotSettings) -> Iterator[Draw]:
    """Only readable records are drawn; a list may name unreadable ones, which are left out."""
    rows = found.views[0]
    labels, count = np.asarray(rows.labels)[rows.ids], len(classes.names)
    try:
        for shots in settings.shots:
            for seed in settings.seeds:
                drawn = draw_shots(labels, shots, seed, classes.names)
                yield Draw(f"{shots} per class", f"seed {seed}", drawn)
        for percent in settings.percents:
            for seed in settings.seeds:
                yield Draw(f"{percent:g} %", f"seed {seed}", draw_percent(labels, percent, seed, count))
    except FewShotError as error:
        raise EvaluationError(str(error)) from None
    names = _names(train) if settings.lists else []
    readable = rows.ids
    for path in settings.lists:
        places = np.flatnonzero(np.isin(readable, _listed(path, names)))
        if not len(places):
            raise EvaluationError(f"--list {path}: none of its records can be read; name another")
        yield Draw("lists", path.name, places)


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


def _listed_alone(train: Chosen, lists: Sequence[Path]) -> Chosen:
    """Only the records that some list names, so that the features of no other are computed."""
    names = _names(train)
    ids = np.unique(np.concatenate([_listed(path, names) for path in lists]))
    return Chosen(Selection(train.index, ids), np.arange(len(ids)))


def _names(train: Chosen) -> list[str]:
    index = train.index
    whole = Chosen(index.whole, index.ids) if isinstance(index, Selection) else train
    if whole.folders is None:
        raise EvaluationError("--list names files, and these records are not single files; name class folders")
    return [whole.name(int(record)) for record in (index.ids if isinstance(index, Selection) else train.ids)]


def _listed(path: Path, names: list[str]) -> np.ndarray:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return listed(lines, names)
    except (OSError, UnicodeDecodeError, FewShotError) as error:
        raise EvaluationError(f"--list {path}: {error}") from None
