"""Where every record of a set of tar shards begins: 8 bytes per record, plus a manifest that pins the set.

n, the number of records, is a public constant of the privacy claim and comes from here, never from a person.
Whatever would make n or the identity of a record doubtful (a cut shard, a hole, a key or a shard that occurs
twice) is refused when the index is built, because nobody notices it later.

`offsets.npy` holds, shard after shard, the start of each record and then the end of the last one. It is
memory-mapped; the shards themselves never are (one page fault at a time is ten times slower than `pread`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np

from data.tar import ShardError, parse, split_name, walk

FORMAT = 1
OFFSETS, MANIFEST, FOLDER = "offsets.npy", "manifest.json", "index"
_CHUNK = 4 << 20
T = TypeVar("T")
# Below this many bytes, starting worker processes costs more than it saves.
_WORTH_PROCESSES = 512 << 20


@dataclass(frozen=True)
class Shard:
    """One line of the manifest."""

    name: str
    records: int
    bytes: int
    sha256: str


def expand(pattern: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Shards named by a folder (its *.tar, sorted), by braces (`{000000..000019}`, `{a,b}`) or by a list."""
    if not isinstance(pattern, str | os.PathLike):
        return [path for each in pattern for path in expand(each)]
    text = os.fspath(pattern)
    if os.path.isdir(text):
        found = sorted(Path(text).glob("*.tar"))
        if not found:
            raise ShardError(f"{text}: no *.tar in this folder; name the folder that holds the shards")
        return found
    return [Path(each) for each in _braces(text)]


def _braces(text: str) -> list[str]:
    start, end = text.find("{"), text.find("}")
    if start < 0 or end < start:
        return [text]
    inside, tail = text[start + 1 : end], _braces(text[end + 1 :])
    first, dots, last = inside.partition("..")
    if not dots:
        choices = inside.split(",")
    elif first.isdigit() and last.isdigit() and int(first) <= int(last):
        choices = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        raise ShardError(f"{text}: '{{{inside}}}' is no range; write it as {{000000..000019}}")
    return [text[:start] + choice + rest for choice in choices for rest in tail]


def scan(path: Path) -> tuple[np.ndarray, int, str]:
    """Record starts and final end, size and SHA-256 of one shard; raises ShardError on anything doubtful."""
    try:
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
            offsets = _record_offsets(file.fileno(), before.st_size, str(path))
            after = os.fstat(file.fileno())
    except OSError as error:
        raise ShardError(
            f"{path}: cannot be read ({error.strerror or error}); check the path and permissions"
        ) from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ShardError(f"{path}: changed while it was being indexed; wait until its writer is done")
    _check_stats(path, len(offsets) - 1)
    return offsets, before.st_size, digest.hexdigest()


def _record_offsets(fd: int, size: int, what: str) -> np.ndarray:
    starts: list[int] = []
    end, key, suffixes = 0, None, set[str]()
    seen: set[str] = set()
    for member in walk(lambda offset, count: os.pread(fd, count, offset), size, what, whole=True):
        parts = split_name(member.name)
        if parts is None:
            continue
        if parts[0] != key:
            key, suffixes = parts[0], set()
            if key in seen:
                raise ShardError(f"{what}: key '{key}' occurs twice; one record would count as two, so rename it")
            seen.add(key)
            starts.append(member.start)
        if parts[1] in suffixes:
            raise ShardError(f"{what}: '{member.name}' occurs twice; write the shard anew")
        suffixes.add(parts[1])
        end = member.end
    return np.array([*starts, end], dtype="<u8")


def _check_stats(path: Path, records: int) -> None:
    """img2dataset leaves a count beside each shard, the only witness against one that ends too early."""
    stats = path.with_name(f"{path.stem}_stats.json")
    if not stats.is_file():
        return
    try:
        expected = json.loads(stats.read_bytes())["successes"]
    except (ValueError, KeyError, TypeError):
        return
    if expected != records:
        raise ShardError(f"{path}: {records} records, but {stats.name} counts {expected}; fetch the shard again")


def build(
    shards: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    folder: str | os.PathLike[str] | None = None,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ShardIndex:
    """Index the shards into `folder` (default: `index/` beside them) and open the result."""
    paths = [path.resolve() for path in expand(shards)]
    if not paths:
        raise ShardError("no shards given; name a folder or a pattern such as data/{000000..000019}.tar")
    if len(set(paths)) != len(paths):
        raise ShardError(f"{_first_repeat(paths)}: listed twice; its records would count twice")
    root = Path(os.path.commonpath([path.parent for path in paths]))
    target = Path(folder).resolve() if folder is not None else root / FOLDER
    parts: list[np.ndarray] = []
    table: list[Shard] = []
    for path, (offsets, size, digest) in zip(paths, _scan_all(paths, workers), strict=True):
        parts.append(offsets)
        table.append(Shard(path.relative_to(root).as_posix(), len(offsets) - 1, size, digest))
        if progress is not None:
            progress(len(parts), len(paths))
    full = [shard for shard in table if shard.records]
    if not full:
        raise ShardError(f"{paths[0]}: no record in any shard; records are members named like 000123.jpg")
    if len({shard.sha256 for shard in full}) != len(full):
        twin = _first_repeat([shard.sha256 for shard in full])
        names = " and ".join(shard.name for shard in full if shard.sha256 == twin)
        raise ShardError(f"{names}: the same bytes; their records would count twice, so remove one")
    target.mkdir(parents=True, exist_ok=True)
    hashed = hashlib.sha256()
    with _atomic(target / OFFSETS) as file:
        shape = (sum(len(part) for part in parts),)
        np.lib.format.write_array_header_1_0(file, {"descr": "<u8", "fortran_order": False, "shape": shape})
        for part in parts:
            hashed.update(part.tobytes())
            file.write(part.tobytes())
    manifest = {
        "format": FORMAT,
        "folder": os.path.relpath(root, target),
        "records": sum(shard.records for shard in table),
        "index_sha256": hashed.hexdigest(),
        "shards": [asdict(shard) for shard in table],
    }
    # Last, so that a kill in between leaves a manifest whose hash does not match: refused, not misread.
    with _atomic(target / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1).encode())
    return ShardIndex.open(target)


def _scan_all(paths: Sequence[Path], workers: int | None) -> Iterator[tuple[np.ndarray, int, str]]:
    total = sum(path.stat().st_size for path in paths if path.is_file())
    wanted = workers if workers is not None else (os.cpu_count() or 1 if total >= _WORTH_PROCESSES else 1)
    if min(wanted, len(paths)) <= 1:
        yield from map(scan, paths)
        return
    with ProcessPoolExecutor(min(wanted, len(paths)), mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(scan, paths)
        finally:
            pool.shutdown(cancel_futures=True)


def _first_repeat(items: Sequence[T]) -> T:
    return next(item for at, item in enumerate(items) if item in items[:at])


@contextmanager
def _atomic(path: Path) -> Iterator[IO[bytes]]:
    """The file appears complete or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


Place = Path | str  # of a shard or a file: a path, or a URL as it is written


class RecordIndex(Protocol):
    """What reading, sampling and training need of an index, whatever its records are made of."""

    folder: Path
    shards: Sequence[Shard]
    records: int

    @property
    def manifest_digest(self) -> str: ...

    def locate(self, record: int) -> tuple[Place, int, int]:
        """Where one record lies: place, first byte, end."""
        ...

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        """The bytes that lie there, taken apart by lower-case suffix; ShardError where they are no such record."""
        ...

    def check_unchanged(self, *, contents: bool = False) -> None: ...


class ShardIndex:
    """An opened index: how many records there are, and where each one lies."""

    def __init__(self, folder: Path, shard_folder: Path, shards: Sequence[Shard], offsets: np.ndarray, digest: str):
        self.folder = folder
        self.shards = tuple(shards)
        self.index_sha256 = digest
        self._paths = [shard_folder / shard.name for shard in shards]
        self._offsets = offsets
        self._ends = np.cumsum([shard.records for shard in shards], dtype=np.int64)
        self.records = int(self._ends[-1])

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, verify: bool = True) -> ShardIndex:
        """Open `folder`, an index or a folder of shards that has one; `verify` re-hashes the offsets."""
        target = Path(folder)
        if not (target / MANIFEST).is_file() and (target / FOLDER / MANIFEST).is_file():
            target = target / FOLDER
        mend = f"build it with: python launch/prepare.py index {folder}"
        try:
            manifest: dict[str, Any] = json.loads((target / MANIFEST).read_bytes())
            if manifest["format"] != FORMAT:
                raise ShardError(f"{target}: index format {manifest['format']}, {FORMAT} is needed; {mend}")
            shards = [Shard(**entry) for entry in manifest["shards"]]
            offsets = np.asarray(np.load(target / OFFSETS, mmap_mode="r"))
        except FileNotFoundError as error:
            raise ShardError(f"{target}: no index here; {mend}") from error
        except ShardError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ShardError(f"{target}: the index cannot be read ({error}); {mend}") from error
        total = sum(shard.records for shard in shards)
        whole = offsets.dtype == np.dtype("<u8") and offsets.shape == (total + len(shards),)
        if whole and verify:
            whole = hashlib.sha256(offsets.data.cast("B")).hexdigest() == manifest["index_sha256"]
        if not whole or manifest["records"] != total or not total:
            raise ShardError(f"{target}: offsets and manifest do not belong together; {mend}")
        return cls(target, target / manifest["folder"], shards, offsets, manifest["index_sha256"])

    @cached_property
    def manifest_digest(self) -> str:
        """SHA-256 over names, counts, sizes and hashes: equal wherever the same shards lie."""
        content = {
            "format": FORMAT,
            "index": self.index_sha256,
            "shards": [asdict(shard) for shard in self.shards],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def locate(self, record: int) -> tuple[Path, int, int]:
        """Shard, first byte and end of one record."""
        if not 0 <= record < self.records:
            raise ShardError(f"record {record} is outside 0..{self.records - 1}; the ids belong to another index")
        shard = int(np.searchsorted(self._ends, record, side="right"))
        # Every shard stores one number more than it has records.
        at = int(record) + shard
        return self._paths[shard], int(self._offsets[at]), int(self._offsets[at + 1])

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        return parse(raw, str(self.locate(record)[0]))

    def check_unchanged(self, *, contents: bool = False) -> None:
        """Sizes on disk are those of the manifest; with `contents` the hashes too (reads everything)."""
        for path, shard in zip(self._paths, self.shards, strict=True):
            try:
                size = path.stat().st_size
            except OSError as error:
                raise ShardError(f"{path}: gone or unreadable since it was indexed ({error.strerror})") from error
            if size != shard.bytes or (contents and scan(path)[2] != shard.sha256):
                raise ShardError(f"{path}: changed since it was indexed; restore it or run launch/prepare.py index")
