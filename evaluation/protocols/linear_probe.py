"""Linear probes: how much of the classes a linear layer finds in frozen features, as two papers measure it."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import Any

import torch

from murmuration.data.decode.class_list import ClassList
from murmuration.data.progress import Progress
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.interval import share
from murmuration.evaluation.measures.lars_probe import LarsProbe, LarsSettings, fit_lars
from murmuration.evaluation.measures.logistic import PENALTY_TIMES_N, Logistic, fit_logistic
from murmuration.evaluation.measures.rows import Rows
from murmuration.evaluation.session.features import Extracted, extract
from murmuration.evaluation.session.result import Outcome, Result
from murmuration.evaluation.session.session import Chosen, Session, Work, by_list, numbered
from murmuration.train.measures.ranking import hits
from murmuration.train.measures.shares import MOST

FEATURES = "features"


def run(session: Session, work: Work) -> Outcome:
    arguments = work.arguments
    train, test = (Chosen.of(work.records[name]) for name in ("train", "test"))
    classes = numbered(train, work.classes, arguments.label)
    train, test = (by_list(part, classes) for part in (train, test))
    told = {"way": arguments.way, "label": arguments.label, "classes": len(classes.names), "views": arguments.views}
    result = session.result("probe", told | told_of_fit(arguments), {"train": train, "test": test})
    fitted_to = read_features(session, train, classes, arguments, arguments.views, "training records")
    scored = read_features(session, test, classes, arguments, 0, "test records")
    session.sharing.rest_on_main()
    note_unreadable(result, {"train": fitted_to, "test": scored}, arguments.label)
    probe = fitted(session, fitted_to.views, len(classes.names), arguments, result)
    right = hits_of(probe, scored.views[0], len(classes.names))
    result.add("top-1", share(int(right[0]), len(scored.views[0])))
    if len(right) == MOST:
        result.add("top-5", share(int(right.sum()), len(scored.views[0])))
    return Outcome(result)


LONGER = (
    f"A set of so few records was trained on for more than the published {LarsSettings.epochs} epochs, which would "
    f"hardly have moved the weights (--epochs {LarsSettings.epochs} repeats them)."
)


def lars_settings(arguments: Namespace) -> LarsSettings:
    """With the published epochs, unless they are given, a small set is trained on for longer."""
    epochs, longer = arguments.epochs or LarsSettings.epochs, arguments.epochs is None
    return LarsSettings(epochs, arguments.warmup, arguments.batch, arguments.base_rate, arguments.seed, longer)


def told_of_fit(arguments: Namespace) -> dict[str, Any]:
    return asdict(lars_settings(arguments)) if arguments.way == "vip" else {"penalty": f"{PENALTY_TIMES_N} / n"}


def note_unreadable(result: Result, parts: dict[str, Extracted], label: str) -> None:
    for name, found in parts.items():
        result.data[name]["unreadable"] = found.unreadable
        if not len(found.views[0]):
            raise EvaluationError(f"none of the {name} records can be read with a label {label!r}; name others")


def read_features(
    session: Session, part: Chosen, classes: ClassList, arguments: Namespace, views: int, what: str
) -> Extracted:  # fmt: skip
    """`views`: random crops per record; 0: the view of the evaluation itself."""
    spec = session.labelled(arguments.label, classes, len(classes.names))
    folder = session.out / FEATURES
    return extract(
        session.model, arguments.way, part.index, spec, views, folder, session.computing, what, session.sharing
    )


def fitted(
    session: Session, views: list[Rows], classes: int, arguments: Namespace, result: Result
) -> Logistic | LarsProbe:  # fmt: skip
    device = session.computing.device
    if arguments.way == "vip":
        if not arguments.views:
            result.notes.append(
                "Features were computed once, of one view of each training record; the published protocol crops anew "
                "in each epoch (--views 90)."
            )
        settings = lars_settings(arguments)
        if settings.of(len(views[0])) != settings and LONGER not in result.notes:
            result.notes.append(LONGER)
        return fit_lars(views, classes, device, settings, Progress("LARS", "steps"))
    found = fit_logistic(views[0], classes, device, arguments.iterations, Progress("L-BFGS", "iterations"))
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
