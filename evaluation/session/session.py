"""What all protocols share: the model, the records that are scored, and the result that is being filled."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.decode.augment import Augment, view_in_words
from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.keyed_digest import ledger_digests
from murmuration.data.index.public_split import SplitIndex, whole_of
from murmuration.data.index.selection import Selection
from murmuration.data.store.place import RecordIndex
from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.models.subject import Subject
from murmuration.evaluation.models.weights import Evaluated, digest_of_model
from murmuration.evaluation.session.answers import Answers, MicroBatchAnswers
from murmuration.evaluation.session.features import Computing, ReadBatch, batches, places_of_micro_batches
from murmuration.evaluation.session.public_records import digest_for_all
from murmuration.evaluation.session.result import Result, certificate_of
from murmuration.evaluation.session.sharing import Sharing
from murmuration.train.clip.engine import autocast
from murmuration.train.recipe.labels import FOLDERS

MASKS = b"masks of evaluated pictures"
"""Public, so that two evaluations hide the same patches."""
DRAWN_BY = 0
"""The seed of every draw of records, so that all models are scored on the same ones."""
Act = Callable[[np.ndarray, dict[str, Tensor], int], list[Any]]
"""Readable records, their inputs, and how many before them were answered -> one answer each. By that number, an answer
may leave out what is shown of the first ones alone; it is smaller where other processes answered some of them."""


@dataclass(frozen=True)
class Chosen:
    """The records of an index that are scored, in order."""

    index: RecordIndex
    ids: np.ndarray

    @staticmethod
    def of(index: RecordIndex, count: int | None = None) -> Chosen:
        """All, or `count` that are drawn by a fixed seed."""
        if count is None or count >= index.records:
            return Chosen(index, np.arange(index.records))
        drawn = np.random.default_rng(DRAWN_BY).choice(index.records, count, replace=False)
        return Chosen(index, np.sort(drawn))

    @property
    def folders(self) -> FolderIndex | None:
        """The class folders behind the records, if there are any."""
        whole = whole_of(self.index)
        return whole if isinstance(whole, FolderIndex) and whole.labelled else None

    def name(self, record: int) -> str:
        place, start, _ = self.index.locate(record)
        whole = whole_of(self.index)
        if isinstance(whole, FolderIndex) and isinstance(place, Path):
            return str(place.relative_to(whole.root))
        return f"{str(place).rpartition('/')[2]} at byte {start}"


@dataclass(frozen=True)
class Session:
    subject: Subject
    model: Evaluated
    computing: Computing
    view: Augment
    out: Path
    sharing: Sharing = field(default_factory=Sharing)

    def spec(self, **more: Any) -> DataSpec:
        model = self.model
        return DataSpec(
            model.shape.image_size, augment=self.view, mean=model.pixels.mean, std=model.pixels.std, **more
        )  # fmt: skip

    def labelled(self, label: str, classes: ClassList | None, outputs: int) -> DataSpec:
        return self.spec(labels=(label,), target=label, classes=outputs, class_list=classes)

    def result(self, protocol: str, settings: Mapping[str, Any], data: Mapping[str, Chosen]) -> Result:
        certificate, notes = certificate_of(self.subject, self.model.certified)
        told = {"what": self.subject.path.resolve().name, "form": self.subject.kind, "digest": self.model.digest}
        used = {name: {"digest": digest_for_all(part.index), "records": len(part.ids)} for name, part in data.items()}
        all_settings = {
            **view_in_words(self.view), "precision": self.computing.precision,
            "micro_batch": self.computing.micro_batch, **settings,
        }  # fmt: skip
        notes += [f"{self.model.report.source}: {note}." for note in self.model.report.notes]
        return Result(protocol, all_settings, told | self.model.description, certificate, used, notes=notes)

    @torch.no_grad()
    def answers(
        self, result: Result, chosen: Chosen, spec: DataSpec, act: Act, text: TextEncoder | None = None,
        depends_on: object = None, part: str = "test", last: bool = True,
    ) -> list[tuple[int, Any]]:  # fmt: skip
        """Each readable record with its answer, in order; the number of the others goes into the result.

        An answer is what JSON can hold. `depends_on` is what else it depends on, beside the result's settings, `part`
        which of its records they are. Answers of an earlier start of the same command are taken over. Of several
        processes, only rank 0 returns if these answers are the `last` that they share.
        """
        micro_batches = -(-len(chosen.ids) // self.computing.micro_batch)
        identity = self._identity(result, chosen, spec, text, depends_on)
        with Answers.kept(self.out, identity, micro_batches, self.sharing) as kept:
            self._answer(kept, chosen, spec, act, text, result.protocol)
            if last:
                self.sharing.rest_on_main()
            found, unreadable = kept.read()
            if len(unreadable) == len(chosen.ids):
                reason = next(iter(unreadable.values()), "none was given")
                raise EvaluationError(f"none of the {len(unreadable)} records can be used ({reason}); name others")
            result.data[part]["unreadable"] = len(unreadable)
            return found

    def _answer(
        self, kept: Answers, chosen: Chosen, spec: DataSpec, act: Act, text: TextEncoder | None, what: str
    ) -> None:
        missing, sharing, total = kept.missing(), self.sharing, len(chosen.ids)
        if not len(missing):
            return
        numbers, size = sharing.mine(missing), self.computing.micro_batch
        rest = len(places_of_micro_batches(missing, size, total))
        progress = sharing.progress(what, "records", total - rest, total)
        ids = chosen.ids[places_of_micro_batches(numbers, size, total)]
        reader = BatchReader(chosen.index, spec, text, mask_key=MASKS, reading=self.computing.reading())

        def answer(part: tuple[int, ReadBatch]) -> None:
            number, (ids, inputs, present) = part
            here, found = present.numpy(), []
            if here.any():
                before = kept.before(number)
                with autocast(self.computing.precision, self.computing.device):
                    found = act(ids[here], {name: tensor[present] for name, tensor in inputs.items()}, before)
            reasons = reader.bad_reasons
            bad = {int(record): reasons.get(int(record), "excluded") for record in ids[(ids >= 0) & ~here]}
            records = [int(record) for record in ids[here]]
            kept.add(MicroBatchAnswers(number, list(zip(records, found, strict=True)), bad))

        with closing(reader):
            read = zip(numbers.tolist(), batches(reader, ids, self.computing, 0, progress), strict=True)
            sharing.share(len(missing), read, answer)

    def _identity(
        self, result: Result, chosen: Chosen, spec: DataSpec, text: TextEncoder | None, depends_on: object
    ) -> str:
        index = chosen.index
        whole = index.whole if isinstance(index, Selection) else index
        # By the same rule: a public part of a private set is named by keyed digests.
        split = isinstance(whole, SplitIndex)
        excluded = ledger_digests(whole, public=True)[1] if split else whole.excluded_digest
        told = [
            result.protocol, result.settings, digest_of_model(self.model),
            digest_for_all(index), excluded,
            hashlib.sha256(np.ascontiguousarray(chosen.ids, "<i8").tobytes()).hexdigest(), spec,
            spec.class_list.digest if spec.class_list else None, text.digest if text else None, depends_on,
        ]  # fmt: skip
        return hashlib.sha256(repr(told).encode()).hexdigest()


@dataclass(frozen=True)
class Work:
    """What a protocol works on: the command's arguments, the records by the names of the protocol's sets, and the list
    of classes that --classes names."""

    arguments: Namespace
    records: dict[str, RecordIndex]
    classes: ClassList | None
    open_model: Callable[[Subject], Evaluated]
    """Opens other models than the session's as that was opened."""


def numbered(chosen: Chosen, given: ClassList | None, label: str) -> ClassList:
    """The classes of the records: the list that is named, or else the class folders."""
    if given is not None:
        return given
    folders = chosen.folders
    if folders is None or label != FOLDERS:
        raise EvaluationError(
            f"the records have no class folders for the label {label!r}; name their classes with --classes, a file "
            "with one name per line"
        )
    return ClassList(folders.classes)


def by_list(part: Chosen, classes: ClassList) -> Chosen:
    """The records with their classes numbered alike, whichever of them each set has."""
    folders = part.folders
    if folders is None:
        return part
    if unknown := [name for name in folders.classes if name not in classes.numbers]:
        raise EvaluationError(
            f"the class folder {unknown[0]!r} of {folders.root} is none of the {len(classes.names)} classes; name the "
            "list that fits with --classes"
        )
    whole = folders.numbered_by(classes)
    index = part.index
    return Chosen(index.of(whole) if isinstance(index, SplitIndex) else whole, part.ids)
