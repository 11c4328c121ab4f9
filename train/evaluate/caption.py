"""Captions of pictures, with their likelihood where the records have captions of their own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from murmuration.data.batch.shard_reader import ShardReader, open_source
from murmuration.data.decode.fields import captions_of, has_caption
from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.caption_metrics import caption_metrics
from murmuration.evaluation.captions import beam, greedy, nucleus
from murmuration.evaluation.interval import mean
from murmuration.model.captioner import Captioner
from murmuration.train.evaluate.caption_files import numbers_of, read_captions
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.result import Outcome, Result, Tile, write_csv
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
    captions: Path | None = None
    """A JSON file of pictures and their captions; None: what lies beside the pictures, if anything does."""
    split: str | None = None

    def told(self) -> dict[str, object]:
        more = {"greedy": {}, "beam": {"beams": self.beams}, "nucleus": {"p": self.p, "seed": self.seed}}
        return {"decode": self.decode, **more[self.decode]}


def run_caption(session: Session, chosen: Chosen, settings: CaptionSettings, text: TextEncoder) -> Outcome:
    model = session.model.model
    if not isinstance(model, Captioner):
        raise EvaluationError("this model writes no captions; name a captioner")
    spec = session.spec()
    listed: dict[int, tuple[str, ...]] | None = None
    if settings.captions is not None:
        chosen, listed = _listed(chosen, settings.captions, settings.split)
    captioned = listed is None and _has_captions(session, chosen)

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        written = [text.decode(words) for words in _decoded(model, inputs["images"], ids, settings, text)]
        truths = [text.decode(row) for row in inputs["tokens"].tolist()] if captioned else [""] * len(written)
        losses = model(inputs).float().tolist() if captioned else [None] * len(written)
        room = max(0, settings.gallery - before)
        shown = [png(pixels(image, spec)) for image in inputs["images"][:room]]
        shown += [None] * (len(written) - len(shown))
        return list(zip(written, truths, losses, shown, strict=True))

    told = {**settings.told(), "tokenizer": text.digest, "length": model.shape.text_length}
    if listed is not None:
        told |= {"captions_sha256": hashlib.sha256(repr(sorted(listed.items())).encode()).hexdigest()}
    result = session.result("caption", told, {"test": chosen})
    read_by = text if captioned else None
    answers = session.answers(result, chosen, spec, act, read_by, (captioned, text.digest, settings.gallery))
    rows = [(chosen.name(record), caption, truth) for record, (caption, truth, _, _) in answers]
    first = [answer for _, answer in answers[: settings.gallery]]
    tiles = [Tile(shown, caption, truth) for caption, truth, _, shown in first if shown is not None]
    if captioned:
        result.add("loss per token of the true captions", mean([loss for _, (_, _, loss, _) in answers]))
        result.notes.append("Below each picture: the caption that was written, and in small print its own one.")
    if captioned or listed is not None:
        _add_metrics(session, result, chosen, [(record, caption) for record, (caption, *_) in answers], listed)
    write_csv(session.out / CAPTIONS, ["record", "caption", "true caption"], rows)
    return Outcome(result, tiles)


def _listed(chosen: Chosen, path: Path, split: str | None) -> tuple[Chosen, dict[int, tuple[str, ...]]]:
    """The pictures that the file lists, and their captions."""
    captioned = read_captions(path, split)
    names = [chosen.name(int(record)) for record in chosen.ids]
    places = numbers_of([each.picture for each in captioned], names, f"--captions {path}")
    found = {int(chosen.ids[place]): each.captions for place, each in zip(places, captioned, strict=True)}
    if len(found) < len(captioned):
        raise EvaluationError(f"--captions {path} lists a picture twice; join its captions")
    return Chosen(chosen.index, np.array(sorted(found))), found


def _add_metrics(
    session: Session, result: Result, chosen: Chosen, written: list[tuple[int, str]],
    listed: dict[int, tuple[str, ...]] | None,
) -> None:  # fmt: skip
    """Against all captions of each picture, not the one alone whose loss is measured."""
    if listed is None:
        reader = ShardReader(chosen.index, open_source(chosen.index, session.computing.reading()))
        references = [captions_of(reader.read(record), TEXT) for record, _ in written]
    else:
        references = [list(listed[record]) for record, _ in written]
    for name, found in caption_metrics([caption for _, caption in written], references).items():
        result.add(name, found)
    result.notes.append("Words are cut without Stanford's tokenizer, by which published BLEU, ROUGE and CIDEr are.")


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
