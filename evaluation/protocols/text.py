"""A language model's loss on texts, by text and by token, and its perplexity."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from murmuration.evaluation.measures.interval import bootstrap, mean
from murmuration.evaluation.models.weights import open_text
from murmuration.evaluation.session.result import Outcome, write_csv
from murmuration.evaluation.session.session import Chosen, Session, Work
from murmuration.model.language_model import LanguageModel

TEXTS = "texts.csv"
DRAWS = 1000


def run(session: Session, work: Work) -> Outcome:
    chosen = Chosen.of(work.records["test"], work.arguments.records)
    text = open_text(session.subject, session.model, work.arguments.tokenizer)
    model = session.model.model
    assert isinstance(model, LanguageModel), "no other is opened for it"
    spec = session.spec(pictures=False)

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        del ids, before
        counts = model.counted(inputs["tokens"][:, 1:]).sum(dim=1)
        return list(zip(model(inputs).float().tolist(), counts.tolist(), strict=True))

    result = session.result("text", {"tokenizer": text.digest, "length": text.length}, {"test": chosen})
    answers = session.answers(result, chosen, spec, act, text)
    losses, counts = np.array([answer for _, answer in answers], dtype=np.float64).T
    result.add("loss, mean over texts", mean(losses.tolist()))

    def by_token(places: np.ndarray) -> np.ndarray:
        loss = (losses[places] * counts[places]).sum() / counts[places].sum()
        return np.array([loss, np.exp(loss)])

    whole = by_token(np.arange(len(losses)))
    names = ("loss, mean over tokens", "perplexity")
    for name, found in zip(names, bootstrap(whole, by_token, len(losses), DRAWS), strict=True):
        result.add(name, found)
    rows = ((chosen.name(record), int(tokens), f"{loss:.6g}") for record, (loss, tokens) in answers)
    write_csv(session.out / TEXTS, ["record", "tokens", "loss"], rows)
    return Outcome(result)
