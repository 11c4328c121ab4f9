"""Folders of single image files as records: ImageFolder, ImageNet, Places365 and iNaturalist as they are unpacked.

A record is one file; its id is its place in the sorted list of files, frozen in the index together with its size.
From then on that list is trusted: files that appear later are not records, and a file that is missing or has another
size stops the run. Contents are pinned only if the index was made with `contents`, because that reads every file.

`names.bin` contains the paths one after the other, `files.npy` the end of each path and the size of its file.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np

from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.format import (
    BESIDE,
    FILES,
    Handling,
    Kept,
    Manifest,
    digest_of,
    mend,
    read_manifest,
    write_manifest,
)
from murmuration.data.index.salt import SALT, folders_of, make_salt
from murmuration.data.index.unit_table import Missing
from murmuration.data.index.units import as_rows, pattern_of, unit_named, unit_of_key, write_units
from murmuration.data.store.index_files import cannot_write, index_file, make_folder, mode_between, open_npy
from murmuration.data.store.place import Place, Shard, ShardError
from murmuration.data.store.stored import Stored
from murmuration.data.store.tar import shown, split_name

# Which files of a folder are records, in which order, and of which class.
#
# Symbolic links are followed, but nothing is counted twice: a folder or a file that can be reached in two ways is
# refused, which also ends every loop. Hidden files and files with other extensions are not records; `ignored_files`
# counts the latter.

IMAGES = (".jpg", ".jpeg", ".png", ".webp")
NO_FILE = "pipe or device"
_SHOWN = 5
_SPLITS = {"train", "val", "valid", "validation", "test", "train_mini", "train2017", "val2017", "test2017"}

# auto: recognised from the folder. top: the first folder is the class (torchvision's ImageFolder, ImageNet,
# iNaturalist). leaf: the whole path of folders is the class (Places365: a/abbey). none: no classes.
Rule = Literal["auto", "top", "leaf", "none"]


@dataclass(frozen=True, slots=True)
class ImageFile:
    """`name` is the path below the root, as bytes, because file names need not be text."""

    group: str
    name: bytes
    size: int
    mode: int


def list_images(root: Path, rule: Rule = "auto") -> tuple[list[ImageFile], bool]:
    """The records, sorted by class and path, and whether they have classes."""
    found = [(name, state) for name, state in _walk(root) if state is not None and _is_image(name)]
    if not found:
        others = Counter(extension(name) for name in ignored_names(root))
        but = f", but {most_common(others)}" if others else ""
        raise ShardError(
            f"{root}: neither tar shards nor images ({', '.join(IMAGES)}) in this folder{but}; name another"
        )
    chosen = _recognise(root, [name for name, _ in found]) if rule == "auto" else rule
    files = [ImageFile(_group(name, chosen), name, state.st_size, state.st_mode) for name, state in found]
    if chosen != "none" and (loose := next((file for file in files if not file.group), None)):
        raise ShardError(
            f"{root / os.fsdecode(loose.name)}: an image beside the class folders has no class; move it, or "
            "index the folder with --classes none"
        )
    if chosen == "top":
        # torchvision numbers all class folders and refuses empty ones; skipping one would shift the labels after it.
        groups = {file.group for file in files}
        with os.scandir(root) as entries:
            folders = {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
        if empty := min(folders - groups, default=None):
            raise ShardError(f"{root / empty}: no image in this class folder; remove it, or pass --classes none")
    return sorted(files, key=lambda file: (os.fsencode(file.group), file.name)), chosen != "none"


def ignored_names(root: Path) -> Iterator[str]:
    """The paths below the root of files that are not records; what is no file at all goes by the name of its kind."""
    for name, state in _walk(root):
        if state is None or not _is_image(name):
            yield NO_FILE if state is None else os.fsdecode(name)


def extension(name: str) -> str:
    """The extension, safe to print: `.dcm`, `.tar.gz`, or the whole name if there is none."""
    stem, last = os.path.splitext(os.path.basename(name).lower())
    before = os.path.splitext(stem)[1]
    return shown(before + last if before == ".tar" else last or stem)


def most_common(files: Counter[str]) -> str:
    """How many files, and of which extensions: 3 files (2 .dcm, 1 .csv)."""
    named = ", ".join(f"{count} {what}" for what, count in files.most_common(_SHOWN))
    return f"{files.total()} {'file' if files.total() == 1 else 'files'} ({named})"


def _walk(root: Path) -> Iterator[tuple[bytes, os.stat_result | None]]:
    """Paths below the root and states of all files that are not hidden; None for a pipe, a socket or a device."""
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
            raise ShardError(f"{os.fsdecode(error.filename or root)}: {error.strerror}; repair or remove it") from error
        for entry, state in states:
            path = os.path.join(folder, entry.name)
            if stat.S_ISDIR(state.st_mode):
                if (twin := folders.setdefault(_identity(state), path)) is not path:
                    raise _reached_twice(root, twin, path)
                waiting.append(path)
            elif stat.S_ISREG(state.st_mode):
                if (twin := linked.setdefault(_identity(state), path)) is not path:
                    raise _reached_twice(root, twin, path)
                yield path, state
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
        raise ShardError(f"{root}: contains splits ({shown}), not classes; name one, such as {root / min(tops)}")
    # Places365 sorts its classes into one folder per letter.
    by_letter = all(len(top) == 1 and top.isalpha() for top in tops) and all(name.count(b"/") >= 2 for name in names)
    return "leaf" if by_letter else "top"


NAMES, ROWS, DIGESTS = "names.bin", "files.npy", "digests.npy"
_ROW = np.dtype([("end", "<u8"), ("size", "<u8")])
_DIGEST_BYTES = 16


def build_folder(
    folder: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    rule: Rule = "auto",
    contents: bool = False,
    refuse_twins: bool = False,
    unit: str | None = None,
    missing: Missing = "refuse",
    leave_salt: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> FolderIndex:
    """Index the images below `folder` into `target` (default: `<folder>.index`).

    `refuse_twins` refuses two files of equal content and implies `contents`. `unit` and `missing` as in the index of
    shards; a picture's key is its path below the folder. `leave_salt`: the index outlives this process, and its salt
    is left beside the pictures for others.
    """
    root = Path(os.path.realpath(folder))
    out = Path(os.path.realpath(target)) if target is not None else root.with_name(root.name + BESIDE)
    unit, missing = _unit_by_path(unit, missing, out)
    files, labelled = list_images(root, rule)
    paths = [root / os.fsdecode(file.name) for file in files]
    digests = _hash_all(paths, progress or (lambda done, total: None)) if contents or refuse_twins else None
    if refuse_twins and digests is not None:
        _refuse_twins(paths, digests)
    folders = {path.parent for path in paths}
    mode = mode_between((file.mode for file in files), folders)
    make_folder(out, mode)
    _write_columns(out, files, digests, mode)
    shards = list(_classes(files, digests))
    write_manifest(out, FILES, root, shards, {"labelled": labelled, "contents": digests is not None}, mode)
    if unit is not None:
        write_units(out, digest_of(FILES, shards), unit, missing, _units_of(files, unit), len(files))
    try:
        make_salt(out, folders_of(root) if leave_salt else ())
    except OSError as error:
        raise cannot_write(out / SALT, error) from error
    return FolderIndex.open(out)


def _unit_by_path(unit: str | None, missing: Missing, out: Path) -> tuple[str | None, Missing]:
    """The unit that is asked for, or else the one that the index had."""
    if unit is None and (kept := unit_named(out)) is not None:
        unit, missing = kept
    if unit is not None and pattern_of(unit) is None:
        raise ShardError(
            f"--unit {unit}: single images have no .json with such a field; name a pattern of their paths, such as "
            "--unit 'key:[^_]+', or pack them with the table that names it: prepare.py pack --unit"
        )
    return unit, missing


def _write_columns(target: Path, files: list[ImageFile], digests: np.ndarray | None, mode: int) -> None:
    rows = np.zeros(len(files), dtype=_ROW)
    rows["end"] = np.cumsum([len(file.name) for file in files])
    rows["size"] = [file.size for file in files]
    (target / DIGESTS).unlink(missing_ok=True)
    with index_file(target / NAMES, mode) as file:
        file.write(b"".join(image.name for image in files))
    with index_file(target / ROWS, mode) as file:
        np.save(file, rows)
    if digests is not None:
        with index_file(target / DIGESTS, mode) as file:
            np.save(file, digests)


def _units_of(files: list[ImageFile], unit: str) -> Iterator[np.ndarray]:
    pattern = pattern_of(unit)
    assert pattern is not None
    for file in files:
        name = os.fsdecode(file.name)
        yield as_rows(unit_of_key(pattern, (split_name(name) or (name, ""))[0]))


def _classes(files: list[ImageFile], digests: np.ndarray | None) -> Iterator[Shard]:
    first = 0
    for name, group in groupby(files, key=lambda file: file.group):
        members = list(group)
        part = None if digests is None else digests[first : first + len(members)]
        sizes = np.array([file.size for file in members], dtype="<u8")
        sha = _class_digest([file.name for file in members], sizes, part)
        yield Shard(name or ".", len(members), int(sizes.sum()), sha)
        first += len(members)


def _class_digest(names: list[bytes], sizes: np.ndarray, digests: np.ndarray | None) -> str:
    hashed = hashlib.sha256(b"\0".join(names) + b"\0\0" + sizes.astype("<u8").tobytes())
    if digests is not None:
        hashed.update(digests.tobytes())
    return hashed.hexdigest()


def _hash_all(paths: list[Path], progress: Callable[[int, int], None]) -> np.ndarray:
    found = np.zeros((len(paths), _DIGEST_BYTES), dtype=np.uint8)
    progress(0, len(paths))
    with ThreadPoolExecutor(max(4, len(os.sched_getaffinity(0)))) as pool:
        for at, digest in enumerate(pool.map(_hash_file, paths)):
            found[at] = np.frombuffer(digest, dtype=np.uint8)
            progress(at + 1, len(paths))
    return found


def _hash_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()[:_DIGEST_BYTES]
    except OSError as error:
        raise ShardError(f"{path}: cannot be read ({error.strerror}); check the permissions") from error


def _refuse_twins(paths: list[Path], digests: np.ndarray) -> None:
    seen: dict[bytes, Path] = {}
    twins = 0
    example = ""
    for path, digest in zip(paths, digests, strict=True):
        twin = seen.setdefault(digest.tobytes(), path)
        if twin is not path:
            twins += 1
            example = example or f"{twin} and {path}"
    if twins:
        raise ShardError(f"{example}: the same content, one of {twins} such cases; remove all but one of each")


class FolderIndex:
    """The same interface as ShardIndex; each class folder acts as a shard."""

    def __init__(
        self, manifest: Manifest, digest: str, names: np.ndarray, rows: np.ndarray, digests: np.ndarray | None,
        kept: Kept,
    ) -> None:  # fmt: skip
        assert isinstance(manifest.root, Path)
        self.manifest_digest = digest
        """Covers the paths and sizes of all files, and their contents if hashed. Private if the files are."""
        self.folder, self.root = manifest.folder, manifest.root
        self.shards = manifest.shards
        self.records = kept.records
        self.labelled = manifest.head["labelled"]
        self._kept, self._names, self._rows, self._digests = kept, names, rows, digests
        self._without: frozenset[str] = frozenset()
        self._numbers: tuple[int | None, ...] = tuple(range(len(manifest.shards)))
        self._ends = np.cumsum([shard.records for shard in manifest.shards], dtype=np.int64)
        self._checked = bytearray(len(manifest.shards))

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, verify: bool = True, excluded: Handling = "absent") -> FolderIndex:
        """Open an index of single files; each class is compared with the manifest when one of its files is used."""
        manifest = read_manifest(folder)
        if manifest.kind != FILES:
            raise ShardError(f"{manifest.folder}: an index of tar shards, not of single files; name another folder")
        try:
            rows = open_npy(manifest.folder / ROWS)
            names = np.asarray(np.memmap(manifest.folder / NAMES, dtype=np.uint8, mode="r"))
            hashed, labelled = manifest.head["contents"], manifest.head["labelled"]
            if not isinstance(manifest.root, Path) or not isinstance(hashed, bool) or not isinstance(labelled, bool):
                raise ValueError("the manifest is not that of a folder of images")
            digests = open_npy(manifest.folder / DIGESTS) if hashed else None
        except (OSError, ValueError, KeyError) as error:
            raise ShardError(f"{manifest.folder}: the index cannot be read ({error}); {mend(folder)}") from error
        whole = rows.dtype == _ROW and rows.shape == (manifest.records,) and int(rows["end"][-1]) == len(names)
        if digests is not None:
            whole = whole and digests.shape == (manifest.records, _DIGEST_BYTES) and digests.dtype == np.uint8
        if not whole:
            raise ShardError(f"{manifest.folder}: files and manifest do not belong together; {mend(folder)}")
        digest = digest_of(FILES, manifest.shards)
        index = cls(manifest, digest, names, rows, digests, Kept.of(manifest, digest, excluded))
        if not verify:
            index._checked = bytearray(b"\1" * len(manifest.shards))
        return index

    @property
    def excluded_digest(self) -> str:
        """SHA-256 of the list of excluded records; empty if none is excluded. Private."""
        return self._kept.excluded_digest

    @property
    def excluded_by(self) -> str:
        """What the units are named by whose records are excluded together; empty if records are on their own."""
        return self._kept.excluded_by

    @property
    def pinned(self) -> bool:
        """Whether contents are compared at every read, and not sizes alone."""
        return self._digests is not None

    def left_out(self, record: int) -> bool:
        return self._kept.left_out(record)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of their numbers; empty for a folder without classes."""
        names = (shard.name for shard in self.shards) if self.labelled else ()
        return tuple(name for name in names if name not in self._without)

    def numbered_by(self, classes: ClassList) -> FolderIndex:
        """The same records, with classes numbered by that list, whichever folders exist. Classes not on the list have
        no number, so their records are bad where a label is needed."""
        other = copy(self)
        other._numbers = tuple(classes.numbers_in_files.get(shard.name) for shard in self.shards)
        return other

    def without(self, excluded: Collection[str]) -> FolderIndex:
        """The records of all other classes, which are numbered anew, as if those folders were not there."""
        other = copy(self)
        left_out = [shard.name in excluded for shard in self.shards]
        starts = self._ends - [shard.records for shard in self.shards]
        ranges = [np.arange(a, b) for a, b, out in zip(starts, self._ends, left_out, strict=True) if out]
        if not self.labelled or not ranges:
            raise ShardError(f"{self.folder}: none of the classes to leave out is a class folder; name the right list")
        other._kept, other._without = self._kept.without(np.concatenate(ranges)), frozenset(excluded)
        other.records = other._kept.records
        ranks = iter(range(len(self.shards)))
        other._numbers = tuple(None if out else next(ranks) for out in left_out)
        return other

    def locate(self, record: int) -> tuple[Place, int, int]:
        """The file, 0 and its size."""
        found = self.stored(record)
        return found.place, found.start, found.end

    def stored(self, record: int) -> Stored:
        """A record is the file under its extension, and the number of its class as `cls`, like a class in webdataset's
        shards."""
        place, group = self._find(record)
        name = os.fsdecode(self._name(place))
        number = self._numbers[group] if self.labelled else None
        return Stored(
            self.root / name, 0, int(self._rows["size"][place]), name.rpartition(".")[2].lower(),
            None if number is None else str(number).encode(),
            None if self._digests is None else self._digests[place].tobytes(),
        )  # fmt: skip

    def owner(self, record: int) -> str:
        """The class folder: a file name would reveal which record was drawn."""
        return str(self.root / self.shards[self._find(record)[1]].name)

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        return self.stored(record).members(raw, self.owner(record))

    def check_unchanged(self, *, contents: bool = False) -> None:
        """Check that every file is there with its size; with `contents`, also the bytes if they were hashed."""
        for number in range(len(self._rows)):
            path = self.root / os.fsdecode(self._name(number))
            try:
                size = path.stat().st_size
            except OSError as error:
                raise ShardError(f"{path}: gone or unreadable since it was indexed ({error.strerror})") from error
            same = size == int(self._rows["size"][number])
            if same and contents and self._digests is not None:
                same = _hash_file(path) == self._digests[number].tobytes()
            if not same:
                raise ShardError(f"{path}: changed since it was indexed; restore it or run launch/prepare.py index")

    def _find(self, record: int) -> tuple[int, int]:
        """The record's number in the whole list, and its class."""
        number = self._kept.number(record)
        group = int(np.searchsorted(self._ends, number, side="right"))
        self._check(group)
        return number, group

    def _name(self, number: int) -> bytes:
        begin = int(self._rows["end"][number - 1]) if number else 0
        return self._names[begin : int(self._rows["end"][number])].tobytes()

    def _check(self, group: int) -> None:
        if self._checked[group]:
            return
        end = int(self._ends[group])
        first = end - self.shards[group].records
        digests = None if self._digests is None else self._digests[first:end]
        names = [self._name(number) for number in range(first, end)]
        if _class_digest(names, self._rows["size"][first:end], digests) != self.shards[group].sha256:
            raise ShardError(f"{self.folder}: files and manifest do not belong together; {mend(self.root)}")
        self._checked[group] = 1
