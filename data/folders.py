"""Folders of single image files as records: ImageFolder, ImageNet, Places365 and iNaturalist as they are unpacked.

A record is one file; its id is its place in the sorted list of files, frozen in the index together with its size.
Trusted afterwards is that list: files that appear later are no records, one that is gone or of another size stops
the run. Contents are pinned only where the index was made with `contents`, because that reads every file.

`names.bin` holds the paths one after the other, `files.npy` where each ends and how large its file is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import numpy as np

from data.folder_files import ImageFile, Rule, list_images
from data.index_files import index_file, make_folder, open_npy
from data.index_format import (
    BESIDE,
    FILES,
    Kept,
    Manifest,
    Place,
    Shard,
    mend,
    read_manifest,
    write_manifest,
)
from data.tar import ShardError

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
    progress: Callable[[int, int], None] | None = None,
) -> FolderIndex:
    """Index the images below `folder` into `target` (default: `<folder>.index`).

    `refuse_twins` refuses two files of equal content and implies `contents`.
    """
    root = Path(os.path.realpath(folder))
    out = Path(os.path.realpath(target)) if target is not None else root.with_name(root.name + BESIDE)
    files, labelled = list_images(root, rule)
    paths = [root / os.fsdecode(file.name) for file in files]
    digests = _hash_all(paths, progress or (lambda done, total: None)) if contents or refuse_twins else None
    if refuse_twins and digests is not None:
        _refuse_twins(paths, digests)
    rows = np.zeros(len(files), dtype=_ROW)
    rows["end"] = np.cumsum([len(file.name) for file in files])
    rows["size"] = [file.size for file in files]
    make_folder(out)
    (out / DIGESTS).unlink(missing_ok=True)
    with index_file(out / NAMES) as file:
        file.write(b"".join(image.name for image in files))
    with index_file(out / ROWS) as file:
        np.save(file, rows)
    if digests is not None:
        with index_file(out / DIGESTS) as file:
            np.save(file, digests)
    shards = list(_classes(files, digests))
    write_manifest(out, FILES, root, shards, {"labelled": labelled, "contents": digests is not None})
    return FolderIndex.open(out)


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
    with ThreadPoolExecutor(max(4, os.cpu_count() or 1)) as pool:
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
    """The same interface as ShardIndex; each class folder plays a shard."""

    def __init__(self, manifest: Manifest, names: np.ndarray, rows: np.ndarray, digests: np.ndarray | None, kept: Kept):
        assert isinstance(manifest.root, Path)
        self.folder, self.root = manifest.folder, manifest.root
        self.shards = manifest.shards
        self.records = kept.records
        self.labelled = manifest.head["labelled"]
        self._kept, self._names, self._rows, self._digests = kept, names, rows, digests
        self._ends = np.cumsum([shard.records for shard in manifest.shards], dtype=np.int64)
        self._checked = bytearray(len(manifest.shards))

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, verify: bool = True, exclusions: bool = True) -> FolderIndex:
        """Open an index of single files; each class is compared with the manifest when one of its files is used."""
        manifest = read_manifest(folder)
        if manifest.kind != FILES:
            raise ShardError(f"{manifest.folder}: an index of tar shards, not of single files; name another folder")
        try:
            rows = open_npy(manifest.folder / ROWS)
            names = np.asarray(np.memmap(manifest.folder / NAMES, dtype=np.uint8, mode="r"))
            hashed, labelled = manifest.head["contents"], manifest.head["labelled"]
            if not isinstance(manifest.root, Path) or not isinstance(hashed, bool) or not isinstance(labelled, bool):
                raise ValueError("the manifest is none of a folder of images")
            digests = open_npy(manifest.folder / DIGESTS) if hashed else None
        except (OSError, ValueError, KeyError) as error:
            raise ShardError(f"{manifest.folder}: the index cannot be read ({error}); {mend(folder)}") from error
        whole = rows.dtype == _ROW and rows.shape == (manifest.records,) and int(rows["end"][-1]) == len(names)
        if digests is not None:
            whole = whole and digests.shape == (manifest.records, _DIGEST_BYTES) and digests.dtype == np.uint8
        if not whole:
            raise ShardError(f"{manifest.folder}: files and manifest do not belong together; {mend(folder)}")
        index = cls(manifest, names, rows, digests, Kept.of(manifest, exclusions))
        if not verify:
            index._checked = bytearray(b"\1" * len(manifest.shards))
        return index

    @property
    def manifest_digest(self) -> str:
        """Paths and sizes of all files, their contents where hashed, and what is left out."""
        return self._kept.digest

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of their numbers; none for a folder without classes."""
        return tuple(shard.name for shard in self.shards) if self.labelled else ()

    def locate(self, record: int) -> tuple[Place, int, int]:
        """The file, 0 and its size."""
        number, _ = self._find(record)
        return self.root / os.fsdecode(self._name(number)), 0, int(self._rows["size"][number])

    def owner(self, record: int) -> str:
        """The class folder: a file name would tell which record was drawn."""
        return str(self.root / self.shards[self._find(record)[1]].name)

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        """The file under its extension, and the number of its class as `cls`, like a class in webdataset's shards."""
        number, group = self._find(record)
        same = len(raw) == int(self._rows["size"][number])
        if same and self._digests is not None:
            same = hashlib.sha256(raw).digest()[:_DIGEST_BYTES] == self._digests[number].tobytes()
        if not same:
            raise ShardError(f"{self.owner(record)}: a file changed since it was indexed; restore it or index anew")
        suffix = os.fsdecode(self._name(number)).rpartition(".")[2].lower()
        return {suffix: raw, "cls": str(group).encode()} if self.labelled else {suffix: raw}

    def check_unchanged(self, *, contents: bool = False) -> None:
        """Every file is there with its size; with `contents`, where they were hashed, their bytes too."""
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
        """Number in the whole list, and class."""
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
