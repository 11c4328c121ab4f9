"""Hidden patches filled in by a masked autoencoder, and its loss on them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.interval import mean
from murmuration.evaluation.session.result import Outcome, Tile
from murmuration.evaluation.session.session import Chosen, Session, Work
from murmuration.model.mae import MaskedAutoencoder
from murmuration.train.run.report_pictures import reconstructions


def run(session: Session, work: Work) -> Outcome:
    chosen, gallery = Chosen.of(work.records["test"], work.arguments.records), work.arguments.gallery
    model = session.model.model
    if not isinstance(model, MaskedAutoencoder):
        raise EvaluationError("this model fills in no patches; name a masked autoencoder")
    spec = session.spec(mask_patches=model.shape.patches)

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        losses = model(inputs).float().tolist()
        room = max(0, gallery - before)
        # Of the whole micro-batch, because what is rounded depends on its size.
        shown: list[Any] = reconstructions(model, inputs, spec)[:room] if room else []
        return list(zip(losses, shown + [None] * (len(ids) - len(shown)), strict=True))

    told = {"mask_ratio": model.shape.mask_ratio, "masks": "keyed by record, the same in every evaluation"}
    result = session.result("reconstruct", told, {"test": chosen})
    answers = session.answers(result, chosen, spec, act, depends_on=gallery)
    result.add("mean squared error of hidden patches", mean([loss for _, (loss, _) in answers]))
    shown = [(record, made) for record, (_, made) in answers[:gallery] if made is not None]
    return Outcome(result, [Tile(made["png"], made["caption"], chosen.name(record)) for record, made in shown])
