"""The public held-out records of a phase: which of them are read, what is measured on them, and that one can be.

A captioner measures its loss where records have captions. Class folders have none: there it is asked for the classes,
as a classifier would be.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from murmuration.accounting.errors import BAD_INPUT
from murmuration.data.batch.reader import RIGHT_CLASSES, TARGET, BatchReader, DataSpec
from murmuration.data.index.folders import FolderIndex
from murmuration.data.index.right_labels import RightLabels, RightlyLabelled
from murmuration.data.store.place import RecordIndex, ShardError
from murmuration.data.text.encoder import TextEncoder
from murmuration.model.settings import Shape
from murmuration.train.config.phase import Evaluation, Phase, ZeroShot
from murmuration.train.config.section import RecipeError
from murmuration.train.measures.class_names import (
    ClassNames,
    ClassNamesError,
    read_class_names,
    require_room,
    tokens_of,
)
from murmuration.train.measures.shares import MEAN_PRECISION, share_names
from murmuration.train.recipe.labels import FOLDERS

LOSS, SIGNAL = "public_loss", "update_snr"


@dataclass(frozen=True)
class HeldOut:
    """`reading` is how a phase reads the records that it measures; `captioned` is false for shards that turned out to
    have no captions."""

    settings: Phase
    shape: Shape
    whole: RecordIndex
    reading: DataSpec
    encoder: TextEncoder | None
    captioned: bool = True

    @property
    def evaluation(self) -> Evaluation:
        assert self.settings.evaluation is not None
        return self.settings.evaluation

    @cached_property
    def ids(self) -> np.ndarray:
        """The first ones; of class folders, which are sorted by class, some of every class."""
        records = self.whole.records
        count = min(self.evaluation.records, records)
        spread = isinstance(self.whole, FolderIndex) and self.whole.labelled
        return np.arange(count) * records // count if spread and count else np.arange(count)

    @property
    def text(self) -> TextEncoder | None:
        """What reads captions; None where there are none."""
        return self.encoder if self.captioned and not isinstance(self.whole, FolderIndex) else None

    @property
    def has_loss(self) -> bool:
        return self.settings.objective != "caption" or self.text is not None

    @property
    def zero_shot(self) -> ZeroShot | None:
        """Class folders are scored without being asked for."""
        if self.settings.objective != "caption":
            return None
        return self.evaluation.zero_shot or (ZeroShot() if self.text is None else None)

    @property
    def axes(self) -> dict[str, list[str]]:
        return (self.zero_shot.axes or {}) if self.zero_shot is not None else {}

    @property
    def folders(self) -> tuple[str, ...]:
        return self.whole.classes if isinstance(self.whole, FolderIndex) else ()

    @property
    def classes(self) -> int:
        """Among how many classes one is named; 0 where none is."""
        if self.settings.objective == "classify":
            return self.shape.head.classes
        return len(self.folders) if self.zero_shot is not None and not self.axes else 0

    @cached_property
    def class_names(self) -> ClassNames:
        """By which a captioner is asked for each class folder."""
        assert self.zero_shot is not None
        given = self.zero_shot.class_names
        return read_class_names(Path(given) if given else None, self.folders, "evaluation.zero_shot.class_names")

    @cached_property
    def index(self) -> RecordIndex:
        if self.evaluation.real is None:
            return self.whole
        listed = self.reading.class_list
        known = listed.names if listed is not None else self.folders
        labels = RightLabels.read(Path(self.evaluation.real), known, len(known) or self.classes)
        return RightlyLabelled(self.whole, labels)

    @property
    def spec(self) -> DataSpec:
        spec = self.reading
        if self.axes:
            spec = replace(spec, labels=tuple(self.axes))
        elif self.settings.objective == "caption" and self.classes:
            spec = replace(spec, labels=(FOLDERS,), target=FOLDERS, classes=self.classes)
        return replace(spec, right_classes=self.classes if self.evaluation.real is not None else 0)

    @property
    def shares(self) -> list[str]:
        """The shares of right answers among the classes."""
        if self.reading.listed is not None:
            return [MEAN_PRECISION]
        return share_names(self.classes, self.evaluation.real is not None) if self.classes else []

    def metrics(self) -> list[str]:
        """What is measured, by the names of boards and logs."""
        found = [LOSS] if self.has_loss else []
        found += [f"zero_shot_{axis}" for axis in self.axes]
        found += self.shares
        return found + ([SIGNAL] if self.settings.privacy is not None and self.has_loss else [])


def usable(held: HeldOut, where: str) -> HeldOut:
    """The same, once a record that can be measured was found; refused if there is none, or if its labels cannot be
    scored."""
    try:
        found, reason = _first_usable(held, where)
        if not found and held.text is not None and held.zero_shot is not None:
            held = replace(held, captioned=False)
            found, _ = _first_usable(held, where)
        if found and held.zero_shot is not None:
            # Every label has words, and prompt and labels together fit into the text that the model reads.
            assert held.encoder is not None
            groups = [[(label,) for label in labels] for labels in held.axes.values()] or [held.class_names]
            longest = [max(len(tokens_of(name, held.encoder)) for names in group for name in names) for group in groups]
            require_room(1 + len(held.encoder.words(held.zero_shot.prompt)) + sum(longest), held.shape.text_length)
    except (ClassNamesError, ShardError) as error:
        if error.exit_code != BAD_INPUT:  # a store that does not answer: the same command may find it well
            raise
        raise RecipeError(f"{where}: {error}") from None
    if not found:
        raise RecipeError(
            f"{where}.path: none of the {len(held.ids):,} records can be measured ({reason}); name others, or leave "
            "evaluation out"
        )
    if held.settings.plateau is not None and not held.has_loss:
        raise RecipeError(
            f"{where}.path has no captions, so no public loss is measured, at whose plateau the phase could end; leave "
            "plateau out, or name captioned records"
        )
    return held


def _first_usable(held: HeldOut, where: str) -> tuple[bool, str]:
    """Whether one record can be read, with right classes where they are asked for; and else why the first one cannot.
    Records are read one at a time: most often the first is enough."""
    if held.zero_shot is not None and not (held.classes or held.axes):
        if not held.has_loss:
            return False, "they have neither captions nor class folders"
        raise RecipeError(f"{where}.zero_shot scores class folders, and these records have none; give it axes")
    if held.evaluation.real is not None and not held.classes:
        raise RecipeError(f"{where}.real has right classes, but no class of these records is measured; leave it out")
    reader = BatchReader(held.index, replace(held.spec, mask_patches=0), held.text)
    asked = RIGHT_CLASSES if held.evaluation.real is not None else TARGET if held.spec.listed is not None else None
    readable = False
    with closing(reader):
        for record in held.ids:
            batch = reader.read(np.array([record]), 0)
            readable = readable or bool(batch.present.any())
            if readable and (asked is None or bool(batch.inputs[asked].any())):
                return True, ""
    if readable:
        whose = held.evaluation.real or f"the field {held.spec.listed}"
        return False, f"{whose} has right classes for none of them"
    return False, next(iter(reader.bad_reasons.values()), "there is none")
