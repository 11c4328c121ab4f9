"""What the columns of a table mean: which names the image, and which says what of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmuration.data.decode.fields import CAPTIONS
from murmuration.data.pack.row import NO_NAME, Fault, PackError, Row, named

# By which names columns are recognised, where none is named.
IMAGE_COLUMNS = ("file_name", "image", "image_path", "filepath", "file_path", "filename", "path")
CAPTION_COLUMNS = ("caption", "captions", "text", "title")
Cells = Mapping[str, Any]


@dataclass(frozen=True)
class Several:
    """A label column whose cells list any number of classes: by a separator, or as lists. `none` is what a cell says
    that lists no class, as "No Finding" does."""

    separator: str
    none: str | None = None

    def read(self, value: Any) -> str:
        """The names as a JSON list, sorted, each once; empty where the cell says nothing."""
        if isinstance(value, list | tuple):
            names = [word(each) for each in value]
        else:
            text = word(value)
            if text == self.none:
                return "[]"
            names = [word(each) for each in text.split(self.separator)]
        if "" in names:
            return ""
        return json.dumps(sorted(set(names) - {self.none}), ensure_ascii=False)


@dataclass(frozen=True)
class Columns:
    """What the columns of a table mean; None where none was named."""

    image: str | None = None
    caption: str | None = None
    label: str | None = None
    unit: str | None = None
    several: Several | None = None

    def within(self, known: Sequence[str], table: Path) -> Columns:
        """The same with image and caption recognised; PackError for a name that the table lacks."""
        for option, name in (
            ("--image", self.image), ("--caption", self.caption), ("--label", self.label), ("--unit", self.unit),
        ):  # fmt: skip
            if name is not None and name not in known:
                raise PackError(f"{table}: no column {name!r} for {option}; it has {', '.join(map(repr, known))}")
        if self.several is not None and self.label in (None, self.unit, CAPTIONS):
            raise PackError(
                f"--separator is that of the column that --label names, and its name is that of the list in each "
                f".json, which {self.label!r} cannot be; name the column of the classes, or rename it"
            )
        image = self.image or next((name for name in IMAGE_COLUMNS if name in known), None)
        if image is None:
            raise PackError(
                f"{table}: no column names the images; it has {', '.join(map(repr, known))}: choose one with --image"
            )
        caption = self.caption or next((name for name in CAPTION_COLUMNS if name in known and name != image), None)
        return Columns(image, caption, self.label, self.unit, self.several)

    def row(self, cells: Cells, where: str) -> Row | Fault:
        assert self.image is not None
        image = cells.get(self.image)
        if not isinstance(image, str) or not named(image):
            return Fault(where, "", NO_NAME)
        captions = None if self.caption is None else texts(cells.get(self.caption))
        return Row(where, named(image), named(image), captions, self.label_in(cells), self._text(cells, self.unit))

    def label_in(self, cells: Cells) -> str | None:
        if self.several is None or self.label is None:
            return self._text(cells, self.label)
        return self.several.read(cells.get(self.label))

    def _text(self, cells: Cells, column: str | None) -> str | None:
        return None if column is None else word(cells.get(column))

    def told(self) -> str:
        parts = {"image": self.image, "caption": self.caption, "label": self.label, "unit": self.unit}
        return ", ".join(f"{what} = column {name!r}" for what, name in parts.items() if name is not None)


def texts(value: Any) -> list[str]:
    """The captions in a cell, which may be one or a list."""
    many = value if isinstance(value, list | tuple) else [value]
    return [each for each in many if isinstance(each, str)]


def word(value: Any) -> str:
    """A label or a unit as one line of text."""
    if value is None or isinstance(value, bool | dict | list):
        return ""
    if isinstance(value, float) and value.is_integer():  # how pandas writes whole numbers beside empty cells
        value = int(value)
    return " ".join(str(value).split())
