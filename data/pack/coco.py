"""COCO's JSON: images and annotations in two lists, joined by the image's id. iNaturalist publishes the same form."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from murmuration.data.pack.json_stream import elements
from murmuration.data.pack.row import NO_NAME, UNREADABLE, Fault, Files, PackError, Row, named, require

COCO = (
    "COCO/annotations/captions_train2017.json beside COCO/train2017/000000000009.jpg (name any other JSON of this form "
    "with --table and its pictures as the source)"
)
INAT = "a folder with train.json (images, annotations, categories) and the files that it names, or folders of classes"


class Coco(Files):
    """Captions, where annotations have them; otherwise the category of each image as its label."""

    def __init__(self, root: Path, annotations: Path) -> None:
        super().__init__(root)
        self._path = annotations
        self._categories: dict[Any, str] = {}
        kinds: set[str] = set()
        for key, value in elements(annotations):
            kinds.add(key)
            if key == "categories" and isinstance(value, dict):
                self._categories[value.get("id")] = " ".join(str(value.get("name")).split())
        if not {"images", "annotations"} <= kinds:
            raise PackError(f"{annotations}: has no lists of images and annotations; name a JSON of COCO's form")
        first = next(value for key, value in elements(annotations) if key == "annotations")
        self._captioned = isinstance(first, dict) and "caption" in first
        if not self._captioned and not self._categories:
            raise PackError(f"{annotations}: annotations have neither captions nor categories; name the captions' file")
        names = list(self._categories.values())
        # Categories of one name would be one class; iNaturalist has none such.
        self.classes = () if self._captioned or len(set(names)) < len(names) else tuple(names)
        self.told = f"{annotations.name}: COCO's form, {'captions' if self._captioned else 'categories as labels'}"

    def rows(self) -> Iterator[Row | Fault]:
        # A table on the disk, which is gone when it is closed: of millions of images, names alone fill the memory.
        table = sqlite3.connect("", isolation_level=None)
        table.executescript("create table images(id primary key, file text, seen integer) without rowid; begin;")
        try:
            for at, value in self._list("images"):
                yield from self._image(table, at, value)
            for at, value in self._list("annotations"):
                yield self._annotation(table, at, value)
            for (file,) in table.execute("select file from images where seen=0 order by file"):
                yield self._row("images", file, [] if self._captioned else None, None if self._captioned else "")
        finally:
            table.close()

    def _list(self, wanted: str) -> Iterator[tuple[str, Any]]:
        number = 0
        for key, value in elements(self._path):
            if key == wanted:
                yield f"{wanted}[{number}]", value
                number += 1

    def _image(self, table: sqlite3.Connection, at: str, value: Any) -> Iterator[Fault]:
        file = value.get("file_name") if isinstance(value, dict) else None
        if not isinstance(file, str) or not named(file) or not isinstance(value.get("id"), int | str):
            yield Fault(f"{self._path.name} {at}", "", NO_NAME)
            return
        try:
            table.execute("insert into images values(?, ?, 0)", (value["id"], named(file)))
        except (sqlite3.Error, ValueError, OverflowError) as error:
            yield Fault(f"{self._path.name} {at}", named(file), UNREADABLE, str(error))

    def _annotation(self, table: sqlite3.Connection, at: str, value: Any) -> Row | Fault:
        number = value.get("image_id") if isinstance(value, dict) else None
        found = table.execute("select file from images where id=?", (number,)).fetchone() if _plain(number) else None
        if found is None:
            return Fault(f"{self._path.name} {at}", "", NO_NAME, f"image_id {number!r} is none of the images")
        table.execute("update images set seen=1 where id=?", (number,))
        if self._captioned:
            caption = value.get("caption")
            return self._row(at, found[0], [caption] if isinstance(caption, str) else [], None)
        category = value.get("category_id")
        return self._row(at, found[0], None, self._categories.get(category, "") if _plain(category) else "")

    def _row(self, at: str, file: str, captions: list[str] | None, label: str | None) -> Row:
        return Row(f"{self._path.name} {at}", file, file, captions, label)


def _plain(number: Any) -> bool:
    return isinstance(number, str) or (isinstance(number, int) and abs(number) < 1 << 62)


def open_inat(source: Path, split: str) -> Coco:
    require(source, "iNaturalist", [f"{split}.json"], INAT)
    return Coco(source, source / f"{split}.json")
