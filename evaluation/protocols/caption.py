"""Captions of pictures, with their likelihood where the records have captions of their own."""

from __future__ import annotations

import hashlib
import math
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from murmuration.data.batch.shard_reader import ShardReader, open_source
from murmuration.data.decode.fields import captions_of, has_caption
from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.interval import Estimate, bootstrap, mean
from murmuration.evaluation.models.weights import open_text
from murmuration.evaluation.protocols.caption_files import numbers_of, read_captions
from murmuration.evaluation.session.result import Outcome, Result, Tile, write_csv
from murmuration.evaluation.session.session import Chosen, Session, Work
from murmuration.model.captioner import Captioner
from murmuration.train.measures.captions import CaptionWriter
from murmuration.train.run.report_pictures import pixels, png

LONGEST = 4
"""Words of an n-gram."""
RECALL_WEIGHT = 1.2
"""β of ROUGE-L."""
LENGTH_SPREAD = 6.0
"""σ of CIDEr-D: words by which lengths may differ."""
DRAWS = 1000
Words = list[str]
Grams = Counter[tuple[str, ...]]


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
    captioned = False
    if listed is None:
        # If the first record has a caption, all must: one that lacks it is then unreadable.
        reader = ShardReader(chosen.index, open_source(chosen.index, session.computing.reading()))
        first = next((int(record) for record in chosen.ids if not chosen.index.left_out(int(record))), None)
        captioned = first is not None and has_caption(reader.read(first), TEXT)

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
    memory, writer = model.encode_images(images), CaptionWriter(model, text, model.shape.text_length)
    if arguments.decode == "beam":
        return writer.beam(memory, arguments.beams)
    if arguments.decode == "nucleus":
        return writer.nucleus(memory, arguments.p, arguments.seed, ids.tolist())
    return writer.greedy(memory)


# How near written captions come to those of people: BLEU-4, ROUGE-L and CIDEr-D, by their published formulas.
#
# Words are lower-cased runs of letters, digits and apostrophes. Published numbers cut words by another program (that
# of Stanford), so they differ by a little.


def words_of(caption: str) -> Words:
    return re.findall(r"[\w']+", caption.lower())


def caption_metrics(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Estimate]:
    """Compares each written caption with one or more references of its picture."""
    captions = [words_of(caption) for caption in written]
    known = [[words_of(caption) for caption in each] for each in references]
    counts = np.array([_overlaps(one, others) for one, others in zip(captions, known, strict=True)], dtype=np.float64)

    def corpus(places: np.ndarray) -> np.ndarray:
        return np.array([_bleu(counts[places].sum(axis=0))])

    (bleu,) = bootstrap(corpus(np.arange(len(counts))), corpus, len(counts), DRAWS)
    rouge = mean([_rouge(one, others) for one, others in zip(captions, known, strict=True)])
    return {"BLEU-4": bleu, "ROUGE-L": rouge, "CIDEr-D": mean(_cider(captions, known))}


def _grams(words: Words, length: int) -> Grams:
    return Counter(tuple(words[at : at + length]) for at in range(len(words) - length + 1))


def _overlaps(caption: Words, references: Sequence[Words]) -> list[int]:
    """Right n-grams and all n-grams for each n, then the caption's length and that of the reference nearest to it."""
    found: list[int] = []
    for length in range(1, LONGEST + 1):
        here, most = _grams(caption, length), Counter[tuple[str, ...]]()
        for reference in references:
            most |= _grams(reference, length)
        found += [(here & most).total(), here.total()]
    nearest = min((abs(len(each) - len(caption)), len(each)) for each in references)[1]
    return [*found, len(caption), nearest]


def _bleu(counts: np.ndarray) -> float:
    """BLEU of the whole set: n-grams are counted over all captions, not averaged by caption."""
    right, whole = counts[0 : 2 * LONGEST : 2], counts[1 : 2 * LONGEST : 2]
    length, reference = counts[2 * LONGEST :]
    if not right.all():
        return 0.0
    short = min(0.0, 1.0 - reference / length)
    return math.exp(short + float(np.log(right / whole).mean()))


def _rouge(caption: Words, references: Sequence[Words]) -> float:
    common = [_longest_common(caption, each) for each in references]
    precision = max((each / len(caption) for each in common), default=0.0) if caption else 0.0
    recall = max(each / len(other) if other else 0.0 for each, other in zip(common, references, strict=True))
    if not precision or not recall:
        return 0.0
    weight = RECALL_WEIGHT**2
    return (1 + weight) * precision * recall / (recall + weight * precision)


def _longest_common(one: Words, other: Words) -> int:
    """Words of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        before, row = row, [0]
        for place, against in enumerate(other):
            row.append(before[place] + 1 if word == against else max(row[place], before[place + 1]))
    return row[-1]


def _cider(captions: Sequence[Words], references: Sequence[Sequence[Words]]) -> list[float]:
    pictures, scores = len(captions), np.zeros(len(captions))
    for length in range(1, LONGEST + 1):
        having: Grams = Counter()
        for each in references:
            having.update({gram for reference in each for gram in _grams(reference, length)})
        for number, (caption, others) in enumerate(zip(captions, references, strict=True)):
            near = [_similar(caption, other, length, having, pictures) for other in others]
            scores[number] += 10 * sum(near) / len(near) / LONGEST
    return scores.tolist()


def _similar(caption: Words, reference: Words, length: int, having: Grams, pictures: int) -> float:
    """Cosine of the n-grams, weighted by their rarity among the references, as CIDEr-D clips and damps it."""
    mine, theirs = (
        {gram: count * math.log(pictures / max(1, having[gram])) for gram, count in _grams(words, length).items()}
        for words in (caption, reference)
    )
    norms = [math.sqrt(sum(value * value for value in each.values())) for each in (mine, theirs)]
    if not all(norms):
        return 0.0
    product = sum(min(value, theirs.get(gram, 0.0)) * theirs.get(gram, 0.0) for gram, value in mine.items())
    return product / math.prod(norms) * math.exp(-((len(caption) - len(reference)) ** 2) / (2 * LENGTH_SPREAD**2))
