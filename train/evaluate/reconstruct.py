"""Hidden patches filled in by a masked autoencoder, and its loss on them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from murmuration.evaluation.interval import mean
from murmuration.model.mae import MaskedAutoencoder
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.result import Outcome, Tile
from murmuration.train.evaluate.session import Chosen, Session
from murmuration.train.run.report_pictures import reconstructions


def run_reconstruct(session: Session, chosen: Chosen, gallery: int) -> Outcome:
    model = session.model.model
    if not isinstance(model, MaskedAutoencoder):
        raise EvaluationError("this model fills in no patches; name a masked autoencoder")
    spec = session.spec(mask_patches=model.shape.patches)
    losses: list[float] = []
    tiles: list[Tile] = []

    def act(ids: np.ndarray, inputs: dict[str, Tensor]) -> None:
        losses.extend(model(inputs).float().tolist())
        room = max(0, gallery - len(tiles))
        if room:
            made = reconstructions(model, {name: tensor[:room] for name, tensor in inputs.items()}, spec)
            names = [chosen.name(int(record)) for record in ids]
            tiles.extend(Tile(each["png"], each["caption"], name) for each, name in zip(made, names, strict=False))

    told = {"mask_ratio": model.shape.mask_ratio, "masks": "keyed by record, the same in every evaluation"}
    result = session.result("reconstruct", told, {"test": chosen})
    result.data["test"]["unreadable"] = session.each(chosen, spec, "reconstruct", act)
    result.add("mean squared error of hidden patches", mean(losses))
    return Outcome(result, tiles)
