"""What every layout of pictures is read into: rows, the pictures that they name, and what is wrong with either."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from murmuration.accounting.errors import RunError
from murmuration.data.store.index_files import open_regular
from murmuration.data.store.place import ShardError

MISSING = "missing file"
OUTSIDE = "file name outside SOURCE"
UNREADABLE = "unreadable row"
NO_NAME = "no image named"
EMPTY_CAPTION = "empty caption"
NO_CAPTION = "no caption"
NO_LABEL = "no label"
NO_UNIT = "no unit"
UNLIKE = "rows of one image disagree"
UNDECODABLE = "undecodable image"
_LARGEST = 1 << 30  # bytes of one file; no picture within the decoder's limit of pixels needs more


class PackError(RunError, ValueError):
    """Nothing can be packed from this; the message names cause and fix."""


@dataclass(frozen=True)
class Fault:
    """Something in the input that is left out, and listed."""

    row: str
    image: str
    reason: str
    detail: str = ""


class BadPicture(Exception):
    """The picture of one row cannot be packed. Its two arguments are a reason from above and the detail."""

    @property
    def reason(self) -> str:
        return self.args[0]

    @property
    def detail(self) -> str:
        return self.args[1]


@dataclass(frozen=True)
class Row:
    """What one row says of one image. `image` names it within the set: rows with the same name are one record.

    `at` is where its layout finds the picture. `captions`, `label` and `unit` are None where the layout has none, and
    empty where this row lacks one.
    """

    row: str
    image: str
    at: str
    captions: Sequence[str] | None = None
    label: str | None = None
    unit: str | None = None
    fields: Mapping[str, int | str] = field(default_factory=dict)


class Layout(Protocol):
    """One way in which pictures and what is said of them are stored."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The published names of the classes in their order; empty where the rows alone name them."""
        ...

    @property
    def told(self) -> str:
        """One line for the person who packs: what was recognised."""
        ...

    def rows(self) -> Iterator[Row | Fault]:
        """All rows, in an order that depends on the input alone."""
        ...

    def identity(self, row: Row) -> tuple[str, int]:
        """What tells the picture from all others, and its size; BadPicture if there is none. Two names of one
        file are one picture."""
        ...

    def picture(self, at: str) -> bytes:
        """An image file; BadPicture if it cannot be read. May be called from several threads."""
        ...


class Files:
    """Pictures as files below a folder, by names that tables give. The base of the layouts that have such."""

    classes: tuple[str, ...] = ()

    def __init__(self, root: Path) -> None:
        self.root = root
        self._inside = os.path.join(os.path.abspath(root), "")

    def identity(self, row: Row) -> tuple[str, int]:
        # By its text: links below SOURCE are its owner's, but a table may be somebody else's.
        if not os.path.normpath(os.path.join(self._inside, row.at)).startswith(self._inside):
            raise BadPicture(OUTSIDE, "")
        try:
            found = os.stat(os.path.join(self.root, row.at))
        except (OSError, ValueError) as error:
            raise BadPicture(MISSING, _why(error)) from None
        if not stat.S_ISREG(found.st_mode):
            raise BadPicture(MISSING, "not a regular file")
        if found.st_size > _LARGEST:
            raise BadPicture(UNDECODABLE, f"{found.st_size} bytes are more than any picture has")
        return f"{found.st_dev}:{found.st_ino}", found.st_size

    def picture(self, at: str) -> bytes:
        try:
            with os.fdopen(open_regular(self.root / at), "rb") as file:
                return file.read(_LARGEST)
        except (OSError, ShardError) as error:
            raise BadPicture(MISSING, _why(error)) from None


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def named(image: str) -> str:
    """One spelling of a path: rows that write it differently name the same image."""
    return os.path.normpath(image.strip().replace("\\", "/")) if image.strip() else ""


def png(pixels: np.ndarray) -> bytes:
    """Lossless, for sets that publish bare pixels."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def expected(root: Path, name: str, missing: Sequence[str], layout: str) -> PackError:
    """One message for all that is missing of a published layout."""
    return PackError(f"{root}: not {name}, because {', '.join(missing)} is not there; the expected layout is {layout}")


def require(root: Path, name: str, files: Sequence[str], layout: str) -> None:
    if missing := [file for file in files if not (root / file).exists()]:
        raise expected(root, name, missing, layout)


def inner(source: Path, *names: str) -> Path:
    """The set's own folder, where `source` is the folder that it was unpacked into."""
    return next((source / name for name in names if (source / name).is_dir()), source)


def class_names(path: Path) -> tuple[str, ...]:
    """A published list of class names, one per line."""
    return tuple(" ".join(line.split()) for line in text_of(path).splitlines() if line.strip())


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PackError(f"{path}: not UTF-8 ({error}); fetch it again") from None
