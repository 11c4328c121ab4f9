"""Membership inference on a finished model: how well losses and logits tell its training records from others.

What it finds is a function of the records without noise. Nothing could charge that to a run's budget, so real private
records are not attacked: members are public like all evaluated records, or (by the owner's word) stand-ins, which are
public or synthetic pictures that only play the private set of a run. The log of runs on stand-ins then gets an entry
without privacy, which later certificates on the same records repeat; and what is left is for the owner alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmuration.data.batch.reader import DataSpec
from murmuration.data.decode.class_list import ClassList
from murmuration.data.store.place import RecordIndex
from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.membership import Attack, MembershipError, by_classifier, by_threshold, lira
from murmuration.evaluation.models.subject import Subject
from murmuration.evaluation.models.weights import Evaluated, open_text
from murmuration.evaluation.session.result import Outcome, write_csv
from murmuration.evaluation.session.session import Chosen, Session, Work, by_list, numbered
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.model.mae import MaskedAutoencoder
from murmuration.train.storage.sibling_runs import RunLog

SCORES = "attack.csv"
PARTS = ("members", "others")


@dataclass(frozen=True)
class Shadow:
    """A model trained like the attacked one, and which of the records it was trained on, as `attack.csv` names them."""

    model: Evaluated
    inside: frozenset[str]


@dataclass(frozen=True)
class Signals:
    """Signals of all readable records, members first: the loss, a confidence, and the logits if there are any."""

    names: list[str]
    losses: np.ndarray
    confidences: np.ndarray
    logits: np.ndarray


def _log_stand_in(index: RecordIndex, attacked: str, out: Path) -> None:
    """Logs the attack with the data, before anything is computed; refused where the records have a budget."""
    # The same when a stopped command is started again, so that it is logged once.
    own = hashlib.sha256(f"attack {attacked} {out.resolve()}".encode()).hexdigest()[:32]
    log = RunLog.of(index)
    with log.alone() as held:
        held.require_budget({own}, None)
        if warning := held.register(own, "attack", f"an attack on {attacked}", None, None):
            raise EvaluationError(f"{warning} (an attack on stand-ins must be logged with them)")


def run(session: Session, work: Work) -> Outcome:
    arguments = work.arguments
    if arguments.stand_in:
        attacked = session.subject.path.resolve().name
        session.sharing.on_main(lambda: _log_stand_in(work.records["members"], attacked, session.out))
    count = min(index.records for index in work.records.values())
    if arguments.records is not None:
        count = min(count, arguments.records)
    members, others = (Chosen.of(work.records[name], count) for name in PARTS)
    captioner = isinstance(session.model.model, Captioner)
    text = open_text(session.subject, session.model, arguments.tokenizer) if captioner else None
    read = _shadows(session, work)
    spec, parts = _spec(session, members, others, work.classes, arguments.label)
    told = {"stand_in": arguments.stand_in, "shadows": len(read), "label": arguments.label}
    result = session.result("attack", told, dict(zip(PARTS, parts, strict=True)))
    result.private = True

    def signals(model: Evaluated) -> list[Signals]:
        asked, own = replace(session, model=model), replace(spec, mean=model.pixels.mean, std=model.pixels.std)
        return [
            _signals(asked, result, name, part, own, text) for name, part in zip(PARTS, parts, strict=True)
        ]  # fmt: skip

    inside, outside = signals(session.model)
    shadows = [_joined(*signals(shadow.model)) for shadow in read]
    session.sharing.rest_on_main()
    found = _joined(inside, outside)
    whose = np.arange(len(found.names)) < len(inside.names)
    attacks: dict[str, Attack] = {}
    try:
        attacks["loss"] = by_threshold(-found.losses, whose)
        attacks["loss and logits"] = by_classifier(np.column_stack([found.losses, found.logits]), whose)
        if read:
            attacks["LiRA"] = by_threshold(_lira(found, shadows, read), whose)
    except MembershipError as error:
        raise EvaluationError(str(error)) from None
    for name, attack in attacks.items():
        for measure, number in attack.numbers().items():
            result.add(f"{measure}, {name}", number)
    result.notes.append(
        "PRIVATE: all of this was computed from training records without noise. Logits are read by a logistic "
        "regression, fitted to one half of the records and scored on the other; thresholds are chosen likewise, but "
        "for recall at a share of false alarms, whose threshold is read off the records that it scores."
    )
    _write(found, whose, attacks, session.out / SCORES)
    return Outcome(result)


def _shadows(session: Session, work: Work) -> list[Shadow]:
    found = []
    for what, *listed in work.arguments.shadow:
        model = work.open_model(Subject.at(what, work.arguments.config, work.arguments.set))
        model.model.to(session.computing.device)
        try:
            lines = [line.strip() for path in listed for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(f"--shadow {what} {listed[0]}: {error}") from None
        found.append(Shadow(model, frozenset(filter(None, lines))))
    return found


def _spec(
    session: Session, members: Chosen, others: Chosen, classes: ClassList | None, label: str | None
) -> tuple[DataSpec, list[Chosen]]:
    model = session.model.model
    if isinstance(model, Classifier):
        if label is None:
            raise EvaluationError("a classifier's losses need labels; name them with --label")
        classes = numbered(members, classes, label)
        return session.labelled(label, classes, model.shape.head.classes), [
            by_list(members, classes),
            by_list(others, classes),
        ]
    masks = model.shape.patches if isinstance(model, MaskedAutoencoder) else 0
    return session.spec(mask_patches=masks), [members, others]


def _signals(
    session: Session, result: Any, name: str, part: Chosen, spec: DataSpec, text: TextEncoder | None
) -> Signals:
    model = session.model.model

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        losses = model(inputs).float()
        if not isinstance(model, Classifier):
            return [(loss, -loss, []) for loss in losses.tolist()]
        logits = model.logits(inputs["images"]).double()
        own = logits.gather(1, inputs["labels"][:, None])
        others = logits.scatter(1, inputs["labels"][:, None], -torch.inf)
        # ln(p / (1 - p)) of the softmax's probability p, which LiRA takes because it is nearly normal.
        sure = (own[:, 0] - others.logsumexp(dim=1)).tolist()
        return list(zip(losses.tolist(), sure, logits.tolist(), strict=True))

    answers = session.answers(result, part, spec, act, text, depends_on=name, part=name, last=False)
    names = [f"{name}/{part.name(record)}" for record, _ in answers]
    losses, sure, logits = zip(*(answer for _, answer in answers), strict=True)
    return Signals(names, np.array(losses), np.array(sure), np.array(logits, dtype=float).reshape(len(names), -1))


def _joined(first: Signals, second: Signals) -> Signals:
    def both(name: str) -> np.ndarray:
        return np.concatenate([getattr(first, name), getattr(second, name)])

    return Signals([*first.names, *second.names], both("losses"), both("confidences"), both("logits"))


def _lira(found: Signals, signals: list[Signals], shadows: list[Shadow]) -> np.ndarray:
    for shadow in shadows:
        if unknown := sorted(shadow.inside - set(found.names)):
            raise EvaluationError(
                f"a list of a shadow's records names {unknown[0]!r}, which is none of the records; write "
                "members/NAME or others/NAME, one per line"
            )
    inside = np.array([[name in shadow.inside for name in found.names] for shadow in shadows])
    return lira(found.confidences, np.stack([each.confidences for each in signals]), inside)


def _write(found: Signals, members: np.ndarray, attacks: dict[str, Attack], path: Path) -> None:
    rows = []
    for number, name in enumerate(found.names):
        scores = [f"{attack.scores[number]:.6g}" for attack in attacks.values()]
        rows.append([name, int(members[number]), f"{found.losses[number]:.6g}", *scores])
    write_csv(path, ["record", "member", "loss", *(f"score, {name}" for name in attacks)], rows, mode=0o600)
