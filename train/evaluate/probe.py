"""Linear probes: how much of the classes a linear layer finds in frozen features, as two papers measure it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from murmuration.data.decode.class_list import ClassList
from murmuration.data.progress import Progress
from murmuration.evaluation.interval import share
from murmuration.evaluation.lars_probe import LarsProbe, LarsSettings, fit_lars
from murmuration.evaluation.logistic import ITERATIONS, PENALTY_TIMES_N, Logistic, fit_logistic
from murmuration.evaluation.ranking import hits
from murmuration.evaluation.rows import Rows
from murmuration.evaluation.shares import MOST
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.features import Extracted, Way, extract
from murmuration.train.evaluate.result import Outcome, Result
from murmuration.train.evaluate.session import Chosen, Session, by_list, numbered

FEATURES = "features"


@dataclass(frozen=True)
class ProbeSettings:
    way: Way
    label: str
    views: int
    """Random crops per training record; 0: the view of the evaluation itself."""
    lars: LarsSettings
    iterations: int = ITERATIONS


def run_probe(
    session: Session, train: Chosen, test: Chosen, classes: ClassList | None, settings: ProbeSettings
) -> Outcome:
    classes = numbered(train, classes, settings.label)
    train, test = (by_list(part, classes) for part in (train, test))
    told = {"way": settings.way, "label": settings.label, "classes": len(classes.names), "views": settings.views}
    ours = asdict(settings.lars) if settings.way == "vip" else {"penalty": f"{PENALTY_TIMES_N} / n"}
    result = session.result("probe", told | ours, {"train": train, "test": test})
    fitted_to = _features(session, train, classes, settings, settings.views, "training records")
    scored = _features(session, test, classes, settings, 0, "test records")
    for name, found in (("train", fitted_to), ("test", scored)):
        result.data[name]["unreadable"] = found.unreadable
        if not len(found.views[0]):
            raise EvaluationError(
                f"none of the {name} records can be read with a label {settings.label!r}; name others"
            )
    probe = _fitted(session, fitted_to, len(classes.names), settings, result)
    _score(result, probe, scored.views[0], len(classes.names))
    return Outcome(result)


def _features(
    session: Session, part: Chosen, classes: ClassList, settings: ProbeSettings, views: int, what: str
) -> Extracted:  # fmt: skip
    spec = session.labelled(settings.label, classes, len(classes.names))
    folder = session.out / FEATURES
    return extract(session.model, settings.way, part.index, spec, views, folder, session.computing, what)


def _fitted(
    session: Session, found: Extracted, classes: int, settings: ProbeSettings, result: Result
) -> Logistic | LarsProbe:  # fmt: skip
    device = session.computing.device
    if settings.way == "vip":
        if not settings.views:
            result.notes.append(
                "Features were computed once, of one view of each training record; the published protocol crops anew "
                "in each epoch (--views 90)."
            )
        return fit_lars(found.views, classes, device, settings.lars, Progress("LARS", "steps"))
    fitted = fit_logistic(found.views[0], classes, device, settings.iterations, Progress("L-BFGS", "iterations"))
    result.settings |= {"iterations": fitted.iterations, "largest_gradient": fitted.gradient}
    return fitted


@torch.no_grad()
def _score(result: Result, probe: Logistic | LarsProbe, rows: Rows, classes: int) -> None:
    most = min(MOST, classes)
    right = torch.zeros(most, dtype=torch.int64)
    for features, labels in rows.chunks():
        right += hits(probe.scores(features).cpu(), labels, most)
    result.add("top-1", share(int(right[0]), len(rows)))
    if most == MOST:
        result.add("top-5", share(int(right.sum()), len(rows)))
