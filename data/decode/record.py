"""The members of one record -> what a model sees of it: pixels, tokens, labels and weight, in one row of a table.

Decoding processes run this module as well as the trainer, so it imports neither torch nor the index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from murmuration.data.channels import IMAGENET_MEAN, IMAGENET_STD, Channels
from murmuration.data.decode.augment import AREAS, Augment, View, caption_choice, choose_view, require_known
from murmuration.data.decode.class_list import ClassList
from murmuration.data.decode.decode import SUFFIXES, BadRecord, decode_scaled, parsing, picture_in
from murmuration.data.decode.fields import ClassFilter, captions_of, classes_listed, numbers_of, right_classes

TARGET = "labels"


@dataclass(frozen=True)
class PictureMaker:
    """Decodes and augments a picture in one step, pure in (key, step, record): the crop is chosen first, from the size
    in the header, and a large JPEG is then decoded no larger than the crop needs.

    `key` is secret: it decides the random crops. It is one key for all steps, or a function of the step. `views`: how
    many pictures are made of a record, each with a crop of its own, from bytes that are decoded once.
    """

    size: int
    augment: Augment = "none"
    key: bytes | Callable[[int], bytes] = b""
    views: int = 1

    def __post_init__(self) -> None:
        require_known(self.augment)
        if self.size < 1:
            raise ValueError(f"image size {self.size} is not positive")
        if self.views < 1:
            raise ValueError(f"{self.views} views of a record: at least 1 is needed")
        if self.augment in AREAS and not self.key:
            raise ValueError(f"{self.augment} needs an augmentation key; derive one from the run key")

    def key_of(self, step: int) -> bytes:
        """The key of a step; empty where nothing is random, because some views are needed outside any step."""
        if self.augment not in AREAS:
            return b""
        return self.key(step) if callable(self.key) else self.key

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is made of a record: [size, size, 3], or [views, size, size, 3] of several."""
        one = (self.size, self.size, 3)
        return one if self.views == 1 else (self.views, *one)

    def make(self, data: bytes, step: int, record: int) -> np.ndarray:
        """uint8 of `shape`; raises BadRecord for bytes that are not a usable image."""
        key = self.key_of(step)

        @cache
        def views(width: int, height: int) -> list[View]:
            chosen = (self.augment, width, height, self.size, key, step, record)
            return [choose_view(*chosen, view) for view in range(self.views)]

        def at_least(width: int, height: int) -> int:
            return max(view.shorter_side(width, height, self.size) for view in views(width, height))

        found = decode_scaled(data, at_least)
        with parsing("the image cannot be cut to its view"):
            wanted = views(found.width, found.height)
            rendered = {  # without random crops, all views are one
                view: view.render(found.pixels, self.size, found.shrunk, found.margin) for view in set(wanted)
            }
            return rendered[wanted[0]] if self.views == 1 else np.stack([rendered[view] for view in wanted])


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
