"""Which files of a folder are records, in which order, and of which class.

Symbolic links are followed, but nothing is counted twice: a folder or a file that is reached by two ways is refused,
which also ends every loop. Hidden files and other extensions are no records; the caller is told how many there were.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.tar import ShardError, shown

IMAGES = (".jpg", ".jpeg", ".png", ".webp")
NO_FILE = "pipe or device"
_SHOWN = 5
_SPLITS = {"train", "val", "valid", "validation", "test", "train_mini", "train2017", "val2017", "test2017"}

# auto: what the folder looks like. top: the first folder is the class (torchvision's ImageFolder, ImageNet,
# iNaturalist). leaf: the whole path of folders is (Places365: a/abbey). none: no classes.
Rule = Literal["auto", "top", "leaf", "none"]


@dataclass(frozen=True, slots=True)
class ImageFile:
    """`name` is the path below the root, as bytes, because file names need not be text."""

    group: str
    name: bytes
    size: int


def list_images(root: Path, rule: Rule = "auto") -> tuple[list[ImageFile], bool]:
    """The records, sorted by class and path, and whether they have classes."""
    found = [(name, size) for name, size in _walk(root) if size is not None and _is_image(name)]
    if not found:
        raise ShardError(
            f"{root}: neither tar shards nor images ({', '.join(IMAGES)}) in this folder{_but(ignored_files(root))}; "
            "name another"
        )
    chosen = _recognise(root, [name for name, _ in found]) if rule == "auto" else rule
    files = [ImageFile(_group(name, chosen), name, size) for name, size in found]
    if chosen != "none" and (loose := next((file for file in files if not file.group), None)):
        raise ShardError(
            f"{root / os.fsdecode(loose.name)}: an image beside the class folders has no class; move it, or give "
            "--classes none"
        )
    if chosen == "top":
        _refuse_empty(root, {file.group for file in files})
    return sorted(files, key=lambda file: (os.fsencode(file.group), file.name)), chosen != "none"


def ignored_files(root: Path) -> Counter[str]:
    """How many files of which extension are no records."""
    others = ((os.fsdecode(name), size) for name, size in _walk(root) if size is None or not _is_image(name))
    return Counter(NO_FILE if size is None else extension(name) for name, size in others)


def extension(name: str) -> str:
    """As it may be printed: `.dcm`, `.tar.gz`, or the whole name where there is none."""
    stem, last = os.path.splitext(os.path.basename(name).lower())
    before = os.path.splitext(stem)[1]
    return shown(before + last if before == ".tar" else last or stem)


def most_common(files: Counter[str]) -> str:
    """How many files, and of which extensions: 3 files (2 .dcm, 1 .csv)."""
    named = ", ".join(f"{count} {what}" for what, count in files.most_common(_SHOWN))
    return f"{files.total()} {'file' if files.total() == 1 else 'files'} ({named})"


def _but(others: Counter[str]) -> str:
    return f", but {most_common(others)}" if others else ""


def _walk(root: Path) -> Iterator[tuple[bytes, int | None]]:
    """Paths below the root and sizes of all files that are not hidden; None for a pipe, a socket or a device."""
    folders = {_identity(root.stat()): b""}
    linked: dict[tuple[int, int], bytes] = {}
    waiting = [b""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(os.path.join(os.fsencode(root), folder)) as entries:
                inside = sorted((entry for entry in entries if not entry.name.startswith(b".")), key=lambda e: e.name)
            states = [(entry, entry.stat()) for entry in inside]
        except OSError as error:
            raise ShardError(f"{os.fsdecode(error.filename or root)}: {error.strerror}; mend or remove it") from error
        for entry, state in states:
            path = os.path.join(folder, entry.name)
            if stat.S_ISDIR(state.st_mode):
                if (twin := folders.setdefault(_identity(state), path)) is not path:
                    raise _reached_twice(root, twin, path)
                waiting.append(path)
            elif stat.S_ISREG(state.st_mode):
                if (twin := linked.setdefault(_identity(state), path)) is not path:
                    raise _reached_twice(root, twin, path)
                yield path, state.st_size
            else:
                yield path, None


def _identity(state: os.stat_result) -> tuple[int, int]:
    return state.st_dev, state.st_ino


def _reached_twice(root: Path, one: bytes, other: bytes) -> ShardError:
    shown = " and ".join(os.fsdecode(name) or "the folder itself" for name in (one, other))
    return ShardError(f"{root}: {shown} are the same through a link; records would count twice, so remove one")


def _is_image(name: bytes) -> bool:
    return os.path.splitext(os.fsdecode(name))[1].lower() in IMAGES


def _group(name: bytes, rule: Rule) -> str:
    folders = os.fsdecode(name).split("/")[:-1]
    if rule == "none" or not folders:
        return ""
    return folders[0] if rule == "top" else "/".join(folders)


def _recognise(root: Path, names: list[bytes]) -> Rule:
    tops = {_group(name, "top") for name in names}
    if tops == {""}:
        return "none"
    if tops <= _SPLITS:
        shown = ", ".join(sorted(tops))
        raise ShardError(f"{root}: holds splits ({shown}), not classes; name one of them, such as {root / min(tops)}")
    # Places365 sorts its classes into one folder per letter.
    return "leaf" if all(len(top) == 1 and top.isalpha() for top in tops) and _deep(names) else "top"


def _deep(names: list[bytes]) -> bool:
    return all(name.count(b"/") >= 2 for name in names)


def _refuse_empty(root: Path, groups: set[str]) -> None:
    """torchvision numbers all class folders and refuses empty ones; skipping one would shift the labels after it."""
    with os.scandir(root) as entries:
        folders = {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
    if empty := min(folders - groups, default=None):
        raise ShardError(f"{root / empty}: no image in this class folder; remove it, or give --classes none")
