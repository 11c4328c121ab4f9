"""Retrieval by likelihood: which caption a captioner finds likeliest for a picture, and for which picture a caption.

Every caption is scored after every picture, which is quadratic in their number. The scores lie in a mapped file, a row
per picture, and a stopped command computes only the rows that are missing.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from murmuration.data.batch.reader import BatchReader
from murmuration.data.batch.shard_reader import ShardReader, open_source
from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.caption_scores import all_scores, picture_ranks, text_ranks
from murmuration.evaluation.measures.interval import share
from murmuration.evaluation.models.weights import digest_of_model, open_text
from murmuration.evaluation.protocols.caption import TEXT
from murmuration.evaluation.protocols.caption_files import numbers_of, read_captions
from murmuration.evaluation.session.features import Filling, RowsToFill, claimed
from murmuration.evaluation.session.result import Outcome
from murmuration.evaluation.session.session import Chosen, Session, Work
from murmuration.model.captioner import Captioner
from murmuration.train.storage.feature_store import PRESENT, FeatureFolder, RowWriter

SCORES = "scores"
PLACES = (1, 5, 10)


@dataclass(frozen=True)
class Paired:
    """Pictures in order, and captions with the place of their picture."""

    pictures: Chosen
    captions: list[str]
    owner: np.ndarray


def run(session: Session, work: Work) -> Outcome:
    arguments = work.arguments
    chosen = Chosen.of(work.records["test"], arguments.records)
    text = open_text(session.subject, session.model, arguments.tokenizer)
    model = session.model.model
    if not isinstance(model, Captioner):
        raise EvaluationError("retrieval needs likelihoods of captions, and this model has none; name a captioner")
    captions, split = arguments.captions, arguments.split
    paired = _from_file(chosen, captions, split) if captions else _stored_captions(session, chosen)
    told = {
        "captions": len(paired.captions), "split": split, "tokenizer": text.digest,
        "captions_sha256": hashlib.sha256("\0".join(paired.captions).encode()).hexdigest(),
        "score": "mean cross-entropy of the caption's tokens",
    }  # fmt: skip
    result = session.result("retrieval", told, {"test": paired.pictures})
    scores, readable = _scores(session, model, paired, text)
    result.data["test"]["unreadable"] = int((~readable).sum())
    if not readable.any():
        raise EvaluationError("none of the pictures can be read; name others")
    kept = np.flatnonzero(readable[paired.owner])
    numbers = np.cumsum(readable) - 1
    owner, scores = numbers[paired.owner[kept]], scores[readable][:, kept]
    to_text, to_picture = text_ranks(scores, owner), picture_ranks(scores, owner)
    for what, ranks in (("image to text", to_text), ("text to image", to_picture)):
        for place in PLACES:
            result.add(f"{what} R@{place}", share(int((ranks < place).sum()), len(ranks)))
    return Outcome(result)


def _from_file(chosen: Chosen, path: Path, split: str | None) -> Paired:
    listed = read_captions(path, split)
    names = [chosen.name(int(record)) for record in chosen.ids]
    places = numbers_of([each.picture for each in listed], names, f"--captions {path}")
    if len(set(places)) < len(places):
        raise EvaluationError(f"--captions {path} lists a picture twice; join its captions")
    captions = [caption for each in listed for caption in each.captions]
    owner = np.repeat(np.arange(len(listed)), [len(each.captions) for each in listed])
    return Paired(Chosen(chosen.index, chosen.ids[places]), captions, owner)


def _stored_captions(session: Session, chosen: Chosen) -> Paired:
    """The caption stored with each record."""
    index = chosen.index
    ids = np.array([record for record in chosen.ids if not index.left_out(int(record))], dtype=np.int64)
    reader = ShardReader(index, open_source(index, session.computing.reading()))
    captions = []
    for record in ids:
        members = reader.read(int(record))
        if TEXT not in members:
            raise EvaluationError(
                f"{chosen.name(int(record))} has no .{TEXT} beside it; name captions with --captions, a JSON file"
            )
        captions.append(members[TEXT].decode("utf-8", "replace"))
    return Paired(Chosen(index, ids), captions, np.arange(len(ids)))


@torch.no_grad()
def _scores(session: Session, model: Captioner, paired: Paired, text: TextEncoder) -> tuple[np.ndarray, np.ndarray]:
    """[pictures, captions], and which pictures can be read."""
    tokens = torch.tensor([text.encode(caption) for caption in paired.captions])
    tokens = tokens[:, : int((tokens != text.pad).sum(dim=1).max())]
    spec, index, ids = session.spec(), paired.pictures.index, paired.pictures.ids
    told = (
        digest_of_model(session.model), index.manifest_digest, index.excluded_digest, ids.tobytes(), repr(spec),
        text.digest, paired.captions, session.computing.precision, session.computing.micro_batch,
    )  # fmt: skip
    identity = hashlib.sha256(repr(told).encode()).hexdigest()
    store = FeatureFolder.within(session.out / SCORES, identity, len(ids), len(tokens))

    def values_of(images: torch.Tensor) -> torch.Tensor:
        return all_scores(model, model.encode_images(images), tokens)

    with claimed(store, session.sharing) as some:
        if some:
            reader = BatchReader(index, spec, reading=session.computing.reading())
            with closing(reader), closing(RowWriter(store)) as writer:
                told_of = session.computing, session.sharing, "retrieval", "pictures"
                Filling(store, writer, reader, *told_of).fill(RowsToFill(0, ids), values_of)
    session.sharing.rest_on_main()
    found = store.rows()
    return found.features, np.asarray(found.state) == PRESENT
