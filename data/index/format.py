"""The files of an index: the manifest that pins the set, and the handling of excluded records.

The manifest names every shard with its count, size and hashes. Its digest is the identity of the record set in the
ledger; it covers no location and no time, so it is equal wherever the same shards are stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from murmuration.accounting.errors import written_before
from murmuration.data.index.exclusions import Exclusions
from murmuration.data.store.index_files import index_file, read_json
from murmuration.data.store.place import Place, Shard, ShardError, is_url

FORMAT = 1
BEFORE = 2  # counted on before forms began anew
OFFSETS, MANIFEST, FOLDER = "offsets.npy", "manifest.json", "index"
BESIDE = ".index"  # an index of single files is beside their folder, where it cannot be taken for a class
SHARDS, FILES = "shards", "files"  # what an index is made of
Handling = Literal["absent", "skipped", "ignored"]  # of excluded records; see Kept


def digest_of(kind: str, shards: Iterable[Shard]) -> str:
    """SHA-256 over names, counts, sizes and hashes, one JSON line per shard."""
    hashed = hashlib.sha256(f"murmuration {kind} {FORMAT}\n".encode())
    for shard in shards:
        line = [shard.name, shard.records, shard.bytes, shard.sha256, shard.offsets_sha256]
        hashed.update(json.dumps(line).encode() + b"\n")
    return hashed.hexdigest()


def shared_shard(one: Sequence[Shard], other: Sequence[Shard]) -> Shard | None:
    """The first shard of `other` whose records are also in `one`."""
    contents = {shard.sha256 for shard in one if shard.records}
    return next((shard for shard in other if shard.records and shard.sha256 in contents), None)


def write_manifest(
    target: Path, kind: str, root: Place, shards: Sequence[Shard], extra: dict[str, Any], mode: int
) -> None:
    """One line per shard, so that two manifests can be compared by eye and by diff."""
    where = os.path.relpath(root, target) if isinstance(root, Path) else root
    head = {"format": FORMAT, "kind": kind, "folder": where, "records": sum(shard.records for shard in shards), **extra}
    lines = [json.dumps({key: value for key, value in asdict(shard).items() if value != ""}) for shard in shards]
    with index_file(target / MANIFEST, mode) as file:
        file.write((json.dumps(head)[:-1] + ', "shards": [\n' + ",\n".join(lines) + "\n]}\n").encode())


@dataclass(frozen=True)
class Manifest:
    """`root` is where the shards are now; `head` is the rest of the manifest."""

    folder: Path
    kind: str
    root: Place
    records: int
    shards: tuple[Shard, ...]
    head: dict[str, Any]


def find(folder: str | os.PathLike[str]) -> Path:
    """`folder`, if it is an index, or the one inside or beside it."""
    target = Path(folder)
    beside = Path(f"{os.fspath(folder).rstrip('/')}{BESIDE}")
    return next((each for each in (target, target / FOLDER, beside) if (each / MANIFEST).is_file()), target)


def mend(folder: str | os.PathLike[str]) -> str:
    return f"build it with: {_command(folder)}"


def _command(folder: str | os.PathLike[str]) -> str:
    return f"python launch/prepare.py index {shlex.quote(os.fspath(folder))}"


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    target = find(folder)
    try:
        head: dict[str, Any] = read_json(target / MANIFEST)
        if (number := head["format"]) == BEFORE:
            raise ShardError(written_before(f"{target}: the index", mend(folder)))
        if number != FORMAT:
            named = number if isinstance(number, int) else "unknown"
            raise ShardError(f"{target}: index format {named}, {FORMAT} is needed; {mend(folder)}")
        shards = tuple(shard_of(entry) for entry in head.pop("shards"))
        if head["kind"] not in (SHARDS, FILES):
            raise ValueError("its kind is unknown")
        where = _text(head["folder"])
        root = where if is_url(where) else target / where
        found = Manifest(target, head["kind"], root, _count(head["records"]), shards, head)
    except FileNotFoundError as error:
        if not is_url(name := os.fspath(folder)) and not Path(name).exists():
            raise ShardError(
                f"{name}: no such folder; name another, or put the records there, then {_command(folder)}"
            ) from error
        raise ShardError(f"{target}: no index here; {mend(folder)}") from error
    except ShardError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShardError(f"{target}: the index cannot be read ({error}); {mend(folder)}") from error
    if found.records != sum(shard.records for shard in shards) or not found.records:
        raise ShardError(f"{target}: the manifest contradicts itself; {mend(folder)}")
    return found


def shard_of(entry: Mapping[str, Any]) -> Shard:
    """The shard in one line of a manifest; ValueError or TypeError if the line is not valid."""
    shard = Shard(**entry)
    for text in (shard.name, shard.sha256, shard.offsets_sha256, shard.etag):
        _text(text)
    if not shard.sha256:
        raise ValueError(f"{shard.name!r} has no hash of its content")
    for count in (shard.records, shard.bytes):
        _count(count)
    return shard


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("a name or hash in it is not text")
    try:
        os.fsencode(value)  # JSON can contain half a character, which no file name can
    except UnicodeEncodeError:
        raise ValueError("a name or hash in it is not text") from None
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a count in it is not a whole number of at least 0")
    return value


class Kept:
    """Which records of an index take part, and how they are numbered.

    `absent`: an excluded record keeps its number. It is drawn like any other and contributes nothing, so n does not
    depend on which records are excluded, which is a fact about private records. `skipped`: the remaining records are
    numbered densely, for epochs of public records. `ignored`: as if nothing were excluded.
    """

    def __init__(self, total: int, excluded: Exclusions | None, handling: Handling = "absent") -> None:
        listed = excluded is not None and handling != "ignored"
        self._ids = excluded.ids.astype(np.int64) if excluded is not None and listed else np.zeros(0, dtype=np.int64)
        self.excluded_digest = excluded.digest if excluded is not None and len(self._ids) else ""
        self.excluded_by = excluded.unit if excluded is not None and listed else ""
        self._total, self._dense = total, handling == "skipped"
        self.records = total - len(self._ids) if self._dense else total
        if not self.records:
            raise ShardError("every record is excluded; remove exclusions.npy and exclusions.json")
        # The number of kept records before each excluded one: 8 bytes per excluded record, none per kept one.
        self._before = self._ids - np.arange(len(self._ids))

    @classmethod
    def of(cls, manifest: Manifest, digest: str, handling: Handling) -> Kept:
        wanted = handling != "ignored"
        excluded = Exclusions.read(manifest.folder, digest, manifest.records) if wanted else None
        return cls(manifest.records, excluded, handling)

    def without(self, ids: np.ndarray) -> Kept:
        """With further records skipped: public ones, so that n is the number of the rest."""
        other = copy(self)
        skipped = np.zeros(0, dtype=np.int64) if not self._dense else self._ids
        other._ids, other._dense = np.union1d(skipped, ids), True
        other.records = self._total - len(other._ids)
        if not other.records:
            raise ShardError("every record is of a class that is left out; there is nothing left")
        other._before = other._ids - np.arange(len(other._ids))
        return other

    def below(self, numbers: np.ndarray) -> np.ndarray:
        """The number of ids before each of these places of the whole index."""
        return numbers - np.searchsorted(self._ids, numbers, side="left") if self._dense else numbers

    def number(self, record: int) -> int:
        """The number of a record in the whole index."""
        if not 0 <= record < self.records:
            raise ShardError(f"record {record} is outside 0..{self.records - 1}; the ids belong to another index")
        return int(record) + int(np.searchsorted(self._before, record, side="right")) if self._dense else int(record)

    def left_out(self, record: int) -> bool:
        """Whether this id is an excluded record's, whose slot stays empty. If excluded records are skipped, none is."""
        if self._dense:
            return False
        at = int(np.searchsorted(self._ids, record))
        return at < len(self._ids) and int(self._ids[at]) == record
