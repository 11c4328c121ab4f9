"""Linear probes: how much of the classes a linear layer finds in frozen features, as two papers measure it."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.data.decode.class_list import ClassList
from murmuration.data.progress import Progress
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.interval import share
from murmuration.evaluation.measures.logistic import PENALTY_TIMES_N, Logistic, fit_logistic
from murmuration.evaluation.measures.rows import Rows
from murmuration.evaluation.session.features import Extracted, extract
from murmuration.evaluation.session.result import Outcome, Result
from murmuration.evaluation.session.session import Chosen, Session, Work, by_list, numbered
from murmuration.train.measures.ranking import hits
from murmuration.train.measures.shares import MOST

EPSILON = 1e-6
MOMENTUM, TRUST = 0.9, 0.001
BASE_BATCH = 256
INITIAL_STD = 0.01
MOST_TIMES = 50.0


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


# ViP's linear probe: BatchNorm without affine parameters, then a linear layer that LARS trains.
#
# LARS as published for masked autoencoders: momentum 0.9 over gradients scaled by 0.001·‖w‖/‖g‖ per matrix, biases
# unscaled, no weight decay, linear warm-up and a half cosine. Batches are drawn anew each epoch from a seed; records
# left after the last whole batch wait for another epoch. `train/optim/optimizers.py` has the same rule for sharded
# parameters.


@dataclass(frozen=True)
class LarsSettings:
    """The defaults are the published ones; a set smaller than a batch is one batch, with the rate for its size."""

    epochs: int = 90
    warmup: int = 10
    batch: int = 16384
    base_rate: float = 0.1
    """For a batch of 256."""
    seed: int = 0
    longer: bool = False
    """Whether a set smaller than a batch is trained on until as many records were seen as whole batches have, in
    MOST_TIMES as many epochs at most: else its few steps, at the rate for its size, hardly move the weights."""

    def of(self, records: int) -> LarsSettings:
        """As so many records are trained on."""
        times = min(max(1.0, self.batch / records), MOST_TIMES) if self.longer else 1.0
        return replace(self, epochs=math.ceil(self.epochs * times), warmup=round(self.warmup * times))

    def batch_of(self, records: int) -> int:
        return min(self.batch, records)

    def rate(self, epoch: float, batch: int) -> float:
        """At a moment of the training, counted in epochs."""
        peak = self.base_rate * batch / BASE_BATCH
        if epoch < self.warmup:
            return peak * epoch / self.warmup
        part = (epoch - self.warmup) / max(1, self.epochs - self.warmup)
        return peak * 0.5 * (1.0 + math.cos(math.pi * part))

    def order(self, records: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(records)


LONGER = (
    f"A set of so few records was trained on for more than the published {LarsSettings.epochs} epochs, which would "
    f"hardly have moved the weights (--epochs {LarsSettings.epochs} repeats them)."
)


class LarsProbe(nn.Module):
    def __init__(self, width: int, classes: int, seed: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=False, eps=EPSILON)
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(INITIAL_STD * torch.randn(classes, width, generator=draw))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(self.norm(features), self.weight, self.bias)

    def scores(self, features: Tensor) -> Tensor:
        return self(features.to(self.weight.device))


def fit_lars(
    views: list[Rows], classes: int, device: torch.device, settings: LarsSettings, tell: Callable[[int, int], object]
) -> LarsProbe:
    """`views` hold the same records in the same order, differently cropped; each epoch takes the next one."""
    records = len(views[0])
    batch = settings.batch_of(records)
    if batch < 2:
        raise ValueError("BatchNorm needs at least two records to train on; name more")
    settings, steps = settings.of(records), records // batch
    probe = LarsProbe(views[0].width, classes, settings.seed).to(device).train()
    velocity = [torch.zeros_like(parameter) for parameter in probe.parameters()]
    tell(0, settings.epochs * steps)
    with torch.enable_grad():
        for epoch in range(settings.epochs):
            order = settings.order(records, epoch)
            for step in range(steps):
                features, labels = views[epoch % len(views)].take(order[step * batch : (step + 1) * batch])
                loss = F.cross_entropy(probe(features.to(device)), labels.to(device))
                gradients = torch.autograd.grad(loss, list(probe.parameters()))
                _move(probe, gradients, velocity, settings.rate(epoch + step / steps, batch))
                tell(epoch * steps + step + 1, settings.epochs * steps)
    return probe.eval()


@torch.no_grad()
def _move(probe: nn.Module, gradients: tuple[Tensor, ...], velocity: list[Tensor], rate: float) -> None:
    for parameter, gradient, moving in zip(probe.parameters(), gradients, velocity, strict=True):
        if parameter.dim() > 1:
            weights, length = parameter.norm(), gradient.norm()
            gradient = gradient * torch.where((weights > 0) & (length > 0), TRUST * weights / length, 1.0)
        moving.mul_(MOMENTUM).add_(gradient)
        parameter.sub_(moving, alpha=rate)
