"""Sets of image files whose labels stand in lists beside them (Aircraft, Food-101, Places365), or in the names of their
folders (Caltech-101, iNaturalist, any folder of classes)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from murmuration.accounting.escaping import printable
from murmuration.data.index.folders import Rule, extension, ignored_names, list_images, most_common
from murmuration.data.pack.row import (
    UNREADABLE,
    Fault,
    Files,
    PackError,
    Row,
    class_names,
    inner,
    named,
    require,
    text_of,
)

AIRCRAFT = (
    "fgvc-aircraft-2013b/data/ with images/1025794.jpg, variants.txt, images_variant_trainval.txt and "
    "images_variant_test.txt"
)
FOOD = "food-101/ with images/apple_pie/1005649.jpg, meta/classes.txt, meta/train.txt and meta/test.txt"
PLACES = (
    "a folder with categories_places365.txt, places365_train_standard.txt or places365_val.txt, and the pictures in "
    "data_256_standard/a/airfield/00000001.jpg (data_large_standard, data_256, data_large) or val_256/ (val_large)"
)
CALTECH = "caltech101/101_ObjectCategories/accordion/image_0001.jpg"


class Listed(Files):
    """Lines of `listing`, of which `_parsed` makes the image's path and its label."""

    def __init__(self, root: Path, listing: Path, classes: tuple[str, ...], told: str) -> None:
        super().__init__(root)
        self._listing, self.classes, self.told = listing, classes, told

    def rows(self) -> Iterator[Row | Fault]:
        with self._listing.open(encoding="utf-8", errors="surrogateescape") as file:
            for number, line in enumerate(file, start=1):
                where = f"{self._listing.name}:{number}"
                found = self._parsed(line.strip()) if line.strip() else None
                if found is not None:
                    yield Row(where, named(found[0]), named(found[0]), None, found[1])
                elif line.strip():
                    yield Fault(where, "", UNREADABLE, "not a line of this list")

    def _parsed(self, line: str) -> tuple[str, str] | None:
        raise NotImplementedError


class Aircraft(Listed):
    def __init__(self, source: Path, split: str) -> None:
        root = inner(source, "fgvc-aircraft-2013b", "data")
        root = inner(root, "data")
        listing = f"images_variant_{split}.txt"
        require(root, "FGVC-Aircraft", ["images", "variants.txt", listing], AIRCRAFT)
        names = class_names(root / "variants.txt")
        super().__init__(root / "images", root / listing, names, f"FGVC-Aircraft, {split}: {len(names)} classes")

    def _parsed(self, line: str) -> tuple[str, str] | None:
        number, _, name = line.partition(" ")
        return (f"{number}.jpg", " ".join(name.split())) if name else None


class Food(Listed):
    def __init__(self, source: Path, split: str) -> None:
        root = inner(source, "food-101")
        require(root, "Food-101", ["images", "meta/classes.txt", f"meta/{split}.txt"], FOOD)
        names = class_names(root / "meta/classes.txt")
        super().__init__(root / "images", root / f"meta/{split}.txt", names, f"Food-101, {split}: {len(names)} classes")

    def _parsed(self, line: str) -> tuple[str, str] | None:
        name, slash, _ = line.rpartition("/")
        return (f"{line}.jpg", name) if slash else None


class Places(Listed):
    """`split` is train-standard, train-challenge or val."""

    def __init__(self, source: Path, split: str) -> None:
        listing = f"places365_{split.replace('-', '_')}.txt"
        kind = split.partition("-")[2]
        folders = (
            [f"data_256_{kind}", f"data_large_{kind}", "data_256", "data_large"] if kind else ["val_256", "val_large"]
        )
        pictures = next((name for name in folders if (source / name).is_dir()), folders[0])
        require(source, "Places365", ["categories_places365.txt", listing, pictures], PLACES)
        lines = [line.split() for line in text_of(source / "categories_places365.txt").splitlines() if line.strip()]
        if any(len(line) != 2 or line[1] != str(number) for number, line in enumerate(lines)):
            raise PackError(
                f"{source / 'categories_places365.txt'}: lines are not '/a/airfield 0', '/a/airplane_cabin 1' …"
            )
        # Without the slash before it, as the folders are called and indexed.
        names = tuple(line[0].strip("/") for line in lines)
        super().__init__(source / pictures, source / listing, names, f"Places365, {split}: {len(names)} classes")

    def _parsed(self, line: str) -> tuple[str, str] | None:
        file, _, number = line.rpartition(" ")
        if not file or not number.isdecimal() or int(number) >= len(self.classes):
            return None
        return file.strip("/"), self.classes[int(number)]


class Folders(Files):
    """Every image below a folder; its class is its folder."""

    def __init__(self, root: Path, rule: Rule, without: tuple[str, ...] = ()) -> None:
        super().__init__(root)
        found, self._labelled = list_images(root, rule)
        self._found = [file for file in found if file.group not in without]
        classes = len({file.group for file in self._found})
        others = Counter(extension(name) for name in ignored_names(root))
        self.told = f"{root.name}: {f'{classes} folders of classes' if self._labelled else 'no classes'}" + (
            f"; not used: {most_common(others)}" if others else ""
        )

    def rows(self) -> Iterator[Row | Fault]:
        for file in self._found:
            name = os.fsdecode(file.name)
            yield Row(printable(name), name, name, None, " ".join(file.group.split()) if self._labelled else None)


def open_caltech(source: Path) -> Folders:
    root = inner(source, "caltech101", "caltech-101")
    require(root, "Caltech-101", ["101_ObjectCategories"], CALTECH)
    return Folders(root / "101_ObjectCategories", "top", without=("BACKGROUND_Google",))
