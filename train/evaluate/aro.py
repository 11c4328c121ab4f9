"""ARO: of several captions of a picture, does a captioner find the true one likeliest?

VG-Relation and VG-Attribution crop each picture to the box that the captions are about. Their published number is the
mean over groups of cases, that of the orders over all cases; both are given where there are groups.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmuration.data.index.selection import Selection
from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.caption_choices import LEAST_ATTRIBUTION, grouped, macro, micro
from murmuration.evaluation.caption_scores import chosen_options, pair_scores
from murmuration.model.captioner import Captioner
from murmuration.train.evaluate.caption_files import Case, Set, numbers_of, read_cases
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.result import Outcome
from murmuration.train.evaluate.session import Chosen, Session

NAMES: dict[Set, str] = {"relation": "VG-Relation", "attribution": "VG-Attribution", "order": "order"}


def run_aro(session: Session, chosen: Chosen, path: Path, text: TextEncoder) -> Outcome:
    model = session.model.model
    if not isinstance(model, Captioner):
        raise EvaluationError("ARO compares likelihoods of captions, and this model has none; name a captioner")
    kind, cases = read_cases(path)
    picked = _picked(chosen, cases, path)
    told = {
        "set": NAMES[kind], "cases": len(cases), "tokenizer": text.digest,
        "cases_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "score": "mean cross-entropy of the caption's tokens",
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
    answered = [cases[number] for number, _ in answers]
    best = chosen_options([scores for _, scores in answers])
    right = [choice == case.true for choice, case in zip(best, answered, strict=True)]
    result.add("accuracy", micro(right))
    if kind == "order":
        return Outcome(result)
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


def _picked(chosen: Chosen, cases: list[Case], path: Path) -> Chosen:
    """A record for each case, cropped to its box."""
    names = [chosen.name(int(record)) for record in chosen.ids]
    numbers = numbers_of([case.picture for case in cases], names, f"--cases {path}")
    boxes = [case.box for case in cases if case.box is not None]
    ids = chosen.ids[np.array(numbers)]
    return Chosen(Selection(chosen.index, ids, boxes or None), np.arange(len(cases)))
