"""Captions of pictures, with their likelihood where the records have captions of their own."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from murmuration.data.batch.shard_reader import ShardReader, open_source
from murmuration.data.decode.fields import captions_of, has_caption
from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.caption_metrics import caption_metrics
from murmuration.evaluation.measures.interval import mean
from murmuration.evaluation.models.weights import open_text
from murmuration.evaluation.protocols.caption_files import numbers_of, read_captions
from murmuration.evaluation.session.result import Outcome, Result, Tile, write_csv
from murmuration.evaluation.session.session import Chosen, Session, Work
from murmuration.model.captioner import Captioner
from murmuration.train.measures.captions import beam, greedy, nucleus
from murmuration.train.run.report_pictures import pixels, png

CAPTIONS = "captions.csv"
TEXT = "txt"


def run(session: Session, work: Work) -> Outcome:
    arguments = work.arguments
    chosen = Chosen.of(work.records["test"], arguments.records)
    text = open_text(session.subject, session.model, arguments.tokenizer)
    model = session.model.model
    if not isinstance(model, Captioner):
        raise EvaluationError("this model writes no captions; name a captioner")
    spec = session.spec()
    listed: dict[int, tuple[str, ...]] | None = None
    if arguments.captions is not None:
        chosen, listed = _listed(chosen, arguments.captions, arguments.split)
    captioned = listed is None and _has_captions(session, chosen)

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        written = [text.decode(words) for words in _decoded(model, inputs["images"], ids, arguments, text)]
        truths = [text.decode(row) for row in inputs["tokens"].tolist()] if captioned else [""] * len(written)
        losses = model(inputs).float().tolist() if captioned else [None] * len(written)
        room = max(0, arguments.gallery - before)
        shown = [png(pixels(image, spec)) for image in inputs["images"][:room]]
        shown += [None] * (len(written) - len(shown))
        return list(zip(written, truths, losses, shown, strict=True))

    more = {"greedy": (), "beam": ("beams",), "nucleus": ("p", "seed")}[arguments.decode]
    told = {name: getattr(arguments, name) for name in ("decode", *more)}
    told |= {"tokenizer": text.digest, "length": model.shape.text_length}
    if listed is not None:
        told |= {"captions_sha256": hashlib.sha256(repr(sorted(listed.items())).encode()).hexdigest()}
    result = session.result("caption", told, {"test": chosen})
    read_by = text if captioned else None
    answers = session.answers(result, chosen, spec, act, read_by, (captioned, text.digest, arguments.gallery))
    rows = [(chosen.name(record), caption, truth) for record, (caption, truth, _, _) in answers]
    first = [answer for _, answer in answers[: arguments.gallery]]
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
    model: Captioner, images: Tensor, ids: np.ndarray, arguments: Namespace, text: TextEncoder
) -> list[list[int]]:
    memory, length = model.encode_images(images), model.shape.text_length
    if arguments.decode == "beam":
        return beam(model, memory, text, length, arguments.beams)
    if arguments.decode == "nucleus":
        return nucleus(model, memory, text, length, p=arguments.p, seed=arguments.seed, records=ids.tolist())
    return greedy(model, memory, text, length)


def _has_captions(session: Session, chosen: Chosen) -> bool:
    """Whether the first record has a caption; then all must, and one that lacks it is unreadable."""
    index = chosen.index
    reader = ShardReader(index, open_source(index, session.computing.reading()))
    first = next((int(record) for record in chosen.ids if not index.left_out(int(record))), None)
    return first is not None and has_caption(reader.read(first), TEXT)
