"""ARO: of several captions of a picture, does a captioner find the true one likeliest?

VG-Relation and VG-Attribution crop each picture to the box that the captions are about. Their published number is the
mean over groups of cases, that of the orders over all cases; both are given where there are groups. Cases are read, or
made of captions whose words are put in another order.
"""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmuration.accounting.durable import atomic
from murmuration.data.index.selection import Selection
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.caption_scores import (
    LEAST_ATTRIBUTION,
    SHUFFLED,
    UNTAGGED,
    chance,
    chosen_options,
    grouped,
    macro,
    micro,
    pair_scores,
)
from murmuration.evaluation.models.weights import open_text
from murmuration.evaluation.protocols.caption_files import Case, Set, made_cases, numbers_of, read_cases
from murmuration.evaluation.session.result import Outcome, Result
from murmuration.evaluation.session.session import Chosen, Session, Work
from murmuration.model.captioner import Captioner

MADE = "cases.json"
NAMES: dict[Set, str] = {"relation": "VG-Relation", "attribution": "VG-Attribution", "order": "order"}


@dataclass(frozen=True)
class AroCases:
    """Cases, what names them, and the bytes that they are or can be read from."""

    kind: Set
    cases: list[Case]
    option: str
    content: bytes
    made: dict[str, Any]
    """How they were made; empty for those that were read."""


def run(session: Session, work: Work) -> Outcome:
    chosen = Chosen.of(work.records["test"])
    text = open_text(session.subject, session.model, work.arguments.tokenizer)
    model = session.model.model
    if not isinstance(model, Captioner):
        raise EvaluationError("ARO compares likelihoods of captions, and this model has none; name a captioner")
    given = _cases_of(work.arguments)
    cases = given.cases
    picked = _picked(chosen, cases, given.option)
    told = {
        "set": NAMES[given.kind], "cases": len(cases), "tokenizer": text.digest,
        "cases_sha256": hashlib.sha256(given.content).hexdigest(),
        "score": "mean cross-entropy of the caption's tokens",
        "chance": sum(chance(case.options, case.true) for case in cases) / len(cases), **given.made,
    }  # fmt: skip
    result = session.result("aro", told, {"test": picked})

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        here = [cases[int(number)] for number in ids]
        pictures = torch.tensor([row for row, case in enumerate(here) for _ in case.options])
        tokens = torch.tensor([text.encode(option) for case in here for option in case.options])
        scores = pair_scores(model, model.encode_images(inputs["images"]), pictures, tokens).tolist()
        places = np.cumsum([0, *(len(case.options) for case in here)])
        return [scores[begin:end] for begin, end in pairwise(places)]

    answers = session.answers(result, picked, session.spec(), act)
    if given.made:
        with atomic(session.out / MADE) as file:
            file.write(given.content)
    answered = [cases[number] for number, _ in answers]
    best = chosen_options([scores for _, scores in answers])
    right = [choice == case.true for choice, case in zip(best, answered, strict=True)]
    result.add("accuracy", micro(right))
    result.notes.append(f"A model that knows nothing would be right in {told['chance']:.4f} of the cases.")
    if given.made and work.arguments.tags is None:
        result.notes.append(
            "Words are shuffled within trigrams and by trigrams alone, because no tags were given: 3 options, where "
            "the published sets have 5."
        )
    return Outcome(result) if given.kind == "order" else _by_group(result, given.kind, answered, right)


def _cases_of(arguments: Namespace) -> AroCases:
    path, captions = arguments.cases, arguments.captions
    if path is not None:
        kind, cases = read_cases(path)
        return AroCases(kind, cases, f"--cases {path}", path.read_bytes(), {})
    cases = made_cases(captions, arguments.split, arguments.tags, arguments.seed)
    content = json.dumps([case.told() for case in cases], indent=1).encode() + b"\n"
    shuffled = SHUFFLED if arguments.tags else UNTAGGED
    made = {"shuffled": list(shuffled), "seed": arguments.seed, "split": arguments.split}
    return AroCases("order", cases, f"--captions {captions}", content, made)


def _by_group(result: Result, kind: Set, answered: list[Case], right: list[bool]) -> Outcome:
    groups = grouped([case.group for case in answered], right)
    least = LEAST_ATTRIBUTION if kind == "attribution" else 1
    what = "pairs of attributes" if kind == "attribution" else "relations"
    found = macro(groups, least)
    if found is None:
        result.notes.append(f"No group has {least} cases, so there is no mean over {what}.")
    else:
        result.add(f"accuracy, mean over {what}", found)
        enough = f" with at least {least} cases" if least > 1 else ""
        result.notes.append(f"The mean over {what} counts those{enough}; its n is their number.")
    table = [["group", "right", "of"], *([group.name, str(group.right), str(group.cases)] for group in groups)]
    return Outcome(result, table=table, table_title=f"By {'pair' if kind == 'attribution' else 'relation'}")


def _picked(chosen: Chosen, cases: list[Case], option: str) -> Chosen:
    """A record for each case, cropped to its box."""
    names = [chosen.name(int(record)) for record in chosen.ids]
    numbers = numbers_of([case.picture for case in cases], names, option)
    boxes = [case.box for case in cases if case.box is not None]
    ids = chosen.ids[np.array(numbers)]
    return Chosen(Selection(chosen.index, ids, boxes or None), np.arange(len(cases)))
