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
    fitted_to = read_features(session, train, classes, settings, settings.views, "training records")
    scored = read_features(session, test, classes, settings, 0, "test records")
    session.sharing.rest_on_main()
    note_unreadable(result, {"train": fitted_to, "test": scored}, settings.label)
    probe = fitted(session, fitted_to.views, len(classes.names), settings, result)
    right = hits_of(probe, scored.views[0], len(classes.names))
    result.add("top-1", share(int(right[0]), len(scored.views[0])))
    if len(right) == MOST:
        result.add("top-5", share(int(right.sum()), len(scored.views[0])))
    return Outcome(result)


def note_unreadable(result: Result, parts: dict[str, Extracted], label: str) -> None:
    for name, found in parts.items():
        result.data[name]["unreadable"] = found.unreadable
        if not len(found.views[0]):
            raise EvaluationError(f"none of the {name} records can be read with a label {label!r}; name others")


def read_features(
    session: Session, part: Chosen, classes: ClassList, settings: ProbeSettings, views: int, what: str
) -> Extracted:  # fmt: skip
    spec = session.labelled(settings.label, classes, len(classes.names))
    folder = session.out / FEATURES
    return extract(
        session.model, settings.way, part.index, spec, views, folder, session.computing, what, session.sharing
    )


def fitted(
    session: Session, views: list[Rows], classes: int, settings: ProbeSettings, result: Result
) -> Logistic | LarsProbe:  # fmt: skip
    device = session.computing.device
    if settings.way == "vip":
        if not settings.views:
            result.notes.append(
                "Features were computed once, of one view of each training record; the published protocol crops anew "
                "in each epoch (--views 90)."
            )
        return fit_lars(views, classes, device, settings.lars, Progress("LARS", "steps"))
    found = fit_logistic(views[0], classes, device, settings.iterations, Progress("L-BFGS", "iterations"))
    # Two digits: at the solution the others are rounding, which depends on where the processor finds its operands.
    gradient = float(f"{found.gradient:.1e}")
    result.settings |= {"iterations": found.iterations, "largest_gradient": gradient}
    return found


@torch.no_grad()
def hits_of(probe: Logistic | LarsProbe, rows: Rows, classes: int) -> torch.Tensor:
    """How many rows have their class at each of the first places."""
    most = min(MOST, classes)
    right = torch.zeros(most, dtype=torch.int64)
    for features, labels in rows.chunks():
        right += hits(probe.scores(features).cpu(), labels, most)
    return right
