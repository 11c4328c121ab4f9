"""What all protocols share: the model, the records that are scored, and the result that is being filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.decode.augment import Augment, ResizeCrop
from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.public_split import SplitIndex
from murmuration.data.progress import Progress
from murmuration.data.store.place import RecordIndex
from murmuration.data.text.encoder import TextEncoder
from murmuration.train.clip.precision import autocast
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.features import Computing, batches
from murmuration.train.evaluate.public_records import digest_for_all
from murmuration.train.evaluate.result import Result, certificate_of
from murmuration.train.evaluate.subject import Subject
from murmuration.train.evaluate.weights import Evaluated
from murmuration.train.recipe.labels import FOLDERS

MASKS = b"masks of evaluated pictures"
"""Public, so that two evaluations hide the same patches."""


@dataclass(frozen=True)
class Chosen:
    """The records of an index that are scored, in order."""

    index: RecordIndex
    ids: np.ndarray

    @staticmethod
    def of(index: RecordIndex, count: int | None, seed: int) -> Chosen:
        """All, or `count` drawn by the seed."""
        if count is None or count >= index.records:
            return Chosen(index, np.arange(index.records))
        drawn = np.random.default_rng(seed).choice(index.records, count, replace=False)
        return Chosen(index, np.sort(drawn))

    @property
    def folders(self) -> FolderIndex | None:
        """The class folders behind the records, if there are any."""
        whole = self.index.whole if isinstance(self.index, SplitIndex) else self.index
        return whole if isinstance(whole, FolderIndex) and whole.labelled else None

    def name(self, record: int) -> str:
        place, start, _ = self.index.locate(record)
        whole = self.index.whole if isinstance(self.index, SplitIndex) else self.index
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
            **_told(self.view), "precision": self.computing.precision, "micro_batch": self.computing.micro_batch,
            **settings,
        }  # fmt: skip
        notes += [f"{self.model.report.source}: {note}." for note in self.model.report.notes]
        return Result(protocol, all_settings, told | self.model.description, certificate, used, notes=notes)

    @torch.no_grad()
    def each(
        self, chosen: Chosen, spec: DataSpec, what: str, act: Callable[[np.ndarray, dict[str, Tensor]], None],
        text: TextEncoder | None = None, report: Callable[[dict[int, str]], None] | None = None,
    ) -> int:  # fmt: skip
        """Calls `act` with the readable records of each micro-batch; the number of the others."""
        reader = BatchReader(chosen.index, spec, text, mask_key=MASKS, reading=self.computing.reading())
        unreadable = 0
        with closing(reader):
            for ids, inputs, present in self._batches(reader, chosen, what):
                here = present.numpy()
                unreadable += int(((ids >= 0) & ~here).sum())
                if here.any():
                    with autocast(self.computing.precision, self.computing.device):
                        act(ids[here], {name: tensor[present] for name, tensor in inputs.items()})
            if report is not None:
                report(reader.bad_reasons)
        if unreadable == len(chosen.ids):
            reason = next(iter(reader.bad_reasons.values()), "none was given")
            raise EvaluationError(f"none of the {unreadable} records can be used ({reason}); name others")
        return unreadable

    def _batches(
        self, reader: BatchReader, chosen: Chosen, what: str
    ) -> Iterator[tuple[np.ndarray, dict[str, Tensor], Tensor]]:
        return batches(reader, chosen.ids, self.computing, 0, Progress(what, "records"))


def _told(view: Augment) -> dict[str, object]:
    return {"view": "resize-crop", **view._asdict()} if isinstance(view, ResizeCrop) else {"view": view}


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
    return Chosen(SplitIndex(whole, index.fraction, index.public) if isinstance(index, SplitIndex) else whole, part.ids)
