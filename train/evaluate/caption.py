"""Captions of pictures, with their likelihood where the records have captions of their own."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from murmuration.accounting.durable import atomic
from murmuration.data.batch.shard_reader import ShardReader, open_source
from murmuration.data.decode.fields import has_caption
from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.captions import beam, greedy, nucleus
from murmuration.evaluation.interval import mean
from murmuration.model.captioner import Captioner
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.result import Outcome, Tile
from murmuration.train.evaluate.session import Chosen, Session
from murmuration.train.run.report_pictures import pixels, png

CAPTIONS = "captions.csv"
TEXT = "txt"


@dataclass(frozen=True)
class CaptionSettings:
    decode: Literal["greedy", "beam", "nucleus"] = "greedy"
    beams: int = 5
    p: float = 0.9
    seed: int = 0
    gallery: int = 48

    def told(self) -> dict[str, object]:
        more = {"greedy": {}, "beam": {"beams": self.beams}, "nucleus": {"p": self.p, "seed": self.seed}}
        return {"decode": self.decode, **more[self.decode]}


def run_caption(session: Session, chosen: Chosen, settings: CaptionSettings, text: TextEncoder) -> Outcome:
    model = session.model.model
    if not isinstance(model, Captioner):
        raise EvaluationError("this model writes no captions; name a captioner")
    spec = session.spec()
    captioned = _has_captions(session, chosen)

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        written = [text.decode(words) for words in _decoded(model, inputs["images"], ids, settings, text)]
        truths = [text.decode(row) for row in inputs["tokens"].tolist()] if captioned else [""] * len(written)
        losses = model(inputs).float().tolist() if captioned else [None] * len(written)
        room = max(0, settings.gallery - before)
        shown = [png(pixels(image, spec)) for image in inputs["images"][:room]]
        shown += [None] * (len(written) - len(shown))
        return list(zip(written, truths, losses, shown, strict=True))

    told = {**settings.told(), "tokenizer": text.digest, "length": model.shape.text_length}
    result = session.result("caption", told, {"test": chosen})
    read_by = text if captioned else None
    answers = session.answers(result, chosen, spec, act, read_by, (captioned, text.digest, settings.gallery))
    rows = [(chosen.name(record), caption, truth) for record, (caption, truth, _, _) in answers]
    tiles = [Tile(shown, caption, truth) for _, (caption, truth, _, shown) in answers if shown is not None]
    if captioned:
        result.add("loss per token of the true captions", mean([loss for _, (_, _, loss, _) in answers]))
        result.notes.append("Below each picture: the caption that was written, and in small print its own one.")
    _write(session, rows)
    return Outcome(result, tiles)


def _decoded(
    model: Captioner, images: Tensor, ids: np.ndarray, settings: CaptionSettings, text: TextEncoder
) -> list[list[int]]:
    memory, length = model.encode_images(images), model.shape.text_length
    if settings.decode == "beam":
        return beam(model, memory, text, length, settings.beams)
    if settings.decode == "nucleus":
        return nucleus(model, memory, text, length, p=settings.p, seed=settings.seed, records=ids.tolist())
    return greedy(model, memory, text, length)


def _has_captions(session: Session, chosen: Chosen) -> bool:
    """Whether the first record has a caption; then all must, and one that lacks it is unreadable."""
    index = chosen.index
    reader = ShardReader(index, open_source(index, session.computing.reading()))
    first = next((int(record) for record in chosen.ids if not index.left_out(int(record))), None)
    return first is not None and has_caption(reader.read(first), TEXT)


def _write(session: Session, rows: list[tuple[str, str, str]]) -> None:
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["record", "caption", "true caption"])
    lines.writerows(rows)
    with atomic(session.out / CAPTIONS) as file:
        file.write(text.getvalue().encode(errors="backslashreplace"))
