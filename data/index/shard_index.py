"""Where every record of a set of tar shards begins: 8 bytes per record, plus a manifest that pins the set.

n, the number of records, is a public constant of the privacy claim and comes from here, never from a person.
Anything that would make n or the identity of a record doubtful (a cut shard, a hole, a key or a shard that occurs
twice) is refused when the index is built, because nobody would notice it later.

`offsets.npy` contains, shard after shard, the start of each record and then the end of the last one. It is
memory-mapped; the shards themselves never are (one page fault at a time is ten times slower than `pread`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from itertools import takewhile
from pathlib import Path

import numpy as np

from murmuration.data.decode.fields import ClassFilter
from murmuration.data.index.build import Wanted, write_index
from murmuration.data.index.census import beside_shards
from murmuration.data.index.format import (
    FOLDER,
    OFFSETS,
    SHARDS,
    Handling,
    Kept,
    Manifest,
    digest_of,
    mend,
    read_manifest,
    shared_shard,
)
from murmuration.data.index.salt import SALT, folders_of, make_salt
from murmuration.data.index.scan import scan
from murmuration.data.store.index_files import cannot_write, open_npy
from murmuration.data.store.place import Place, Shard, ShardError, is_url, join, require_no_access
from murmuration.data.store.stored import Stored
from murmuration.data.store.tar import parse

__all__ = ["ShardIndex", "Wanted", "build", "expand", "shared_shard"]

# Offsets up to this size are checked when the index is opened; larger ones shard by shard on first use.
_CHECK_AT_ONCE = 64 << 20
_DIGITS = re.compile("[0-9]{1,20}")
_MOST_SHARDS = 10_000_000  # that one range may name


def expand(pattern: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Place]:
    """Shards named by a folder (its *.tar, sorted), by braces (`{000000..000019}`, `{a,b}`) or by a list."""
    if not isinstance(pattern, str | os.PathLike):
        return [place for each in pattern for place in expand(each)]
    text = os.fspath(pattern)
    if is_url(text):
        require_no_access(text)
    elif os.path.isdir(text):
        found = sorted(Path(text).glob("*.tar"))
        if not found:
            raise ShardError(f"{text}: no *.tar in this folder; name the folder that contains the shards")
        return list[Place](found)
    return [each if is_url(each) else Path(each) for each in _braces(text)]


def _braces(text: str) -> list[str]:
    start, end = text.find("{"), text.find("}")
    if start < 0 or end < start:
        return [text]
    inside, tail = text[start + 1 : end], _braces(text[end + 1 :])
    first, dots, last = inside.partition("..")
    if not dots:
        choices = inside.split(",")
    elif _DIGITS.fullmatch(first) and _DIGITS.fullmatch(last) and 0 <= int(last) - int(first) < _MOST_SHARDS:
        choices = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        raise ShardError(f"{text}: '{{{inside}}}' is not a range of shards; write it as {{000000..000019}}")
    return [text[:start] + choice + rest for choice in choices for rest in tail]


def build(
    shards: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    folder: str | os.PathLike[str] | None = None,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    wanted: Wanted | None = None,
    tell: Callable[[str], None] | None = None,
) -> ShardIndex:
    """Index the shards into `folder` (default: `index/` beside them) and open the result.

    `tell` gets a sentence for each finding that may be a mistake.
    """
    # Not Path.resolve(), which raises its own error for links that lead in a circle.
    places = [Path(os.path.realpath(place)) if isinstance(place, Path) else place for place in expand(shards)]
    if not places:
        raise ShardError("no shards given; name a folder or a pattern such as data/{000000..000019}.tar")
    root, names = _common_root(places)
    if folder is None and not isinstance(root, Path):
        raise ShardError(f"{root}: the index of remote shards is stored locally; name a folder for it with --out")
    target = Path(os.path.realpath(folder)) if folder is not None else Path(root) / FOLDER
    report, said = progress or (lambda done, total: None), tell or (lambda sentence: None)
    write_index(root, names, target, wanted or Wanted(workers=workers), report, said)
    # All indexes of the same records have one salt: ledgers then name the records alike.
    try:
        make_salt(target, folders_of(root, names))
    except OSError as error:
        raise cannot_write(target / SALT, error) from error
    if isinstance(shards, str | os.PathLike) and os.path.isdir(shards):
        for sentence in beside_shards(Path(shards)):
            said(sentence)
    return ShardIndex.open(target)


def _common_root(places: Sequence[Place]) -> tuple[Place, list[str]]:
    seen: set[Place] = set()
    for place in places:
        if place in seen:
            raise ShardError(f"{place}: listed twice; its records would count twice")
        seen.add(place)
    paths = [place for place in places if isinstance(place, Path)]
    if len(paths) == len(places):
        root = Path(os.path.commonpath([path.parent for path in paths]))
        return root, [path.relative_to(root).as_posix() for path in paths]
    if paths:
        raise ShardError(f"{paths[0]}: local and remote shards in one index; make two indexes, or copy one side")
    urls = [str(place) for place in places]
    folders = [url.split("/")[:-1] for url in urls]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    shared = "/".join(parts[0] for parts in alike)
    if not re.fullmatch(r"[a-z0-9]+://[^/]+.*", shared):
        raise ShardError(f"{urls[0]}: shards from several servers in one index; make one index per server")
    return shared, [url[len(shared) + 1 :] for url in urls]


class ShardIndex:
    """An opened index: the number of records, and where each one is."""

    def __init__(self, manifest: Manifest, digest: str, offsets: np.ndarray, kept: Kept) -> None:
        self.folder = manifest.folder
        self.shards = manifest.shards
        self.root = self.home = manifest.root
        self.records = kept.records
        self.manifest_digest = digest
        """Covers names, counts, sizes and hashes; equal wherever the same shards are. Private if the records are."""
        self._kept = kept
        self.filter: ClassFilter | None = None
        self._offsets = offsets
        self._ends = np.cumsum([shard.records for shard in manifest.shards], dtype=np.int64)
        self._checked = bytearray(len(manifest.shards))

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, verify: bool = True, excluded: Handling = "absent") -> ShardIndex:
        """Open `folder`, an index or a folder of shards that has one.

        `verify` compares each shard's offsets with the manifest, at the latest when one is used. `excluded` is the
        handling of excluded records (see Kept).
        """
        manifest = read_manifest(folder)
        if manifest.kind != SHARDS:
            raise ShardError(f"{manifest.folder}: an index of single files, not of tar shards; name another folder")
        try:
            offsets = open_npy(manifest.folder / OFFSETS)
        except (OSError, ValueError) as error:
            raise ShardError(f"{manifest.folder}: the offsets cannot be read ({error}); {mend(folder)}") from error
        if offsets.dtype != np.dtype("<u8") or offsets.shape != (manifest.records + len(manifest.shards),):
            raise ShardError(f"{manifest.folder}: offsets and manifest do not belong together; {mend(folder)}")
        digest = digest_of(SHARDS, manifest.shards)
        index = cls(manifest, digest, offsets, Kept.of(manifest, digest, excluded))
        if not verify:
            index._checked = bytearray(b"\1" * len(manifest.shards))
        elif offsets.nbytes <= _CHECK_AT_ONCE:
            for shard in range(len(manifest.shards)):
                index._check(shard)
        return index

    @property
    def excluded_digest(self) -> str:
        """SHA-256 of the list of excluded records; empty if none is excluded. Private."""
        return self._kept.excluded_digest

    @property
    def excluded_by(self) -> str:
        """What the units are named by whose records are excluded together; empty if records are on their own."""
        return self._kept.excluded_by

    def left_out(self, record: int) -> bool:
        return self._kept.left_out(record)

    @property
    def shard_ends(self) -> np.ndarray:
        """int64, one per shard: the end of the ids of its records, where those of the next shard begin."""
        return self._kept.below(self._ends)

    def place(self, shard: int) -> Place:
        return join(self.root, self.shards[shard].name)

    def moved(self, root: Path) -> ShardIndex:
        """The same records, read from copies of the shards in another folder, where some may be missing."""
        other = copy(self)
        other.root = root
        return other

    def without(self, classes: ClassFilter) -> ShardIndex:
        """The same slots. That of a record of a class that is left out stays empty: its class is only known once it is
        read."""
        other = copy(self)
        other.filter = classes
        return other

    def takes(self, members: Mapping[str, bytes]) -> bool:
        """Whether a record that was read takes part."""
        return self.filter is None or self.filter.keeps(members)

    def held(self) -> np.ndarray:
        """Whether each shard is there. A file of another size is not a copy of it: ShardError."""
        found = np.zeros(len(self.shards), dtype=bool)
        for number, shard in enumerate(self.shards):
            place = self.place(number)
            if isinstance(place, Path) and place.exists():
                if (size := _size(place)) != shard.bytes:
                    raise ShardError(f"{place}: {size} bytes, but {shard.bytes} were indexed; copy it again")
                found[number] = True
        return found

    def locate(self, record: int) -> tuple[Place, int, int]:
        """The shard, first byte and end of one record."""
        number = self._kept.number(record)
        shard = int(np.searchsorted(self._ends, number, side="right"))
        self._check(shard)
        # Every shard stores one more number than it has records.
        at = number + shard
        return self.place(shard), int(self._offsets[at]), int(self._offsets[at + 1])

    def owner(self, record: int) -> str:
        """The shard that contains the record."""
        return str(self.locate(record)[0])

    def stored(self, record: int) -> Stored | None:
        place, start, end = self.locate(record)
        return Stored(place, start, end) if isinstance(place, Path) else None

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        """The members of the record by suffix."""
        return parse(raw, self.owner(record))

    def check_unchanged(self, *, contents: bool = False) -> None:
        """Check that sizes on disk match the manifest; with `contents` also the bytes (reads everything).

        Remote shards are compared with the manifest at every read, and here only with `contents`.
        """
        for number in range(len(self.shards)):
            self.check_shard(number, contents=contents)

    def check_shard(self, number: int, *, contents: bool) -> None:
        place, shard = self.place(number), self.shards[number]
        size = _size(place) if isinstance(place, Path) else shard.bytes
        if size != shard.bytes or (contents and not _same(place, shard)):
            raise ShardError(f"{place}: changed since it was indexed; restore it or run launch/prepare.py index")

    def _check(self, shard: int) -> None:
        if self._checked[shard]:
            return
        first = int(self._ends[shard]) - self.shards[shard].records + shard
        part = self._offsets[first : int(self._ends[shard]) + shard + 1]
        if hashlib.sha256(part.tobytes()).hexdigest() != self.shards[shard].offsets_sha256:
            raise ShardError(f"{self.folder}: offsets and manifest do not belong together; {mend(self.folder)}")
        self._checked[shard] = 1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ShardError(f"{path}: gone or unreadable since it was indexed ({error.strerror})") from error


def _same(place: Place, shard: Shard) -> bool:
    found = scan(place)
    return found.offsets_sha256 == shard.offsets_sha256 and shard.sha256 in ("", found.sha256)
