"""The members of one record -> what a model sees of it: pixels, tokens, labels and weight, in one row of a table.

Decoding processes run this module as well as the trainer, so it imports neither torch nor the index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from murmuration.data.channels import IMAGENET_MEAN, IMAGENET_STD, Channels
from murmuration.data.decode.augment import AREAS, Augment, caption_choice, require_known
from murmuration.data.decode.class_filter import ClassFilter
from murmuration.data.decode.class_list import ClassList
from murmuration.data.decode.decode import SUFFIXES, BadRecord, parsing, picture_in
from murmuration.data.decode.fields import captions_of, classes_listed, numbers_of, right_classes
from murmuration.data.decode.picture import PictureMaker

TARGET = "labels"


@dataclass(frozen=True)
class DataSpec:
    """The inputs that the model needs of a record, and their shapes."""

    image_size: int
    augment: Augment = "none"
    mask_patches: int = 0  # > 0: `mask_noise` with that many columns
    drop_keys: bool = False  # `drop_key`, for a model that drops units
    labels: tuple[str, ...] = ()  # integer fields of the record's .json; `cls` is its .cls or class folder
    target: str | None = None  # one of `labels`: the classifier's target, passed on as "labels"
    listed: str | None = None  # in place of `target`: a field that lists classes, "labels" then has 0 or 1 for each
    weight: str | None = None  # a number in the record's .json, passed on as WEIGHT
    classes: int = 0  # > 0: a record whose target is not in 0..classes-1 is bad
    class_list: ClassList | None = field(default=None, repr=False)  # numbers for the names that a .cls may contain
    right_classes: int = field(default=0, repr=False)  # > 0: RIGHT_CLASSES, with that many columns; for measurements
    pictures: bool = field(default=True, repr=False)  # False: texts alone; each picture is black, and nothing decoded
    image_suffixes: tuple[str, ...] = SUFFIXES
    text_suffix: str = "txt"
    mean: Channels = IMAGENET_MEAN
    std: Channels = IMAGENET_STD

    def __post_init__(self) -> None:
        require_known(self.augment)
        if self.image_size < 1:
            raise ValueError(f"image size {self.image_size} is not positive")
        if self.target is not None and (self.target not in self.labels or TARGET in {*self.labels} - {self.target}):
            raise ValueError(f"target '{self.target}' must be one of the labels, and no other may be called '{TARGET}'")
        if self.classes < 0:
            raise ValueError(f"{self.classes} classes: at least 1, or 0 for any number")
        if self.listed is not None and (self.target is not None or not self.classes):
            raise ValueError("a record lists several of a number of classes, or has one as its target")


@dataclass(frozen=True)
class RecordMaker:
    """Holds no key: that of the step comes with each call, so that a decoding process keeps none for later."""

    spec: DataSpec
    views: int = 1
    encode: Callable[[str], list[int]] | None = None
    """A caption as a row of `text_length` tokens; None where the model reads no captions."""
    text_length: int = 0
    filter: ClassFilter | None = None

    @property
    def row(self) -> np.dtype[np.void]:
        """What is made of one record."""
        spec, views = self.spec, self.views
        side = spec.image_size if spec.pictures else 0
        return np.dtype(
            [
                ("pixels", "u1", (views, side, side, 3)),
                ("tokens", "i8", (views, self.text_length)),
                ("labels", "i8", (len(spec.labels),)),
                ("listed", "?", (spec.classes if spec.listed is not None else 0,)),
                ("right", "?", (spec.right_classes,)),
                ("weight", "f4"),
            ]
        )

    @property
    def by_key(self) -> bool:
        """Whether anything that is made depends on the key."""
        return self.spec.augment in AREAS or self.encode is not None

    def make(self, members: Mapping[str, bytes], record: int, step: int, key: bytes, into: np.void) -> bool:
        """Fills the row; False if the record is of a class that is left out. Raises BadRecord, and then, or if this
        process dies on the way, the row holds anything."""
        spec = self.spec
        if self.filter is not None and not self.filter.keeps(members):
            return False
        picture = picture_in(members, spec.image_suffixes)
        if picture is None and spec.pictures:
            raise BadRecord(f"no image: the record contains {sorted(members)}")
        # The cheap parts first: a record without a caption needs no decoding.
        with parsing("the caption or a number cannot be read"):
            if self.encode is not None:
                into["tokens"] = self._tokens(members, record, step, key, self.encode)
            labels, weight = numbers_of(members, spec.labels, spec.target, spec.classes, spec.weight, spec.class_list)
            listed = [] if spec.listed is None else classes_listed(members, spec.listed, spec.classes, spec.class_list)
        into["labels"], into["weight"] = labels, weight
        for name, numbers in (("listed", listed), ("right", right_classes(members) if spec.right_classes else [])):
            into[name] = False
            into[name][numbers] = True
        if picture is not None and spec.pictures:
            pictures = PictureMaker(spec.image_size, spec.augment, key, self.views)
            into["pixels"] = pictures.make(picture, step, record)
        return True

    def _tokens(
        self, members: Mapping[str, bytes], record: int, step: int, key: bytes, encode: Callable[[str], list[int]]
    ) -> list[list[int]]:
        """For each view, one of several captions, chosen by key; without a key, as in measurements, the first."""
        captions = captions_of(members, self.spec.text_suffix)
        numbers = [0] * self.views
        if len(captions) > 1 and key:
            numbers = [caption_choice(key, step, record, len(captions), view) for view in range(self.views)]
        encoded = {number: encode(captions[number]) for number in set(numbers)}
        return [encoded[number] for number in numbers]
